"""The fixtures that all tests share."""

import os
import signal

import kombu
import pytest

pytest_plugins = [
    "tests.tools.apps",
    "tests.tools.brokers",
    "tests.tools.crash_points",
    "tests.tools.few",
    "tests.tools.first",
    "tests.tools.in_process",
    "tests.tools.matrix",
    "tests.tools.recorder",
    "tests.tools.servers",
    "tests.tools.workers",
]

collect_ignore_glob = [] if kombu.VERSION[:2] >= (5, 7) else ["transport/*test_*.py", "test_parity_page.py"]
"""`sidejob://` and `sidejobpg://` need kombu 5.7. A `*` stands for folders, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pools", default="prefork", help="pools on which the acceptance tests run: prefork,solo,threads,gevent"
    )


os.environ.setdefault("SIDEJOB_TEST_PATIENCE", "4")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
