"""What one can ask: one function, one transaction."""
