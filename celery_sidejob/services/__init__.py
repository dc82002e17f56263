"""The loops of a worker. Each does its work in `run_once()`, which returns a report; tests call it directly."""
