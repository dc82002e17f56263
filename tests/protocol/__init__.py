"""The protocol on a real Postgres: its traces one by one, and the plans of its statements."""
