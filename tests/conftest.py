"""The fixtures that all tests share."""

import signal

pytest_plugins = [
    "tests.tools.crash_points",
    "tests.tools.in_process",
    "tests.tools.recorder",
    "tests.tools.servers",
    "tests.tools.workers",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
