"""The heartbeat of a worker in one store, and its duties."""
