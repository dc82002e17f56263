"""Asks that were only noted are applied after the commit that noted them, and cannot make its call fail any more."""

from __future__ import annotations

import pytest

from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from tests.tools.in_process import Stage

DENY = """
CREATE FUNCTION deny() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'denied'; END $$;
CREATE TRIGGER deny BEFORE DELETE ON timers FOR EACH ROW EXECUTE FUNCTION deny()"""


def test_an_ask_that_cannot_be_applied_is_left_to_the_sweeper(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    subscriber = stage.job(inports={"i": {"channels": ["/c"]}})
    stage.drain()
    with stage.connect() as other, other.transaction():
        other.execute("SELECT FROM jobs WHERE id = %s FOR NO KEY UPDATE", [subscriber.id])
        assert stage.sidejob.publish("/c", 1) == 1

    stage.sql(DENY)
    try:
        apply_noted_asks(stage.runtime, [subscriber.id])
    finally:
        stage.sql("DROP FUNCTION deny CASCADE")
    assert f"The ask of job {subscriber.id} is noted, and the sweeper applies it: denied" in caplog.text
    assert subscriber.refresh().status == "completed"

    assert stage.sidejob.poll().timers == 1
    assert subscriber.refresh().status == "queued"
