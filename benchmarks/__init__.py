"""Measurements of the promises that have a number: `python -m benchmarks`."""
