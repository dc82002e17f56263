"""The worker's part beside its runs: pools, fetching, deliveries."""
