"""kombu pauses between two tries to connect by the name `sleep` of its own module."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAUSING = """
import sys
from celery import maybe_patch_concurrency
maybe_patch_concurrency(["celery", "worker", "--pool=gevent"])
import gevent
from kombu.utils.functional import retry_over_time
from celery_sidejob.hooks.patches import pools
if sys.argv[1] == "ours":
    pools.pause_in_greenlets()
going_on = gevent.spawn(gevent.sleep, 0.01)
try:
    retry_over_time(lambda: 1 / 0, ZeroDivisionError, max_retries=1, interval_start=1)
except ZeroDivisionError:
    print("went on" if going_on.dead else "stood still")
"""


@pytest.mark.parametrize(("whose", "greenlet"), [("ours", "went on"), ("celery's", "stood still")])
def test_greenlets_go_on_while_kombu_pauses(whose: str, greenlet: str) -> None:
    command = [sys.executable, "-c", PAUSING, whose]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == greenlet
