"""The run in progress: what it has read, and what it will write at its next commit."""
