"""`doctor`: each thing that can be wrong is found, graded, explained, and gone again when it is put right."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from urllib.parse import urlsplit

import kombu
import psycopg
import pytest
import redis
from celery import Celery

from celery_sidejob import RunningJob, SettingsError
from celery_sidejob.embedded import Valkey
from celery_sidejob.examination import Diagnosis
from celery_sidejob.hooks import announcing
from celery_sidejob.hooks.broker import broker_check
from celery_sidejob.model.finding import Finding, Level
from celery_sidejob.operations import waiting
from celery_sidejob.store import registry, stats, workers
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.schema import migrate
from celery_sidejob.store.stats import Count
from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.commands import ask
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.roles import a_role
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until


def findings(stage: Stage, *, thorough: bool = False) -> dict[str, list[Finding]]:
    """What is found in the store, by what was looked at."""
    found: dict[str, list[Finding]] = {}
    for finding in Diagnosis(stage.runtime, stage.sidejob.owner).findings(thorough=thorough):
        if finding.level != Level.OK:
            assert finding.meaning, finding
            assert finding.remedy, finding
        found.setdefault(finding.check, []).append(finding)
    return found


def serve_task(stage: Stage) -> None:
    registry.register(stage.runtime.connections, [{"task": "stage.idle", "queue": "celery", "options": "{}"}])


def levels(stage: Stage, check: str, **how: bool) -> list[str]:
    return [str(finding.level) for finding in findings(stage, **how)[check]]


def vacuum(stage: Stage) -> None:
    """Remove the dead rows that the tests before left in this database: autovacuum may be minutes away.

    Empty pages go too: of a table with many of them, where autovacuum could not cut them off, only a sample is read.
    """
    stage.sql("VACUUM")

    def none_left() -> bool:
        late = [finding for finding in findings(stage)["vacuum"] if finding.level != Level.OK]
        if late:  # the sessions of those tests may still have dead rows to tell of
            stage.sql("VACUUM")
        return not late

    wait_until(none_left, message="the tables to be vacuumed")


@pytest.fixture
def locked(stage: Stage) -> Iterator[Stage]:
    """The stage's worker serves its queue and holds its liveness lock, as a real one does."""
    executor = stage.runtime.connections.connect()
    assert workers.take_lock(executor, stage.worker_id, SCHEMA)
    workers.announce_lock(stage.runtime.connections, stage.worker_id, True)
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["celery"], tasks=["stage.idle"])
    vacuum(stage)
    yield stage
    executor.close()


def test_a_store_that_is_well(locked: Stage) -> None:
    serve_task(locked)
    locked.run(locked.job())
    locked.job()
    found = findings(locked, thorough=True)

    bad = {check for check, several in found.items() if any(one.level != Level.OK for one in several)}
    assert bad == {"durability"}, "the servers of tests do not write to the disk"
    assert found.keys() == {
        "store", "durability", "clock", "schema", "rights", "queues", "publishing", "tasks", "paused queues",
        "schedules", "timers", "full ports", "workers", "sweeping", "results", "dead set", "retention", "vacuum",
        "horizon", "locks", "rules", "liveness",
    }  # fmt: skip


def test_a_queue_that_nobody_serves(locked: Stage) -> None:
    locked.job(queue="forgotten")

    (finding,) = findings(locked)["queues"]
    assert (finding.level, finding.found) == (Level.ERROR, "nobody serves forgotten (1 due)")
    assert "-Q forgotten" in finding.remedy

    newcomer = locked.new_worker()
    (finding,) = findings(locked)["queues"]
    assert (finding.level, finding.found) == (Level.WARNING, "no worker has said that it serves forgotten (1 due)")

    registry.note_served(locked.runtime.connections, newcomer, queues=["forgotten"], tasks=["stage.idle"])
    assert levels(locked, "queues") == ["ok"]


def test_messages_that_the_broker_does_not_get(locked: Stage) -> None:
    locked.job()
    locked.runtime.connections.write_behind_now()
    for age, level in ((5, "ok"), (30, "warning"), (300, "error")):
        locked.sql("UPDATE messages SET published_at = NULL, due_at = now() - make_interval(secs => %s)", age)
        assert levels(locked, "publishing") == [level]


def test_sweeping_that_lags_behind(locked: Stage) -> None:
    locked.job(countdown=3600)
    for age, level in ((5, "ok"), (30, "warning"), (300, "error")):
        locked.sql("UPDATE timers SET due_at = now() - make_interval(secs => %s)", age)
        assert levels(locked, "sweeping") == [level]


def test_messages_that_are_late_while_somebody_sweeps_are_the_broker_s(locked: Stage) -> None:
    locked.job()
    connections, schema = locked.runtime.connections, locked.runtime.settings.schema
    assert workers.hold_sweeper_lease(connections, locked.worker_id, schema=schema, lease_s=60)
    locked.sql("UPDATE messages SET next_check_at = now() - interval '5 min'")

    (finding,) = findings(locked)["sweeping"]
    assert finding.level == Level.WARNING
    assert re.search(r"sweeps, and messages have been due for 30\d s", finding.found)
    assert "See broker" in finding.remedy

    locked.job(countdown=3600)
    locked.sql("UPDATE timers SET due_at = now() - interval '5 min'")
    (finding,) = findings(locked)["sweeping"]
    assert finding.level == Level.ERROR, "timers need no broker"
    locked.sql("UPDATE timers SET due_at = now() + interval '1 hour'")
    locked.sql("UPDATE leases SET expires_at = now() - interval '1 min'")
    assert levels(locked, "sweeping") == ["error"], "nobody sweeps"


def test_a_task_that_no_worker_knows(locked: Stage) -> None:
    locked.job()

    assert levels(locked, "tasks") == ["warning"]
    serve_task(locked)
    assert levels(locked, "tasks") == ["ok"]


def test_a_task_that_no_live_worker_knows_any_more(locked: Stage) -> None:
    locked.app.conf.sidejob_durable_tasks = ["mails.*"]
    serve_task(locked)  # a worker of last year did
    locked.job()
    locked.app.send_task("mails.send", queue="celery")
    connections = locked.runtime.connections
    registry.note_served(connections, locked.worker_id, queues=["celery"], tasks=["stage.call"])
    assert levels(locked, "tasks") == ["ok"], "they are due only just now"

    locked.sql("UPDATE messages SET due_at = now() - interval '2 min'")
    other = locked.new_worker()
    locked.sql("UPDATE workers SET beat_at = now() + interval '1 hour'")  # or they fall silent on a slow machine
    (finding,) = findings(locked)["tasks"]
    assert finding.level == Level.ERROR
    shown = "mails.send in celery (1 due), stage.idle in celery (1 due)"
    assert finding.found == f"no live worker of its queue knows {shown}"
    assert "sidejob revoke" in finding.remedy
    assert ask(locked.app, "doctor").code == 2

    registry.note_served(connections, locked.worker_id, queues=["celery"], tasks=["stage.idle"])
    (finding,) = findings(locked)["tasks"]
    assert "mails.send" in finding.found
    assert "stage.idle" not in finding.found
    registry.note_served(connections, other, queues=["mails"], tasks=["mails.send"])
    assert levels(locked, "tasks") == ["error"], "that one serves another queue"
    registry.note_served(connections, other, queues=["celery"], tasks=["mails.send"])
    assert levels(locked, "tasks") == ["ok"]
    locked.sql("UPDATE workers SET dead_at = now() WHERE id = %s", other)
    assert levels(locked, "tasks") == ["error"]


def test_jobs_that_are_parked(locked: Stage) -> None:
    job = locked.job()
    registry.note_served(locked.runtime.connections, locked.worker_id, queues=["celery"], tasks=["stage.call"])
    waiting.decline(locked.runtime, JOBS, (job.id, 1), task="stage.idle")

    (finding,) = findings(locked)["tasks"]
    assert finding.level == Level.ERROR
    assert finding.found == "workers have declined runs: 1 of stage.idle in celery"
    for number in range(8):
        name = f"stage.other{number}"
        other = locked.job()
        locked.sql("UPDATE jobs SET task = %s WHERE id = %s", name, other.id)
        waiting.decline(locked.runtime, JOBS, (other.id, 1), task=name)
    (finding,) = findings(locked)["tasks"]
    assert finding.found.endswith("1 of stage.other3 in celery and 4 more")


def test_timers_of_completed_jobs(locked: Stage) -> None:
    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            job.run(countdown=3600)
            job.suspend()

    job = locked.job(body, inports=["in"])
    locked.drain()
    assert levels(locked, "timers") == ["ok"], "the job is not completed"
    job.input("in").write(1)
    locked.drain()
    assert (job.refresh().status, len(job.timers)) == ("completed", 1)
    (finding,) = findings(locked)["timers"]
    assert (finding.level, finding.found.partition(" at ")[0]) == ("warning", f"completed jobs run again: job {job.id}")
    assert "suspend(timeout=" in finding.remedy
    assert "although it is completed" in " ".join(ask(locked.app, "show", job.id).out.split())
    job.cancel_timer(job.timers[0])
    assert levels(locked, "timers") == ["ok"]


@pytest.mark.parametrize("ends", ["failed", "terminated"])
@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_job_that_waits_for_the_room_of_a_reader_that_has_ended(locked: Stage, direction: str, ends: str) -> None:
    def body(job: RunningJob) -> None:
        if job.get("fails"):
            raise ValueError("no")
        if not job.children:
            job.enqueue("stage.idle", child_name="child", inports=["a"], outports={"b": {"limit": 1}})

    reader = locked.job(body, inports={"a": {"limit": 1}})
    locked.drain()
    port = reader.input("a") if direction == "in" else reader.child("child").output("b")
    port.write(1)
    locked.drain()
    first, second = (locked.inside(lambda job: port.write(2)) for _ in range(2))
    assert levels(locked, "full ports") == ["ok"], "the reader may read yet"
    if ends == "failed":
        reader.set(fails=True)
        reader.run()
    else:
        reader.terminate()
    locked.drain()

    (finding,) = findings(locked)["full ports"]
    assert finding.level == Level.WARNING
    assert finding.found == (
        f"jobs wait for room: job {first.id} and 1 more for the {direction}put port {port.name} of job "
        f"{reader.id if direction == 'in' else reader.child('child').id}, whose reader, job {reader.id}, is {ends}"
    )
    assert "sidejob run --force" in finding.remedy
    second.terminate()
    locked.drain()
    assert f"job {first.id} for the" in findings(locked)["full ports"][0].found
    port.read()
    assert levels(locked, "full ports") == ["ok"]


def test_workers_that_are_suspected_or_dead(locked: Stage) -> None:
    locked.sql("UPDATE workers SET suspect_at = now(), suspect_by = 'silence'")
    assert levels(locked, "workers") == ["warning"]

    job = locked.job()
    assert locked.claim(job) is not None
    locked.sql("UPDATE workers SET dead_at = now()")
    found = findings(locked)["workers"]
    ((ident,),) = locked.sql("SELECT ident FROM workers")
    assert [re.sub(r"for \d+ s", "for some s", finding.found) for finding in found] == [
        "no worker is alive", f"dead and still holding: {ident} (1 run, dead for some s)",
    ]  # fmt: skip
    assert found[0].level == Level.ERROR, "a run is in progress, and nobody rescues it"


def test_a_worker_that_was_killed_is_silent_long_before_anybody_declares_it_dead(stage: Stage) -> None:
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["celery"], tasks=["stage.idle"])
    assert (levels(stage, "workers"), levels(stage, "queues")) == (["ok"], ["ok"])

    stage.sql("UPDATE workers SET beat_at = now() - interval '75 s'")
    (finding,) = findings(stage)["workers"]
    assert finding.level == Level.WARNING, "nothing is due"
    assert re.match(r"no worker is heard of; silent for \d+ s or longer: test:", finding.found)
    assert "Start workers" in finding.remedy
    stage.job()
    assert levels(stage, "workers") == ["error"]
    assert findings(stage)["queues"][0].found == "nobody serves celery (1 due)"
    assert "not silent" in findings(stage)["liveness"][0].found

    other = stage.new_worker()
    registry.note_served(stage.runtime.connections, other, queues=["celery"], tasks=["stage.idle"])
    (finding,) = findings(stage)["workers"]
    assert finding.level == Level.WARNING
    assert re.match(r"1 alive; silent for \d+ s or longer: test:", finding.found)
    assert levels(stage, "queues") == ["ok"]


def test_a_worker_whose_lock_has_fallen_is_silent_when_it_misses_a_beat(stage: Stage) -> None:
    executor = stage.runtime.connections.connect()
    assert workers.take_lock(executor, stage.worker_id, SCHEMA)
    workers.announce_lock(stage.runtime.connections, stage.worker_id, True)
    stage.sql("UPDATE workers SET beat_at = now() - interval '5 s'")
    assert levels(stage, "workers") == ["ok"], "it is only slow"

    executor.close()
    wait_until(lambda: levels(stage, "workers") == ["warning"], message="Postgres to let the lock go")
    stage.sql("UPDATE workers SET beat_at = now()")
    assert levels(stage, "workers") == ["ok"], "a restart of Postgres frees the locks of all"


def test_nobody_sweeps_when_the_sweeper_was_killed(locked: Stage) -> None:
    connections, schema = locked.runtime.connections, locked.runtime.settings.schema
    assert workers.hold_sweeper_lease(connections, locked.worker_id, schema=schema, lease_s=2)
    assert "keeps up" in findings(locked)["sweeping"][0].found

    for age, level in ((1, "ok"), (30, "warning"), (75, "error")):
        locked.sql("UPDATE leases SET expires_at = now() - make_interval(secs => %s)", age)
        assert levels(locked, "sweeping") == [level]
    assert findings(locked)["sweeping"][0].found.startswith("nobody sweeps: test:")
    locked.sql("UPDATE workers SET dead_at = now()")
    assert levels(locked, "sweeping") == ["ok"], "somebody declared it dead: the beat task polls"


def test_a_worker_whose_clock_is_wrong(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.store.registry.time.time", lambda: time.time_ns() / 1e9 - 40)
    registry.note_served(locked.runtime.connections, locked.worker_id, queues=["celery"], tasks=["stage.idle"])
    monkeypatch.undo()

    (bad,) = [finding for finding in findings(locked)["clock"] if finding.level != Level.OK]
    assert bad.level == Level.WARNING
    assert "is 40.0 s behind the database's" in bad.found
    assert "test:" in bad.found


def test_a_clock_here_that_is_wrong(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database.time.time", lambda: time.time_ns() / 1e9 + 5)

    (finding,) = findings(locked)["clock"]
    assert (finding.level, finding.found) == (
        Level.WARNING, "the clock of this machine is 5.0 s ahead of the database's",
    )  # fmt: skip


def test_results_that_wait(locked: Stage) -> None:
    job = locked.job()
    locked.sql(
        """UPDATE askings SET closed_at = now() - interval '2 min', outcome = 'failed', result = 'null'
        WHERE job_id = %s""",
        job.id,
    )
    assert levels(locked, "results") == ["warning"]


def test_the_dead_set(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: RunningJob) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        locked.inside(fail)

    (finding,) = findings(locked)["dead set"]
    assert (finding.level, finding.found) == (Level.WARNING, "1 entry: 1 of stage.call (ValueError)")
    assert "sidejob dead groups" in finding.remedy
    assert "sidejob dead retry" in finding.remedy

    locked.sql(
        """INSERT INTO dead (task_id, task, queue, reason, error, payload)
        VALUES ('gone', 'mail', 'q', 'revoked', 'TaskRevokedError: no', '{}')"""
    )
    (finding,) = findings(locked)["dead set"]
    assert finding.level == Level.WARNING
    assert finding.found == "2 entries: 1 of stage.call (ValueError); 1 revoked on purpose"

    locked.sql("UPDATE dead SET reason = 'revoked', error = 'TaskRevokedError: no'")
    (finding,) = findings(locked)["dead set"]
    assert finding.level == Level.OK
    assert finding.found.startswith("2 entries, all revoked on purpose")

    monkeypatch.setattr(stats, "dead_entries", lambda executor: (Count(2, is_estimated=True), Count(0)))
    (finding,) = findings(locked)["dead set"]
    assert finding.level == Level.WARNING, "the groups are those of a sample, and others may be among the rest"
    assert finding.found.startswith("about 2 entries: 1 of ")
    assert finding.found.endswith("; 2 revoked on purpose")


def test_references_that_a_change_of_the_broker_has_left(locked: Stage) -> None:
    assert "references" not in findings(locked)
    locked.sql("INSERT INTO broker_messages (queue, priority, task_id, generation) VALUES ('celery', 0, 'one', 1)")

    (finding,) = findings(locked)["references"]
    assert (finding.level, finding.found) == (
        Level.WARNING,
        "1 reference of jobs and durable tasks in the queues of sidejobpg://, and no worker has that broker",
    )
    other = workers.register(locked.runtime.connections, "other", broker="postgres stage sidejob")
    assert "references" not in findings(locked)
    workers.leave(locked.runtime.connections, other)

    (remedy,) = re.findall(r"DELETE .* IS NOT NULL", finding.remedy)
    locked.sql(remedy)
    assert "references" not in findings(locked)


def test_finished_jobs_that_nothing_removes(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database.FINISHED", 50)
    locked.sql(
        "INSERT INTO jobs (task, queue, status, retention_s) "
        "SELECT 't', 'q', 'completed', 60 FROM generate_series(1, 90)"
    )
    assert levels(locked, "retention") == ["ok"]

    locked.sql("INSERT INTO jobs (task, queue, status) SELECT 't', 'q', 'completed' FROM generate_series(1, 60)")
    (finding,) = findings(locked)["retention"]
    assert (finding.level, finding.found) == (Level.WARNING, "about 60 finished jobs are kept for ever")

    with closing(Stage(locked.database_url, sidejob_retention=60)) as keeping:
        assert levels(keeping, "retention") == ["ok"]


def test_a_job_with_very_many_children(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database.CHILDREN", 50)
    parent = locked.job()
    locked.sql(
        "INSERT INTO jobs (task, queue, status, parent_id, name) "
        "SELECT 't', 'q', 'completed', %s, 'c' || n FROM generate_series(1, 60) n",
        parent.id,
    )
    locked.sql("ANALYZE jobs")
    (finding,) = findings(locked)["retention"]
    assert (finding.level, finding.found) == (Level.WARNING, f"very many children: job {parent.id} has about 60")


def test_a_transaction_that_keeps_vacuum_from_its_work(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database.PINNED_S", (0.0, 3600.0))
    with locked.connect(autocommit=False, application_name="careless") as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1 FROM jobs")
        (finding,) = findings(locked)["horizon"]
        assert finding.level == Level.WARNING
        assert "careless, idle in transaction" in finding.found
        monkeypatch.setattr("celery_sidejob.diagnosis.database.PINNED_S", (0.0, 0.0))
        assert levels(locked, "horizon") == ["error"]
        holder.rollback()

    monkeypatch.setattr("celery_sidejob.diagnosis.database.PINNED_S", (300.0, 3600.0))
    assert levels(locked, "horizon") == ["ok"]


def test_open_transactions_with_locked_rows(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(locked, "locks") == ["ok"]
    monkeypatch.setattr("celery_sidejob.diagnosis.database.HELD_S", (0.0, 60.0))
    with locked.connect(autocommit=False, application_name="careless") as holder:
        locked.sidejob.enqueue(locked.idle, transaction=holder)
        (finding,) = findings(locked)["locks"]
        assert finding.level == Level.WARNING
        assert f"pid {holder.info.backend_pid} (careless, idle in transaction) has locked rows of" in finding.found
        assert "jobs" in finding.found


def test_tables_full_of_dead_rows(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database.DEAD_ROWS", 20)
    locked.sql("ALTER TABLE messages SET (autovacuum_enabled = false)")
    try:
        locked.job()
        for _ in range(60):
            locked.sql("UPDATE messages SET next_check_at = now()")
        # Other tables of this database may have dead rows of the tests before. A session tells of its rows at most once
        # a second, with its next statement: without one, ten seconds later.
        wait_until(
            lambda: locked.sql("SELECT 1") and "messages has " in findings(locked)["vacuum"][0].found,
            message="Postgres to count the dead rows",
        )
        assert levels(locked, "vacuum") == ["warning"]
        monkeypatch.undo()
        assert levels(locked, "vacuum") == ["ok"], "so few do no harm"
    finally:
        locked.sql("ALTER TABLE messages RESET (autovacuum_enabled)")


def test_rows_that_contradict_each_other(locked: Stage) -> None:
    job = locked.job()
    locked.sql("DELETE FROM messages")

    assert levels(locked, "rules") == ["ok"], "only a thorough look reads every job"
    (finding,) = findings(locked, thorough=True)["rules"]
    assert finding.found == f"a queued job with neither message nor timer: 1, first job {job.id}"
    job.run(force=True)
    locked.run(job)

    other = locked.job()
    held = locked.job()
    assert locked.claim(held) is not None
    for wrong, rule, which, right in (
        ("messages SET for_run = 9 WHERE locked_by IS NULL", "a message for another run than the next", other,
         "messages SET for_run = 1 WHERE locked_by IS NULL"),
        ("jobs SET status = 'failed' WHERE status = 'queued'", "a job at rest with a message", other,
         "jobs SET status = 'queued' WHERE status = 'failed'"),
        (f"messages SET locked_by = {locked.worker_id + 1} WHERE locked_by IS NOT NULL",
         "a run in progress whose message another worker holds, or nobody", held,
         f"messages SET locked_by = {locked.worker_id} WHERE locked_by IS NOT NULL"),
    ):  # fmt: skip
        locked.sql(f"UPDATE {wrong}")
        assert [finding.found for finding in findings(locked)["rules"]] == [f"{rule}: 1, first job {which.id}"]
        locked.sql(f"UPDATE {right}")
    assert levels(locked, "rules") == ["ok"]


def test_a_user_who_lacks_rights(locked: Stage) -> None:
    locked.sql(f"""
        CREATE ROLE clerk LOGIN PASSWORD 'clerk'; GRANT USAGE ON SCHEMA {SCHEMA} TO clerk;
        GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {SCHEMA} TO clerk;
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA {SCHEMA} TO clerk""")
    try:
        parts = urlsplit(direct(locked.database_url))
        url = parts._replace(netloc=f"clerk:clerk@{parts.netloc.rpartition('@')[2]}").geturl()
        clerk = make_app("stage", sidejob_database_url=url)
        sidejob = clerk.sidejob
        found = [f for f in Diagnosis(sidejob.runtime, sidejob.owner).findings() if f.check == "rights"]
        sidejob.close()
        assert [finding.level for finding in found] == [Level.ERROR]
        assert found[0].found.startswith("clerk lacks DELETE on aliases, DELETE on askings, ")
        assert "sidejob db grants clerk" in found[0].remedy
    finally:
        locked.sql("DROP OWNED BY clerk; DROP ROLE clerk")


def test_a_worker_without_a_liveness_lock(stage: Stage) -> None:
    (finding,) = findings(stage)["liveness"]
    assert finding.level == Level.WARNING
    assert finding.found.startswith("no liveness lock: test:")


def test_a_store_that_goes_away_while_it_is_looked_at_is_a_finding(locked: Stage) -> None:
    """What was found before is not lost with it."""
    with TcpProxy.to(locked.database_url) as proxy:
        app = make_app(
            "stage",
            sidejob_database_url=proxy.url_for(locked.database_url),
            sidejob_direct_url=direct(locked.database_url),
        )
        sidejob = app.sidejob
        looking = Diagnosis(sidejob.runtime, sidejob.owner).findings()
        assert any(finding.check == "rules" for finding in looking)

        proxy.refuse()

        (left,) = looking
        assert (left.check, left.level, left.meaning) == ("store", Level.ERROR, "This check failed.")
        sidejob.close()


def test_whatever_postgres_refuses_is_a_finding(locked: Stage) -> None:
    """Such as an error of its own that nobody has thought of."""
    locked.sql("ALTER TABLE leases RENAME TO leases_kept")
    locked.sql("CREATE VIEW leases AS SELECT name, holder / (holder - holder) AS holder, expires_at FROM leases_kept")
    locked.sql("UPDATE leases_kept SET holder = 1")
    try:
        (refused,) = findings(locked)["store"][1:]
    finally:
        locked.sql("DROP VIEW leases; ALTER TABLE leases_kept RENAME TO leases; UPDATE leases SET holder = NULL")
    assert (refused.level, refused.found) == (Level.ERROR, "The store cannot be looked at: division by zero")


def test_a_database_without_a_schema(empty_database_url: str) -> None:
    app = make_app("stage", sidejob_database_url=empty_database_url)
    sidejob = app.sidejob

    found = list(Diagnosis(sidejob.runtime, sidejob.owner).findings())
    sidejob.close()

    assert [(one.check, str(one.level)) for one in found] == [
        ("store", "ok"), ("durability", "warning"), ("clock", "ok"), ("schema", "error"),
    ]  # fmt: skip
    assert "db upgrade" in found[3].found


def schema_finding(url: str, name: str = "stage", broker: str = "memory://") -> Finding:
    """What is said of the schema to an app of this name."""
    app = make_app(name, broker=broker, sidejob_database_url=url)
    sidejob = app.sidejob
    try:
        (found,) = (one for one in Diagnosis(sidejob.runtime, sidejob.owner).findings() if one.check == "schema")
    finally:
        sidejob.close()
    return found


def test_each_schema_that_does_not_fit_has_its_own_remedy(empty_database_url: str) -> None:
    upgrade = "Run `celery -A <app> sidejob db upgrade`."
    assert schema_finding(empty_database_url).remedy == upgrade

    migrate.upgrade(empty_database_url, owner={"app": "stage", "broker": "memory /"})
    assert schema_finding(empty_database_url).level == Level.OK
    for other in ({"name": "another"}, {"broker": "redis://127.0.0.1:1/3"}):
        found = schema_finding(empty_database_url, **other)
        assert found.level == Level.ERROR
        assert "sidejob_schema" in found.remedy
        assert "db reassign" in found.remedy
        assert "A client is not checked" in found.meaning

    with a_role(empty_database_url) as (role, url), psycopg.connect(empty_database_url, autocommit=True) as owner:
        assert f"sidejob db grants {role} |" in schema_finding(url).remedy
        owner.execute(f"GRANT USAGE ON SCHEMA sidejob TO {role}")
        owner.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA sidejob TO {role}")
        assert f"sidejob db grants {role} |" in schema_finding(url).remedy
        owner.execute("UPDATE sidejob.alembic_version SET version_num = '0900'")
        assert schema_finding(empty_database_url).remedy == "Upgrade the package celery-sidejob here."


def test_a_schema_that_was_restored_in_part(empty_database_url: str) -> None:
    owner = {"app": "stage", "broker": "memory /"}
    migrate.upgrade(empty_database_url, owner=owner)
    with psycopg.connect(direct(empty_database_url), autocommit=True) as connection:
        connection.execute("DROP TABLE sidejob.packets; ALTER TABLE sidejob.jobs DROP COLUMN error")
    app = make_app("stage", sidejob_database_url=empty_database_url)

    said = ask(app, "db", "check")
    assert said.code == 1
    assert "lacks jobs.error, packets: it was restored in part" in said.err
    assert "restore the whole schema from a backup" in ask(app, "db", "upgrade").err, "it is not up to date"
    found = schema_finding(empty_database_url)
    assert found.level == Level.ERROR
    assert "restore the whole schema" in found.remedy
    app.sidejob.close()


# -- the broker ------------------------------------------------------------------------------------------------------


def broker_findings(url: str) -> list[tuple[str, str]]:
    app = Celery("stage", broker=url, set_as_current=False)
    found = list(broker_check.findings(app))
    app.close()
    assert all(finding.remedy for finding in found if finding.level != Level.OK)
    return [(finding.check, str(finding.level)) for finding in found]


def test_a_redis_that_would_throw_messages_away(own_valkey: Valkey) -> None:
    assert broker_findings(own_valkey.url) == [("broker", "ok"), ("eviction", "ok")]

    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "volatile-lru")
        assert broker_findings(own_valkey.url)[1] == ("eviction", "warning")
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert broker_findings(own_valkey.url)[1] == ("eviction", "error")
        client.config_set("maxmemory-policy", "noeviction")
        assert broker_findings(own_valkey.url)[1] == ("eviction", "ok")
        client.config_set("maxmemory", str(client.info("memory")["used_memory"] + 1000))
        assert broker_findings(own_valkey.url)[1] == ("eviction", "warning")


def test_a_broker_that_refuses_or_is_silent(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broker_findings("redis://127.0.0.1:1/0") == [("broker", "error")]
    assert broker_findings("amqp://guest:guest@127.0.0.1:1//") == [("broker", "error")]

    monkeypatch.setattr(broker_check, "ATTEMPT_S", 0.5)
    with TcpProxy.to(redis_url) as proxy:
        proxy.black_hole()
        began = time.monotonic()
        assert broker_findings(proxy.url_for(redis_url)) == [("broker", "error")]
        assert time.monotonic() - began < 10


@KOMBU_5_7
def test_a_redis_for_announcements(redis_url: str, database_url: str) -> None:
    def found(url: str | None) -> list[tuple[str, str]]:
        with make_app("stage", sidejob_database_url=database_url, sidejob_redis_url=url) as app:
            return [(finding.check, str(finding.level)) for finding in announcing.findings(app)]

    assert found(None) == []
    assert found(redis_url) == [("announcements", "ok")]
    assert found("redis://:secret@127.0.0.1:1/0") == [("announcements", "warning")]


def test_a_url_of_no_redis_is_refused_with_the_first_call(database_url: str) -> None:
    for url in ("amqp://127.0.0.1", "http://127.0.0.1", "redis://127.0.0.1:many/0"):
        with make_app("stage", sidejob_database_url=database_url, sidejob_redis_url=url) as app:
            with pytest.raises(SettingsError, match=r"sidejob_redis_url (is not the|must be a) URL"):
                app.sidejob.find(1)


def test_a_broker_that_is_the_store_by_another_url(stage: Stage) -> None:
    url = direct(stage.database_url)

    def about_the_broker(**urls: str) -> Finding:
        with make_app("stage", broker=in_postgres(url), sidejob_schema=SCHEMA, **urls) as app:
            return [finding for finding in broker_check.findings(app) if finding.check == "broker"][-1]

    with TcpProxy.to(url) as proxy, TcpProxy.to(url) as elsewhere:
        past_a_proxy = proxy.url_for(url)
        found = about_the_broker(sidejob_database_url=past_a_proxy)
        assert (found.level, "leads to the store's own database" in found.found) == (Level.WARNING, True)
        assert found.remedy.startswith("Set broker_url to sidejobpg:// alone")
        for known in ({"sidejob_database_url": url}, {"sidejob_database_url": past_a_proxy, "sidejob_direct_url": url}):
            assert about_the_broker(**known).level == Level.OK
        elsewhere.black_hole()
        assert about_the_broker(sidejob_database_url=elsewhere.url_for(url)).level == Level.OK, "others tell of that"


@KOMBU_5_7
def test_a_broker_in_another_database_is_not_the_store(stage: Stage, empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, SCHEMA)
    settings = {"sidejob_database_url": stage.database_url, "sidejob_schema": SCHEMA}
    with make_app("stage", broker=in_postgres(direct(empty_database_url)), **settings) as app:
        assert [str(finding.level) for finding in broker_check.findings(app)] == ["ok", "ok"]


@KOMBU_5_7
def test_a_broker_in_postgres_whose_tables_are_missing(empty_database_url: str) -> None:
    with make_app("stage", broker="sidejobpg://", sidejob_database_url=empty_database_url) as app:
        found = ask(app, "doctor", "--json").document["findings"]
        (broker,) = broker_check.findings(app)
    assert broker.level == Level.ERROR
    remedies = [one["remedy"] for one in found if one["level"] == "error"]
    assert remedies == ["Run `celery -A <app> sidejob db upgrade`."] * 2


def test_a_rabbitmq(amqp_url: str) -> None:
    assert broker_findings(amqp_url) == [("broker", "ok"), ("rabbitmq", "ok")]


def test_queues_that_rabbitmq_refuses(amqp_url: str) -> None:
    app = Celery("shop", broker=amqp_url, set_as_current=False)
    app.conf.update(task_default_queue_type="quorum", task_queue_max_priority=5)

    found = list(broker_check.findings(app))

    assert [(finding.check, str(finding.level)) for finding in found] == [
        ("broker", "ok"), ("rabbitmq", "error"),
    ]  # fmt: skip
    with kombu.Connection(amqp_url) as connection, pytest.raises(kombu.exceptions.ChannelError):
        app.amqp.queues["celery"](connection.default_channel).declare()  # it does refuse it


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_ends_with_what_is_gravest(locked: Stage) -> None:
    said = ask(locked.app, "doctor")
    assert said.code == 1
    assert "durability warning fsync is off" in said.lines
    assert said.lines[-1] == "Errors: 0. Warnings: 1."
    assert "→ Set fsync to on." in said.lines

    locked.job(queue="forgotten")
    serve_task(locked)
    said = ask(locked.app, "doctor", "--json", "--thorough")
    assert said.code == 2
    assert said.document["level"] == "error"
    queues = next(finding for finding in said.document["findings"] if finding["check"] == "queues")
    assert queues.items() >= {"level": "error", "found": "nobody serves forgotten (1 due)"}.items()
    assert all(finding.keys() == asdict(FINDING).keys() for finding in said.document["findings"])


FINDING = Finding("check", Level.OK, "found")


def test_the_command_without_a_store() -> None:
    app = make_app(
        "away", broker="redis://127.0.0.1:1/0", sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing"
    )

    said = ask(app, "doctor", "--json")
    assert said.code == 2
    assert [(finding["check"], finding["level"]) for finding in said.document["findings"]] == [
        ("store", "error"), ("broker", "error"), ("durable tasks", "ok"),
    ]  # fmt: skip
    assert json.loads(said.out)


def test_all_is_well_ends_with_zero(locked: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.diagnosis.database._durability", lambda row: iter(()))

    said = ask(locked.app, "doctor")
    assert (said.code, said.lines[-1]) == (0, "All is well.")
