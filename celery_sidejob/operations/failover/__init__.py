"""Failover stores: where a store is away durable tasks go to the next one, and of two copies one runs."""
