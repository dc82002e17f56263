"""The sweeper and its duties, one file each; `duties.py` is the list."""
