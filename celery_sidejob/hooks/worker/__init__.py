"""What a worker does for us beside its runs: steps, pools, fetching."""
