"""What machines share that do the same with the store and with a plain model in memory, and compare the two."""
