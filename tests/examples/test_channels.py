"""The example of four summing jobs that are wired by channels."""

from __future__ import annotations

from pathlib import Path

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


class Channels(Shop):
    """`examples/channels`."""

    celery_app = "channels"


def test_four_summing_jobs_wired_by_channels_give_14(
    tmp_path: Path, processes: Processes, empty_database_url: str
) -> None:
    channels = Channels("channels", tmp_path, processes, empty_database_url)
    channels.celery("sidejob", "db", "upgrade")
    for name in ("one", "two"):
        channels.worker(name)

    assert channels.run("python", "channels.py", "1", "2", "4") == "14\n"

    assert channels.sql("SELECT count(*) FROM sidejob.dead") == [(0,)]
    # A packet that comes in the middle of the run that reads it asks for one more, which finds nothing and rests.
    assert {*channels.sql("SELECT DISTINCT status FROM sidejob.jobs")} <= {("completed",), ("suspended",)}
