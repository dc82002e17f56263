"""The checks of `doctor` in a store. They only read; the running side never imports this."""
