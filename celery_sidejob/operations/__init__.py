"""The operations: one function, one transaction."""
