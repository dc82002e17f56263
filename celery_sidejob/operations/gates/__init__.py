"""The gates before a run: managed queues and capacity pools."""
