"""Giving messages to the broker, and looking for them there."""
