"""Handles: what users hold of jobs and their ports, and what a body is given."""
