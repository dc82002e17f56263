"""The sweeper and its duties, by subject; `sweeper.py` has the list."""
