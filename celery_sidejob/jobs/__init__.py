"""Handles of jobs and ports, for users, and the running job, for a task's body."""
