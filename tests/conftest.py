"""The fixtures that all tests share."""

pytest_plugins = ["tests.tools.recorder", "tests.tools.servers", "tests.tools.workers"]
