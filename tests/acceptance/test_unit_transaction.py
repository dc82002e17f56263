"""`job.unit(transaction=…)`: the unit of a run and the caller's own SQL commit together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from celery_sidejob import NO_DATA, IllegalMoveError, Job, Status, current_job
from tests.acceptance.shared_site import Place, SharedSite
from tests.tools.brokers import Broker
from tests.tools.recorder import Record
from tests.tools.workers import Processes

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8

KINDS = ["connection-psycopg", "session-psycopg", "session-psycopg2", "psycopg", "django"]
RESTS = [Status.COMPLETED, Status.FAILED, Status.SUSPENDED, Status.TERMINATED]
TIMEOUT_S = 15.0


class Site(SharedSite):
    """A store, a broker and one worker for all these tests; each looks at jobs of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "units")
        self.engine = create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
        self.outside.execute(
            "CREATE TABLE ledger (id bigint GENERATED ALWAYS AS IDENTITY, job bigint, what text, value int)"
        )

    def run(self, task: str, *args: Any, values: tuple[Any, ...] = (1, 2, 3), rest: Any = RESTS) -> Job:
        """Make a job with packets on its port, and wait until it rests."""
        with self.engine.begin() as connection:
            job = self.sidejob.enqueue(f"units.{task}", args, transaction=connection)
            job.input("a").write_many(values, transaction=connection)
        job.wait(rest, timeout=TIMEOUT_S)
        return job

    def ledger(self, job: Job) -> list[tuple[str, int]]:
        """What was entered for a job."""
        rows = self.outside.execute("SELECT what, value FROM ledger WHERE job = %s ORDER BY id", [job.id])
        return [(row[0], row[1]) for row in rows]

    def notes(self, event: str, job: Job) -> list[dict[str, Any]]:
        return self.record.of(event, job=job.id)

    def error(self, job: Job) -> str:
        """What the job failed with."""
        error = job.refresh().info["error"]
        return f"{error['type']}: {error['message']}"


@pytest.fixture(scope="module")
def site(shared_place: Place, worker_pool: str) -> Iterator[Site]:
    made = Site(shared_place)
    pool = "solo" if worker_pool == "prefork" else worker_pool
    shared_place.processes.start_worker("tests.acceptance.units", env=made.env, pool=pool)
    yield made
    made.close()


def waiting(job: Job) -> list[Any]:
    """The packets that the job has not consumed."""
    return [packet.value for packet in job.input("a").peek()]


def written(job: Job) -> list[Any]:
    return [packet.value for packet in job.output("out").peek()]


def bystander(site: Site) -> Job:
    """A job that rests and can be woken."""
    return site.sidejob.enqueue("units.child").wait(timeout=TIMEOUT_S)


# -- together or not at all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_everything_commits_together(site: Site, kind: str) -> None:
    other = bystander(site)
    job = site.run("together", kind, other.id)

    assert job.status == Status.COMPLETED, site.error(job)
    assert site.ledger(job) == [("sum", 6)]
    assert (waiting(job), written(job), job.state) == ([], [6], {"total": 6})
    assert job.aliases == [f"alias{job.id}"]
    assert job.children["child"].wait(timeout=TIMEOUT_S).created_by == f"job:{job.id}"
    site.record.wait_for("child", job=other.id, count=2)
    left, committed = site.notes("left", job)[0], site.notes("committed", job)[0]
    assert (left["status"], left["state"], left["children"]) == ("completed", {"total": 6}, ["child"])
    assert (committed["waiting"], committed["state"], committed["children"]) == (0, {"total": 6}, ["child"])


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_rollback_the_run_goes_on_from_before(site: Site, kind: str) -> None:
    other = bystander(site)
    job = site.run("again", kind, other.id)

    assert job.status == Status.COMPLETED, site.error(job)
    assert [line["values"] for line in site.notes("read", job)] == [[1, 2, 3], [1, 2, 3]]
    back = site.notes("back", job)[0]
    assert (back["waiting"], back["state"], back["children"]) == (3, {}, [])
    assert site.ledger(job) == [("sum", 6)]
    assert (waiting(job), written(job), job.state, list(job.children)) == ([], [6], {"total": 6}, ["child"])
    site.record.wait_for("child", job=other.id, count=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_before_the_block_outlives_its_rollback(site: Site, kind: str) -> None:
    job = site.run("given_up", kind)
    assert job.status == Status.COMPLETED, site.error(job)
    assert job.state == {"before": True, "first": 1}
    assert waiting(job) == [2, 3]


@pytest.mark.parametrize("kind", ["connection-psycopg2", "session-psycopg", "psycopg", "django-manual"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_forgotten_commit(site: Site, kind: str, goes_on: bool) -> None:
    job = site.run("forgotten", kind, goes_on)

    assert job.status == Status.FAILED
    assert "still open: commit or roll it back" in site.error(job)
    assert (waiting(job), job.state, site.ledger(job)) == ([1, 2, 3], {}, [])
    assert bystander(site).status == Status.COMPLETED, "the worker goes on"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caught", [False, True])
def test_an_error_inside_the_block(site: Site, kind: str, caught: bool) -> None:
    job = site.run("raising", kind, caught)

    assert site.ledger(job) == []
    if caught:
        assert job.status == Status.COMPLETED, site.error(job)
        assert (waiting(job), job.state) == ([], {"before": True, "after": [1, 2, 3]})
    else:
        assert job.status == Status.FAILED
        assert (waiting(job), job.state) == ([1, 2, 3], {})
        assert site.error(job) == "Refused: inside the block"


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_the_store_refuses(site: Site, kind: str) -> None:
    job = site.run("refused", kind)

    assert job.status == Status.COMPLETED, site.error(job)
    note = site.notes("refused", job)[0]
    assert note["values"] == [1, 2, 3]
    assert note["error"] in {"ChildNameTakenError", "UniqueViolation", "IntegrityError"}
    assert site.ledger(job) == [("kept", 0)], "the caller's transaction was spoiled"
    assert (waiting(job), job.state) == ([], {"after": [1, 2, 3]})


# -- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_several_units_in_one_run(site: Site, kind: str) -> None:
    job = site.run("several", kind)

    assert job.status == Status.COMPLETED, site.error(job)
    assert site.ledger(job) == [("one", 1), ("one", 2), ("one", 3)], "the third was rolled back and read again"
    assert written(job) == [1, 2, 3, "plain", "last"]
    assert (waiting(job), job.state) == ([], {"number": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_the_connection_may_be_in_its_next_transaction(site: Site, kind: str) -> None:
    job = site.run("used_again", kind)
    assert job.status == Status.COMPLETED, site.error(job)
    assert (waiting(job), job.state, site.ledger(job)) == ([], {"values": [1, 2, 3], "more": True}, [])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(site: Site, kind: str) -> None:
    job = site.run("checkpointing", kind)
    assert job.status == Status.COMPLETED, site.error(job)
    assert site.ledger(job) == [("one", 1), ("one", 2), ("one", 3)]
    assert (waiting(job), written(job)) == ([], [1, 2, 3])
    assert site.notes("kept", job)[0]["state"] == {"total": 1}, "what a checkpoint could not commit is still to come"
    assert job.state == {"total": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_inside_a_savepoint_that_is_rolled_back(site: Site, kind: str) -> None:
    job = site.run("savepoint", kind)
    assert job.status == Status.COMPLETED, site.error(job)
    assert site.ledger(job) == [("outer", 0)]
    assert (waiting(job), job.state) == ([], {"after": [1, 2, 3]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["suspend", "retry", "raise", "return"])
def test_a_run_that_ends_just_after_the_commit(site: Site, kind: str, how: str) -> None:
    rest = {"suspend": Status.SUSPENDED, "raise": Status.FAILED}.get(how, Status.COMPLETED)
    job = site.run("ending", kind, how, rest=rest)
    assert site.ledger(job) == [(how, 0)]
    assert (waiting(job), job.state) == ([], {"done": [1, 2, 3]})


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_autocommit_is_refused(site: Site) -> None:
    job = site.run("committing")
    assert job.status == Status.FAILED
    assert "autocommit" in site.error(job)
    assert (waiting(job), job.state) == ([1, 2, 3], {})


def test_a_block_inside_another_is_refused(site: Site) -> None:
    job = site.run("nested", "connection-psycopg")
    assert job.status == Status.FAILED
    assert "still open" in site.error(job)
    assert (waiting(job), job.state) == ([1, 2, 3], {})


def test_outside_of_a_run_there_is_no_unit(site: Site) -> None:
    assert not hasattr(bystander(site), "unit")
    with pytest.raises(IllegalMoveError):
        current_job.unit(transaction=None)


# -- lost runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["session-psycopg", "psycopg"])
def test_a_run_that_is_no_longer_current_writes_nothing(site: Site, kind: str) -> None:
    job = site.run("outdated", kind)
    assert job.status == Status.COMPLETED, site.error(job)
    assert site.ledger(job) == [("told", 0)]
    assert (waiting(job), job.state) == ([1, 2, 3], {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_shutdown_has_units_too(site: Site, kind: str) -> None:
    job = site.run("shut", kind)
    job.terminate()
    job.wait(timeout=TIMEOUT_S)
    assert (job.status, job.state) == (Status.TERMINATED, {"shut": True})
    assert (site.ledger(job), waiting(job)) == ([("shut", 1)], [2, 3])


@pytest.mark.parametrize("kind", ["connection-psycopg", "psycopg"])
def test_a_process_that_dies_around_the_commit(
    kind: str, database_url: str, broker: Broker, record: Record, processes: Processes
) -> None:
    site = Site(Place(database_url, broker, record, processes))
    env = {**site.env, "SIDEJOB_HEARTBEAT_INTERVAL": "0.5"}
    processes.start_worker("tests.acceptance.units", env=env, pool="prefork", concurrency=2)
    for when in ("before", "after"):
        job = site.run("killed", kind, when)
        assert job.status == Status.COMPLETED, site.error(job)
        assert site.ledger(job) == [(when, 1), (when, 2), (when, 3)]
        assert written(job) == [1, 2, 3]
        assert job.input("a").read() is NO_DATA
        assert job.info["run_no"] == 2
    site.close()
