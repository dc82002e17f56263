"""The caller's transactions, in which our statements run too."""
