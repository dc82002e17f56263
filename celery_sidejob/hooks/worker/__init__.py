"""What a worker does for us beside its runs: pools, fetching, deliveries."""
