"""The schema in the store: its migrations, its checks, its tables and their rights."""
