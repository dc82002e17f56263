"""The changes of one commit: jobs and their families, ports, channels, dependencies, batches and trees."""
