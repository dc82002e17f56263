"""Ports, channels and units on a real Postgres, compared step by step with a plain model in memory."""
