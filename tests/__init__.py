"""A package, so that processes started by tests can import the test modules by the names pytest gives them."""
