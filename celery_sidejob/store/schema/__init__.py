"""The schema in the store: making and upgrading it, checking it, its tables and the rights in them."""
