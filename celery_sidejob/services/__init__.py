"""The loops a worker runs. Each does its work in `run_once()`, which returns a report and is what tests call."""
