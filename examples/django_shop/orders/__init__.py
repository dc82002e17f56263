"""Orders: what is sold, and what has become of it."""
