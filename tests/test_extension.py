"""What a project's own tests need of `SideJob`: to make the schema in a database of theirs, and to let go of it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from celery import Celery

from celery_sidejob import SchemaError, SideJob, sidejob_task
from tests.tools.waiting import wait_until


@sidejob_task(name="extension.nothing")
def nothing(job: object) -> None:
    """Do nothing."""


@pytest.fixture
def sidejob(empty_database_url: str) -> Iterator[SideJob]:
    """An app whose store has no schema yet."""
    app = Celery("extension", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = empty_database_url
    made = SideJob(app)
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


def test_what_has_not_been_used_may_be_closed() -> None:
    SideJob().close()
