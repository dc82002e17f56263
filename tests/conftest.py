"""The fixtures that all tests share."""

pytest_plugins = ["tests.tools.in_process", "tests.tools.recorder", "tests.tools.servers", "tests.tools.workers"]
