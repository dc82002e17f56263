"""What a project's own tests need of `SideJob`: to make the schema in a database of theirs, and to let go of it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from celery import Celery

from celery_sidejob import SchemaError, SideJob, sidejob_task
from tests.tools.apps import make_app
from tests.tools.waiting import wait_until


@sidejob_task(name="extension.nothing")
def nothing(job: object) -> None:
    """Do nothing."""


@pytest.fixture
def sidejob(empty_database_url: str) -> Iterator[SideJob]:
    """An app whose store has no schema yet."""
    app = make_app("extension", sidejob_database_url=empty_database_url)
    made = app.sidejob
    yield made
    made.close()
    app.close()


def test_the_schema_is_made_and_brought_up_to_date(sidejob: SideJob) -> None:
    with pytest.raises(SchemaError, match="db upgrade"):
        sidejob.check_schema()
    sidejob.upgrade_schema()
    sidejob.upgrade_schema()
    sidejob.check_schema()
    assert sidejob.enqueue("extension.nothing").status == "queued"


def test_the_schema_is_that_of_this_app_and_broker(sidejob: SideJob, empty_database_url: str) -> None:
    sidejob.upgrade_schema()
    other = Celery("other", broker="memory://", set_as_current=False)
    other.conf.sidejob_database_url = empty_database_url
    with pytest.raises(SchemaError, match="other"):
        SideJob(other).upgrade_schema()


def test_after_close_nobody_is_connected_until_the_next_use(sidejob: SideJob, empty_database_url: str) -> None:
    sidejob.upgrade_schema()

    def connected() -> int:
        with psycopg.connect(empty_database_url) as connection:
            found = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
            assert found is not None
            return int(found[0])

    job = sidejob.enqueue("extension.nothing")
    wait_until(lambda: connected() == 1, message="the connection of the call, and no other")
    sidejob.close()
    sidejob.close()
    wait_until(lambda: connected() == 0, timeout=3, message="the connection to be closed")
    assert job.refresh().status == "queued"


def test_options_of_the_url_hold_for_every_connection(empty_database_url: str) -> None:
    joint = "&" if "?" in empty_database_url else "?"
    app = make_app("named", sidejob_database_url=f"{empty_database_url}{joint}application_name=the_shop")
    sidejob = app.sidejob
    sidejob.upgrade_schema()

    def names() -> set[str]:
        with psycopg.connect(empty_database_url) as connection:
            found = connection.execute(
                "SELECT application_name FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchall()
        return {name for (name,) in found}

    for _ in range(2):
        sidejob.enqueue("extension.nothing")
        wait_until(lambda: names() == {"the_shop"}, message="a connection of that name, and no other")
        sidejob.close()  # the next is a new one
    app.close()


def test_the_beat_entry_polls_and_is_worthless_after_its_interval(empty_database_url: str) -> None:
    app = make_app(
        "polled", sidejob_database_url=empty_database_url, sidejob_poll_interval=40, sidejob_poll_queue="sweep"
    )
    app.finalize()

    entry = app.conf.beat_schedule["celery-sidejob-poll"]
    assert (entry["task"], entry["schedule"]) == ("celery_sidejob.poll", 40)
    assert (entry["options"]["queue"], entry["options"]["expires"]) == ("sweep", 36)
    assert entry["task"] in app.tasks


def test_what_has_not_been_used_may_be_closed() -> None:
    SideJob().close()
