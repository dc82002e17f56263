"""The fixtures that all tests share."""

import signal

import pytest

pytest_plugins = [
    "tests.tools.brokers",
    "tests.tools.crash_points",
    "tests.tools.in_process",
    "tests.tools.matrix",
    "tests.tools.recorder",
    "tests.tools.servers",
    "tests.tools.workers",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pools", default="prefork", help="pools on which the acceptance tests run: prefork,solo,threads,gevent"
    )


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
