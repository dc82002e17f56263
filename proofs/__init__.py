"""Trials of the promises that run longer than the tests: `python -m proofs`."""
