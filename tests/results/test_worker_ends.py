"""Results that the worker keeps in the statement that ends many runs: whatever befalls one, the others are kept."""

from __future__ import annotations

import psycopg
import pytest
from celery import states

from tests.results.conftest import Rows, Site
from tests.tools.brokers import in_postgres
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient, wait_until
from tests.tools.workers import Processes

TIMEOUT_S = patient(20)

REFUSE = """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.key = 'task:refused' AND NEW.state = 'SUCCESS' THEN RAISE EXCEPTION 'not this one'; END IF;
    RETURN NEW;
END $$"""


@pytest.mark.parametrize(
    ("broker", "kind"), [pytest.param("postgres", "durable.part", marks=KOMBU_5_7), ("redis", "job.part")]
)
def test_a_result_that_postgres_refuses_fails_its_task_and_no_other(
    database_url: str, redis_url: str, record: Record, processes: Processes, rows: Rows, broker: str, kind: str
) -> None:
    site = Site(database_url, in_postgres(database_url) if broker == "postgres" else redis_url, record, processes)
    rows.run(REFUSE)
    rows.run("CREATE TRIGGER refuse BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION refuse()")
    told = [
        site.sig(kind, number).apply_async(task_id="refused" if number == 5 else f"fine {number}")
        for number in range(20)
    ]
    worker = site.start()
    for number, result in enumerate(told):
        result.get(timeout=TIMEOUT_S, propagate=False)
        assert result.state == (states.FAILURE if number == 5 else states.SUCCESS)
    assert "cannot be stored" in str(told[5].result)
    wait_until(lambda: not rows.all("SELECT FROM messages"), timeout=TIMEOUT_S)
    assert len(rows.all("SELECT FROM dead")) == 1
    assert worker.alive
    site.close()


def test_a_burial_by_the_worker_goes_on_without_a_result_that_is_refused(site: Site, rows: Rows) -> None:
    rows.run("ALTER TABLE results ADD CONSTRAINT none CHECK (false)")
    worker = site.start()
    result = site.sig("durable.limited").delay()
    site.record.wait_for("begun", timeout=TIMEOUT_S)
    result.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: rows.all("SELECT reason FROM dead"), timeout=TIMEOUT_S, message="the burial")
    assert (rows.all("SELECT FROM messages"), result.state, worker.alive) == ([], states.PENDING, True)


def test_a_burial_by_the_worker_waits_for_a_locked_result_and_nothing_else_does(
    site: Site, rows: Rows, database_url: str
) -> None:
    site.start(concurrency=2)
    result = site.sig("durable.limited").delay()
    site.record.wait_for("begun", timeout=TIMEOUT_S)
    with psycopg.connect(direct(database_url), options="-c search_path=sidejob") as locking:
        locking.execute("INSERT INTO results (key, state, body) VALUES (%s, 'MINE', '')", [f"task:{result.id}"])
        result.revoke(terminate=True, signal="SIGKILL")
        wait_until(lambda: rows.all("SELECT FROM pg_locks WHERE NOT granted"), timeout=TIMEOUT_S, message="a wait")
        for kind in ("durable.part", "job.part"):
            assert site.sig(kind, 7).delay().get(timeout=TIMEOUT_S) == 7
        assert (rows.all("SELECT FROM dead"), result.state) == ([], states.PENDING)
        locking.rollback()
    result.get(timeout=TIMEOUT_S, propagate=False)
    assert (result.state, len(rows.all("SELECT FROM dead"))) == (states.REVOKED, 1)
