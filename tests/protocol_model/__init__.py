"""The explicit-state model of one job's protocol, and what it is explored for."""
