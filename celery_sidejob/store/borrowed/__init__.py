"""Transactions of the caller's, in which our statements run too."""
