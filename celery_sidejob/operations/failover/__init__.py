"""Failover stores: durable tasks go to the next store when one is unavailable, and of two copies only one runs."""
