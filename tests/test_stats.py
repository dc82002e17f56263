"""What `stats` says of a store, and how Prometheus is told."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_sidejob import RunningJob, SideJob, StoreUnavailableError, embedded
from celery_sidejob.prometheus import SideJobCollector, exposition
from celery_sidejob.services.recorder import Recorder
from celery_sidejob.store import measured, registry, workers
from celery_sidejob.store.measured import MeasuredConnections
from celery_sidejob.store.schema import migrate
from tests.tools.commands import ask
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """What Prometheus reads of an exposition: {name: {label values: value}}."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def suspend(job: RunningJob) -> None:
    job.suspend()


def fail(job: RunningJob) -> None:
    raise ValueError("no")


def retry(job: RunningJob) -> None:
    raise job.retry(countdown=3600)


@pytest.fixture
def busy(stage: Stage) -> Stage:
    """A store with one of everything."""
    stage.job(queue="old")
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET due_at = now() - interval '90 s', published_at = NULL WHERE queue = 'old'")
    stage.job(queue="published")
    stage.sql("UPDATE messages SET published_at = now() WHERE queue = 'published'")
    running = stage.job(queue="published")
    assert stage.claim(running) is not None
    stage.inside(retry, queue="later")
    stage.inside(suspend)
    stage.job(countdown=-5)
    stage.job(countdown=3600)
    stage.job(countdown=3600)
    stage.sql("UPDATE timers SET due_at = now() - interval '7 s' WHERE id = (SELECT min(id) FROM timers)")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            stage.inside(fail)
    stage.inside(lambda job: None)
    stage.sql("UPDATE messages SET next_check_at = now() + interval '1 s' WHERE locked_by IS NULL")
    return stage


def test_stats_of_a_busy_store(busy: Stage) -> None:
    found = busy.sidejob.stats()

    assert found["jobs"] == {"queued": 6, "running": 1, "suspended": 1, "failed": 2}
    old = found["queues"]["old"]
    assert (old["depth"], old["unpublished"], old["running"], old["delayed"]) == (1, 1, 0, 0)
    assert 90 <= old["oldest_due_s"] < 120
    assert old["oldest_unpublished_s"] == old["oldest_due_s"]
    published = found["queues"]["published"]
    assert (published["depth"], published["unpublished"], published["running"]) == (1, 0, 1)
    assert published["oldest_unpublished_s"] is None
    assert (found["queues"]["later"]["depth"], found["queues"]["later"]["delayed"]) == (0, 1)
    assert found["queues"]["later"]["oldest_due_s"] is None
    assert found["timers"]["waiting"] == 2
    assert 7 <= found["timers"]["oldest_due_s"] < 37
    assert 7 <= found["sweep"]["lag_s"] < 37
    assert found["dead"] == {
        "entries": 2,
        "groups": [{"task": "stage.call", "group": "ValueError", "reason": "failed", "entries": 2}],
    }
    assert [(row["id"], row["alive"]) for row in found["workers"]] == [(busy.worker_id, True)]


def test_a_task_for_later_is_scheduled_and_a_retry_is_in_its_backoff(stage: Stage) -> None:
    stage.app.conf.sidejob_durable_tasks = ["mails.*"]
    stage.app.send_task("mails.send", task_id="later", countdown=7200, queue="mails")
    stage.app.send_task("mails.send", task_id="retried", countdown=7200, queue="mails")
    stage.sql("UPDATE messages SET generation = 2 WHERE task_id = 'retried'")

    queue = stage.sidejob.stats()["queues"]["mails"]

    assert (queue["depth"], queue["scheduled"], queue["delayed"]) == (0, 1, 1)
    assert samples(exposition(stage.sidejob))["sidejob_queue_scheduled"] == {("mails",): 1}


def test_an_empty_store_has_no_ages(stage: Stage) -> None:
    found = stage.sidejob.stats()

    assert (found["jobs"], found["queues"], found["dead"]) == ({}, {}, {"entries": 0, "groups": []})
    assert (found["timers"]["oldest_due_s"], found["results"]["oldest_s"]) == (None, None)
    assert found["sweep"] == {"lag_s": 0.0, "sweeper": None, "expired_s": None}


def test_served_queues_are_those_of_live_workers(stage: Stage) -> None:
    other = stage.new_worker()
    connections = stage.runtime.connections
    registry.note_served(connections, stage.worker_id, queues=["a", "b"], tasks=[])
    registry.note_served(connections, other, queues=["b", "c"], tasks=[])
    registry.note_served(connections, stage.worker_id, queues=["b", "d"], tasks=[])
    registry.note_served(connections, 4711, queues=["e"], tasks=[])
    stage.sql("UPDATE workers SET dead_at = now() WHERE id = %s", other)

    queues = stage.sidejob.stats()["queues"]
    assert {name: row["workers"] for name, row in queues.items()} == {"b": 1, "d": 1}


def test_a_worker_that_was_killed_serves_nothing_and_is_not_alive(stage: Stage) -> None:
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["a"], tasks=[])
    stage.job(queue="a")
    stage.sql("UPDATE workers SET beat_at = now() - interval '75 s', suspect_at = now(), suspect_by = 'silence'")

    found = stage.sidejob.stats()

    (worker,) = found["workers"]
    assert (worker["alive"], worker["suspected"]) == (False, True)
    assert 75 <= worker["silent_s"] < 105
    assert (found["queues"]["a"]["depth"], found["queues"]["a"]["workers"]) == (1, 0)
    exposed = samples(exposition(stage.sidejob))
    assert exposed["sidejob_workers"] == {
        ("alive",): 0,
        ("suspected",): 0,
        ("silent",): 1,
        ("dead",): 0,
        ("stopped",): 0,
    }
    assert exposed["sidejob_queue_workers"] == {("a",): 0}


def test_a_worker_that_stopped_by_itself_is_not_dead(stage: Stage) -> None:
    others = [stage.new_worker(), stage.new_worker()]
    stage.declare_dead(others[0])
    stage.runtime.connections.transact("leave", lambda executor: workers.leave(executor, others[1]))

    lives = {row["id"]: (row["alive"], row["stopped"]) for row in stage.sidejob.stats()["workers"]}

    assert lives == {stage.worker_id: (True, False), others[0]: (False, False), others[1]: (False, True)}
    exposed = samples(exposition(stage.sidejob))["sidejob_workers"]
    assert exposed == {("alive",): 1, ("suspected",): 0, ("silent",): 0, ("dead",): 1, ("stopped",): 1}
    said = ask(stage.app, "stats").lines
    assert [line.split()[-1] for line in said if line.startswith("test:")] == ["alive", "dead", "stopped"]


# -- Prometheus ------------------------------------------------------------------------------------------------------


def test_the_exposition_says_what_stats_say(busy: Stage) -> None:
    measured.add_totals(
        busy.runtime.connections,
        {("runs_lost", ""): 3, ("jobs_buried", "failed"): 2, ("claim_bucket", "2"): 5, ("claim_sum", ""): 0.02},
    )
    text = exposition(busy.sidejob)
    found = samples(text)

    assert found["sidejob_up"] == {(): 1}
    assert found["sidejob_jobs"] == {
        ("queued",): 6, ("running",): 1, ("suspended",): 1, ("terminating",): 0, ("failed",): 2,
    }  # fmt: skip
    assert found["sidejob_queue_depth"] == {("celery",): 1, ("later",): 0, ("old",): 1, ("published",): 1}
    assert found["sidejob_queue_oldest_due_age_seconds"][("old",)] >= 90
    assert found["sidejob_queue_oldest_unpublished_age_seconds"].keys() >= {("old",)}
    assert ("published",) not in found["sidejob_queue_oldest_unpublished_age_seconds"]
    assert found["sidejob_dead_group_entries"] == {("ValueError", "failed", "stage.call"): 2}
    assert found["sidejob_workers"] == {("alive",): 1, ("suspected",): 0, ("silent",): 0, ("dead",): 0, ("stopped",): 0}
    assert found["sidejob_runs_lost_total"] == {(): 3}
    assert found["sidejob_runs_rescued_total"] == {(): 0}
    assert found["sidejob_jobs_buried_total"] == {("failed",): 2}
    buckets = found["sidejob_transaction_duration_seconds_bucket"]
    assert [buckets[bound, "claim"] for bound in ("0.0025", "0.005", "+Inf")] == [0, 5, 5]
    assert found["sidejob_transaction_duration_seconds_sum"][("claim",)] == 0.02


def test_a_scrape_is_bounded_and_its_labels_are_harmless(stage: Stage) -> None:
    names = ["\x1b[2J\u202ea", r"\x1b[2J\u202ea", *(f"queue{number}" for number in range(2000))]
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=names, tasks=["stage.idle"])
    stage.job(queue=names[-1])
    stage.sql(
        """INSERT INTO tallies (day, queue, task, step, measure, bucket, number, total_us, squares_us)
        SELECT '1970-01-01', name, 'mail', step, 'retry', 0, place, 0, 0
        FROM unnest(%s::text[]) WITH ORDINALITY AS n(name, place), unnest(ARRAY['', chr(27) || '[2J']) AS step""",
        names[::-1],
    )
    stage.sql(
        """INSERT INTO dead (task_id, task, queue, reason, error, payload, body)
        SELECT 't' || n, 'mail', 'q', 'lost', 'Error' || chr(64 + n % 20) || repeat('x', n / 20) || ': no',
          '{"publication": "{}", "generation": 1}', 'x' FROM generate_series(1, 1000) n"""
    )
    text = exposition(stage.sidejob)

    assert len(text) < 4_000_000
    assert text.replace("\n", "").isprintable()
    found = samples(text)
    depth, retries = found["sidejob_queue_depth"], found["sidejob_task_retries_total"]
    assert (len(depth), depth[names[-1],], depth["other",]) == (500, 1, 0), "two names that look the same are one row"
    assert found["sidejob_queue_workers"]["other",] == 1
    assert len(retries) == 500
    assert retries[r"\x1b[2J\u202ea", "mail"] == 2002 + 2001
    assert sum(retries.values()) == 2002 * 2003 / 2
    of_steps = found["sidejob_step_retries_total"]
    assert (len(of_steps), sum(of_steps.values())) == (500, 2002 * 2003 / 2)
    assert of_steps[r"\x1b[2J\u202ea", r"\x1b[2J", "mail"] == 2002 + 2001
    groups = found["sidejob_dead_group_entries"]
    assert (len(groups), sum(groups.values())) == (501, 1000)


def test_names_follow_the_conventions_of_prometheus(busy: Stage) -> None:
    for family in text_string_to_metric_families(exposition(busy.sidejob)):
        assert family.documentation.endswith("."), family
        assert family.type in ("gauge", "counter", "histogram"), family
        assert family.name.startswith("sidejob_")
        if "_age_" in family.name or "lag" in family.name or "duration" in family.name:
            assert family.name.endswith("_seconds"), family


def test_a_store_that_is_away_is_down_in_a_registry_of_the_users(stage: Stage) -> None:
    registry = CollectorRegistry()
    registry.register(SideJobCollector(stage.sidejob))
    assert samples(generate_latest(registry).decode())["sidejob_up"] == {(): 1}

    from celery import Celery

    app = Celery("away", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    away = CollectorRegistry()
    away.register(SideJobCollector(SideJob(app)))
    assert samples(generate_latest(away).decode()) == {"sidejob_up": {(): 0}}


# -- recording -------------------------------------------------------------------------------------------------------


@pytest.fixture
def connections(stage: Stage) -> Any:
    """Connections that count, and the counters empty again after the test."""
    made = MeasuredConnections(stage.database_url, "sidejob")
    yield made
    made.close()


def totals(connections: MeasuredConnections) -> dict[tuple[str, str], float]:
    return measured.totals(connections)


def test_a_recorder_stores_once_it_is_quiet(connections: MeasuredConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(connections)
    connections.measures.count("runs_lost")
    assert not recorder.run_once(), "something was counted just now"

    monkeypatch.setattr("celery_sidejob.services.recorder.QUIET_S", 0.0)
    assert recorder.run_once()
    assert not recorder.run_once(), "nothing was counted since"
    connections.measures.count("runs_lost")
    recorder.close()

    assert totals(connections) == {("runs_lost", ""): 2}


def test_a_busy_process_stores_between_its_transactions(
    connections: MeasuredConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.store.measured.EVERY_S", 0.0)
    connections.timed("claim", lambda executor: None)
    assert totals(connections) == {}, "nothing is timed before a recorder is there"

    Recorder(connections)
    connections.timed("claim", lambda executor: None)
    connections.timed("end", lambda executor: None)
    connections.transact("another", lambda executor: None)

    found = {key: value for key, value in totals(connections).items() if "_bucket" in key[0]}
    assert sorted(name for name, _ in found) == ["claim_bucket", "end_bucket"]
    assert set(found.values()) == {1}


def test_an_idle_recorder_does_not_speak_to_the_store() -> None:
    nowhere = MeasuredConnections("postgresql://nobody@127.0.0.1:1/nothing", "sidejob")
    recorder = Recorder(nowhere)

    assert recorder.run_once() is False


def test_what_cannot_be_stored_is_stored_later(own_postgres: embedded.Postgres) -> None:
    migrate.upgrade(own_postgres.url)
    with closing(MeasuredConnections(own_postgres.url, SCHEMA)) as counting:
        counting.measures.begin()
        counting.measures.count("leases_lost")
        own_postgres.kill()
        assert counting.record(), "it was tried"
        own_postgres.start()
        counting.measures.count("leases_lost")

        def stored() -> float:
            counting.record()
            try:
                return totals(counting).get(("leases_lost", ""), 0.0)
            except StoreUnavailableError:
                return -1.0

        wait_until(lambda: stored() == 2, timeout=30, message="both to be stored, once each")
        assert not counting.record(), "nothing is left"
        assert stored() == 2
