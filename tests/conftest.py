"""The fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import kombu
import pytest

pytest_plugins = [
    "tests.tools.apps",
    "tests.tools.brokers",
    "tests.tools.crash_points",
    "tests.tools.few",
    "tests.tools.first",
    "tests.tools.in_process",
    "tests.tools.counting",  # imports the one above
    "tests.tools.lent_rabbitmq",
    "tests.tools.matrix",
    "tests.tools.recorder",
    "tests.tools.servers",
    "tests.tools.workers",
]

collect_ignore_glob = [] if kombu.VERSION[:2] >= (5, 7) else ["transport/*test_*.py", "test_parity_page.py"]
"""`sidejob://` and `sidejobpg://` need kombu 5.7. A `*` stands for folders, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pools",
        default="prefork",
        help="pools on which the acceptance tests run: prefork,solo,threads,gevent,asyncio,awaited",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have Python's garbage collector leave alone what is collected here: ten thousand tests, and all their modules.

    It would look through them again and again while they are made, which takes a third of the time, and once more each
    time that a test leaves garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:  # the process that prints, and none of those that `-n` starts
        session.config.pluginmanager.register(_FailedNow(terminal))


class _FailedNow:
    """Tells of a failure when it happens: a run that is cut off prints no summary, and would have told nothing."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            why = report.longreprtext.strip().rsplit("\n\n", 1)[-1]
            self._terminal.write_line(
                f"\n{report.nodeid} failed ({report.when}, {report.duration:.0f} s)\n{why[-2000:]}"
            )


os.environ.setdefault("SIDEJOB_TEST_PATIENCE", "4")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
