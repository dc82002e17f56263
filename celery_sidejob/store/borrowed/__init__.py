"""The caller's transactions, in which our statements can run."""
