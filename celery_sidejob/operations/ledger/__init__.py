"""The rows of durable tasks: kept, locked, ended and buried."""
