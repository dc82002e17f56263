"""The commands: what people and programs see of jobs and their store, and what they can ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_sidejob import RunningJob, SideJob, Status
from celery_sidejob.cli import command as waits
from celery_sidejob.cli import sidejob as group
from celery_sidejob.operations import waiting
from celery_sidejob.store import meta
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.schema import migrate, schema_check
from tests.tools.apps import make_app
from tests.tools.commands import Command, Said, ask
from tests.tools.databases import SCHEMA, Databases, only_reading
from tests.tools.in_process import Stage
from tests.tools.migrations import add_migration, copied
from tests.tools.pgbouncer import direct
from tests.tools.workers import Processes, environment

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


def fail(job: RunningJob) -> None:
    raise ValueError("no\nmoney")


def suspend(job: RunningJob) -> None:
    job.suspend()


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_jobs_lists_jobs_newest_first(stage: Stage, command: Command) -> None:
    parent = stage.job(queue="maths")
    child = parent.enqueue("stage.idle", child_name="part", unique="k")
    stage.run(parent)

    header, second, first = command("jobs").lines

    assert header == "Job Status Task Queue Parent Created Last run Took"
    assert first.startswith(f"{parent.id} completed stage.idle maths 20")
    assert second.startswith(f"{child.id} queued stage.idle celery {parent.id} / part 20")
    assert [line.split()[0] for line in command("jobs", "--unique", "k").lines] == ["Job", str(child.id)]

    header, only = command("jobs", "--queue", "maths").lines
    assert header == "Job Status Task Queue Created Last run Took", "no job of the list has a parent"
    assert only.startswith(f"{parent.id} completed stage.idle maths 20")


def test_jobs_as_json_are_everything_about_their_rows(stage: Stage, command: Command) -> None:
    job = stage.job(state={"a": 1}, created_by="me")

    (found,) = command("jobs", "--json").document

    assert found.items() >= {"id": job.id, "status": "queued", "created_by": "me", "args": [], "parent": None}.items()
    assert datetime.fromisoformat(found["created_at"]) == job.created_at
    assert found.keys() == job.info.keys() | {"waiting_for", "lasted_s"}


def test_jobs_say_what_they_wait_for(stage: Stage, command: Command) -> None:
    parked, later, rests = stage.job(), stage.job(countdown=60), stage.job(suspend)
    waiting.decline(stage.runtime, JOBS, (parked.id, 1), task="stage.idle")
    stage.run(rests)

    listed = [line.partition(" stage.")[0] for line in command("jobs", "--oldest-first").lines[1:]]
    assert listed == [f"{parked.id} queued: no worker", f"{later.id} queued: timer", f"{rests.id} suspended"]
    found = {job["id"]: job["waiting_for"] for job in command("jobs", "--json").document}
    assert found == {parked.id: ["no worker"], later.id: ["timer"], rests.id: []}


def test_jobs_are_filtered(stage: Stage, command: Command) -> None:
    parent = stage.job(queue="maths", aliases=["sums"])
    child = parent.enqueue("stage.idle", child_name="part")
    failed = stage.job(fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(failed)

    def ids(*words: object) -> list[int]:
        return [job["id"] for job in command("jobs", "--json", "--oldest-first", *words).document]

    assert ids("--status", "failed") == [failed.id]
    assert ids("--status", "failed", "--status", "queued") == [parent.id, child.id, failed.id]
    assert ids("--task", "stage.call") == [failed.id]
    assert ids("--queue", "maths") == [parent.id]
    assert ids("--child-of", "sums") == [child.id]
    assert ids("--child-of", parent.id) == [child.id]
    assert ids("--limit", 2) == [parent.id, child.id]
    assert ids("--after", child.id) == [failed.id]
    assert ids("--task", "none") == []


def test_jobs_says_how_to_go_on_when_there_may_be_more(stage: Stage, command: Command) -> None:
    made = [stage.job().id for _ in range(4)]

    def walk(*words: object) -> list[int]:
        """Follow each hint as it is printed, until there is none."""
        hint: list[str] = []
        seen: list[int] = []
        while True:
            said = command("jobs", "--limit", 2, *words, *hint)
            seen += [int(line.split()[0]) for line in said.lines[1:]]
            if not said.err:
                return seen
            before, _, option = said.err.partition(": ")
            assert before == "There may be more"
            hint = option.split()

    assert walk() == made[::-1]
    assert walk("--oldest-first") == made
    assert walk("--after", made[0]) == made[1:]
    assert walk("--before", made[-1], "--after", made[0]) == made[1:-1]
    assert walk("--before", made[-1]) == made[-2::-1]


# -- show ------------------------------------------------------------------------------------------------------------


def test_show_shows_everything_about_a_job(stage: Stage, command: Command) -> None:
    job = stage.job(
        queue="maths", aliases=["sums", "adding"], state={"count": 3, "who": "Ann"}, priority=4,
        inports={"x": {"default": None, "channels": ["/numbers"]}, "y": {}}, outports=["sum"], unique="sums:7",
    )  # fmt: skip
    child = job.enqueue("stage.idle", child_name="part")
    job.input("x").write_many([1, 2])

    said = command("show", "sums")

    for line in (
        f"Job {job.id} stage.idle queued",
        "queue maths",
        "priority 4",
        "arguments []",
        "aliases adding, sums",
        f"task id {job.refresh().task_id}",
        "unique key sums:7",
        "count 3",
        'who "Ann"',
        "in x 2 null /numbers",
        "in y 0",
        "out sum 0",
        "Children (1)",
        f"part {child.id} queued stage.idle",
    ):
        assert line in said.lines
    assert any(line.startswith("message for run 1: due 20") for line in said.lines)
    assert "dead set" not in said.out


def test_show_as_json_is_everything_in_one_document(stage: Stage, command: Command) -> None:
    at = datetime(2031, 5, 1, 12, 30, tzinfo=UTC)
    job = stage.job(
        aliases=["sums"], state={"at": at, "on": date(2031, 5, 1), "price": Decimal("1.50")},
        inports={"x": {"default": None, "channels": ["/numbers"]}}, outports={"sum": {"channels": ["/sums"]}},
    )  # fmt: skip
    child = job.enqueue("stage.idle", child_name="part")
    job.input("x").write(1)
    job.run(countdown=timedelta(hours=1))

    found = command("show", job.id, "--json").document

    assert (
        found.items()
        >= {
            "id": job.id,
            "aliases": ["sums"],
            "state": {"at": "2031-05-01T12:30:00+00:00", "on": "2031-05-01", "price": "1.50"},
            "children": {"part": {"id": child.id, "task": "stage.idle", "status": "queued"}},
            "children_count": 1,
            "dead": None,
        }.items()
    )
    assert found["inports"]["x"] == {"packets": 1, "more_packets": False, "default": None, "channels": ["/numbers"]}
    assert found["outports"]["sum"] == {"packets": 0, "more_packets": False, "channels": ["/sums"]}
    assert found["message"]["for_run"] == 1
    assert found["message"]["locked_at"] is None
    (timer,) = found["timers"]
    assert timer["ask"] == "run"
    assert datetime.fromisoformat(timer["due_at"]) > datetime.now(UTC)


def test_show_tells_who_waits_for_room_on_which_port(stage: Stage, command: Command) -> None:
    reader = stage.job(inports={"in": {"limit": 1}})
    writer = stage.job(lambda job: stage.sidejob.get(reader.id).input("in").write(1))
    reader.input("in").write(0)
    assert command("show", reader.id, "--json").document["waiting_for_room"] == []
    stage.run(writer)

    expected = {
        "waiter_id": writer.id, "job_id": reader.id, "direction": "in", "port": "in", "limit": 1, "packets": 1,
        "needs": 1,
    }  # fmt: skip
    for job in (writer, reader):
        assert command("show", job.id, "--json").document["waiting_for_room"] == [expected]
        assert f"{writer.id} in in of {reader.id} 1 1 1" in command("show", job.id).lines
    assert reader.input("in").read() == 0
    assert command("show", writer.id, "--json").document["waiting_for_room"] == []


def test_show_of_a_job_in_its_run_names_the_worker(stage: Stage, command: Command) -> None:
    job = stage.job()
    hold = stage.claim(job)
    job.run()

    said = command("show", job.id)

    assert any(line.startswith("message for run 1: running since 20") and " in test:" in line for line in said.lines)
    assert "asked again yes, since this run began" in said.lines
    stage.perform(hold)


def test_show_of_a_failed_job_has_its_dead_entry_and_its_traceback(stage: Stage, command: Command) -> None:
    job = stage.job(fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    (entry,) = stage.sidejob.dead

    said = command("show", job.id)
    found = command("show", job.id, "--json").document

    assert f"Entry {entry.id} of the dead set" in said.lines
    assert r"error ValueError: no\nmoney" in said.lines
    assert 'raise ValueError("no\\nmoney")' in said.lines
    assert found["dead"].items() >= {"id": entry.id, "reason": "failed", "error": "ValueError: no\nmoney"}.items()
    assert found["dead"]["traceback"] == entry.traceback
    assert found["error"]["type"] == "ValueError"


def test_show_of_a_job_with_many_children_shows_the_first_and_counts_all(stage: Stage, command: Command) -> None:
    job = stage.job()
    stage.sidejob.enqueue_many(
        [{"task": "stage.idle", "parent": job, "child_name": f"part{i}"} for i in range(103)]
    )  # fmt: skip

    found = command("show", job.id, "--json").document

    assert (len(found["children"]), found["children_count"]) == (100, 103)
    assert "Children (the first 100 of 103)" in command("show", job.id).lines


def test_names_and_values_cannot_steer_the_terminal(stage: Stage, command: Command) -> None:
    evil = "\x1b[31m[red]\x9b2J"
    job = stage.job(created_by=evil, state={evil: evil})

    for said in (command("show", job.id), command("show", job.id, "--json")):
        assert "\x1b" not in said.out
        assert "\x9b" not in said.out
    assert r"created by \x1b[31m[red]\x9b2J" in command("show", job.id).lines


def test_long_values_are_cut_for_people_only(stage: Stage, command: Command) -> None:
    job = stage.job(state={"text": "x" * 1000})

    assert "x" * 300 not in command("show", job.id).out
    assert "…" in command("show", job.id).out
    assert command("show", job.id, "--json").document["state"] == {"text": "x" * 1000}


# -- tree ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def family(stage: Stage) -> dict[str, int]:
    """A job with two children, one of which has three; the ids by name."""
    root = stage.job(aliases=["root"])
    left, right = (root.enqueue("stage.idle", child_name=name) for name in ("left", "right"))
    below = {name: right.enqueue("stage.idle", child_name=name).id for name in ("a", "b", "c")}
    stage.run(left)
    return {"root": root.id, "left": left.id, "right": right.id, **below}


def test_tree_shows_a_job_and_everything_below_it(command: Command, family: dict[str, int]) -> None:
    assert command("tree", "root").lines == [
        f"{family['root']} stage.idle queued",
        f"├── {family['left']} left: stage.idle completed",
        f"└── {family['right']} right: stage.idle queued",
        f"├── {family['a']} a: stage.idle queued",
        f"├── {family['b']} b: stage.idle queued",
        f"└── {family['c']} c: stage.idle queued",
    ]
    assert command("tree", family["c"]).lines == [f"{family['c']} c: stage.idle queued"]


def test_tree_as_json_is_a_list_with_parents_first(command: Command, family: dict[str, int]) -> None:
    found = command("tree", "root", "--json").document

    assert [node["id"] for node in found] == list(family.values())
    assert [node["depth"] for node in found] == [0, 1, 1, 2, 2, 2]
    assert found[2] == {
        "id": family["right"], "parent": family["root"], "child_name": "right", "task": "stage.idle",
        "status": "queued", "depth": 1, "children": 3, "more_children": False, "progress": None,
    }  # fmt: skip


def test_tree_is_bounded_and_says_what_it_leaves_out(command: Command, family: dict[str, int]) -> None:
    shallow = command("tree", "root", "--depth", 1)
    short = command("tree", "root", "--limit", 4)

    assert shallow.lines[-2:] == [f"└── {family['right']} right: stage.idle queued", "└── … 3 below"]
    assert short.lines[-2:] == [f"├── {family['a']} a: stage.idle queued", "└── … 2 more"]
    assert [said.err for said in (shallow, short)] == [
        "There are more jobs below these: raise --limit or --depth.\n"
    ] * 2
    assert len(command("tree", "root", "--limit", 4, "--json").document) == 4
    assert command("tree", "root", "--limit", 6).err == ""


# -- run and terminate -----------------------------------------------------------------------------------------------


def test_run_asks_a_job_to_run(stage: Stage, command: Command) -> None:
    job = stage.job(suspend, aliases=["waiting"])
    stage.run(job)

    assert command("run", "waiting").lines == [f"Asked job {job.id} (stage.call) to run; it is queued."]
    assert stage.run(job) == "suspended"
    assert command("run", job.id, "--json").document == {
        "job": job.id, "status": "queued", "asked": True, "reason": None,
    }  # fmt: skip


def test_run_that_is_refused_says_why(stage: Stage, command: Command) -> None:
    job = stage.job(fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)

    said = command("run", job.id, code=1)
    found = command("run", job.id, "--json", code=1)

    assert said.err == f"Error: Job {job.id} was not asked to run: it is failed. Force it with --force.\n"
    assert said.out == ""
    assert found.document.items() >= {"job": job.id, "status": "failed", "asked": False}.items()
    assert "it is failed" in found.document["reason"]
    assert job.refresh().status == "failed"
    assert command("run", job.id, "--force").lines == [f"Asked job {job.id} (stage.call) to run; it is queued."]
    assert len(stage.sidejob.dead) == 0


def test_run_asks_the_parent(stage: Stage, command: Command) -> None:
    parent = stage.job(suspend)
    child = parent.enqueue("stage.idle", child_name="part")
    stage.run(parent)

    assert command("run", child.id, "--parent").lines == [f"Asked job {parent.id} (stage.call) to run; it is queued."]
    refused = command("run", parent.id, "--parent", code=1)
    assert refused.err == f"Error: Job {parent.id} has no parent that could be asked to run.\n"
    assert command("run", parent.id, "--parent", "--json", code=1).document["asked"] is False


def test_run_later(stage: Stage, command: Command) -> None:
    job = stage.job(suspend)
    stage.run(job)

    assert command("run", job.id, "--countdown", 90).lines == [
        f"Asked job {job.id} (stage.call) to run in 90 s; it is queued."
    ]
    assert stage.sql("SELECT due_at - now() BETWEEN '80 s' AND '90 s' FROM timers WHERE job_id = %s", job.id) == [
        (True,)
    ]


def test_terminate_asks_for_the_shutdown(stage: Stage, command: Command, family: dict[str, int]) -> None:
    assert command("terminate", family["left"]).lines == [
        f"Asked for the shutdown of job {family['left']} (stage.idle); the job is terminating."
    ]
    assert stage.sidejob.get("root").status == "queued"

    found = command("terminate", "root", "--recursive", "--json").document

    assert found == {"job": family["root"], "status": "terminating", "recursive": True, "parked": False}
    stage.drain()
    assert stage.sidejob.get("root").terminated

    for words in ((), ("--kill",), ("--without-shutdown",)):
        assert command("terminate", "root", *words).lines == [
            f"Job {family['root']} (stage.idle) has ended: it is terminated already."
        ]


# -- poll and stats --------------------------------------------------------------------------------------------------


def test_the_end_of_the_run_before_is_not_that_of_the_one_in_progress(stage: Stage, command: Command) -> None:
    job = stage.job()
    stage.run(job)
    assert any(line.startswith("ended 2") for line in command("show", job.id).lines)
    job.run()
    assert not any(line.startswith("ended") for line in command("show", job.id).lines)
    hold = stage.claim(job)
    assert hold is not None
    assert not any(line.startswith("ended") for line in command("show", job.id).lines)
    stage.perform(hold)


def test_a_job_whose_code_is_gone_is_terminated_without_its_shutdown(stage: Stage, command: Command) -> None:
    job = stage.job()
    child = job.enqueue("stage.idle", child_name="part")
    stage.sql("UPDATE jobs SET task = 'gone.task'")
    held = stage.job(parent=job, child_name="held")
    hold = stage.claim(held)
    assert hold is not None
    assert command("terminate", job.id, "--recursive").lines[-1].endswith("is terminating.")
    assert not job.delete()

    said = command("terminate", job.id, "--recursive", "--without-shutdown", code=1)
    assert "in progress" in said.err
    assert (job.refresh().status, child.refresh().status) == ("terminated", "terminated")
    assert held.refresh().status == "terminating", "its run goes on"
    stage.perform(hold)
    found = command("terminate", held.id, "--without-shutdown", "--json").document
    assert found["status"] == "terminated"
    assert stage.sql("SELECT count(*) FROM workers WHERE dead_at IS NULL") == [(1,)], "the command has left"
    assert stage.row_counts()["messages"] == 0
    assert job.delete()


def test_terminate_says_how_a_parked_job_ends(stage: Stage, command: Command) -> None:
    jobs = [stage.job() for _ in range(3)]
    for job in jobs[:2]:
        waiting.decline(stage.runtime, JOBS, (job.id, 1), task="stage.idle")

    said = command("terminate", jobs[0].id).out
    assert "ends in about a minute without its shutdown; at once with --without-shutdown" in said
    assert command("terminate", jobs[0].id, "--json").document["parked"] is True
    said = command("terminate", jobs[1].id, "--without-shutdown").out
    assert "is terminated." in said
    assert "minute" not in said
    assert "minute" not in command("terminate", jobs[2].id).out


def test_only_what_the_shutdown_would_have_done_is_left_out(stage: Stage, command: Command) -> None:
    ran: list[int] = []

    @stage.task(name="stage.hooked")
    def task(job: RunningJob) -> None:
        pass

    @task.on_shutdown
    def _(job: RunningJob) -> None:
        ran.append(job.id)

    first, second = task.enqueue(), task.enqueue()
    task_id = second.task_id
    first.terminate()
    stage.run(first)
    assert ran == [first.id]

    command("terminate", second.id, "--without-shutdown")
    assert second.refresh().status == "terminated"
    assert ran == [first.id]
    assert stage.sql("SELECT outcome FROM askings WHERE task_id = %s", task_id) == [("terminated",)]
    second.run(force=True)
    assert stage.run(second) == "completed"


def test_poll_sweeps_once(stage: Stage, command: Command) -> None:
    job = stage.job(countdown=3600)
    command("poll")
    stage.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", job.id)

    said = command("poll")

    assert "Jobs asked by timers that were due 1" in said.lines
    assert stage.run(job) == "completed"
    assert command("poll").lines == ["All is well: nothing was due, missing or lost."]


def test_poll_says_that_it_suspects_a_worker(stage: Stage, command: Command) -> None:
    command("poll")
    stage.sql("UPDATE workers SET beat_at = now() - interval '1 min'")

    for _ in ("it suspects it", "it still does"):
        (line,) = command("poll").lines
        assert line.startswith("Workers suspected of being dead: poll again")
        assert line.endswith(" 1")
    assert any(" silent for " in line for line in command("stats").lines)


def test_poll_as_json_is_its_report(stage: Stage, command: Command) -> None:
    command("poll")

    assert command("poll", "--json").document == {
        "published": 0, "missing": 0, "timers": 0, "publications": 0, "rescued": 0, "declared_dead": 0, "suspected": 0,
        "results": 0, "unpublished": 0, "tasks_taken": 0, "tasks_buried": 0, "shutdowns_skipped": 0,
        "terminated_pages": 0, "deleted_parts": 0, "let_in": 0, "scheduled": 0, "batches": 0, "broker_emptied": False,
    }  # fmt: skip


def test_stats_show_the_store_at_a_glance(stage: Stage, command: Command) -> None:
    stage.job(queue="maths")
    failed = stage.job(fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(failed)

    said = command("stats")

    assert "1 queued" in said.lines
    assert "1 failed" in said.lines
    assert any(line.startswith("maths 1 0 0 ") for line in said.lines)
    assert "1 stage.call ValueError failed" in said.lines
    assert any(line.startswith("test:") and line.endswith(" alive") for line in said.lines)
    assert "Dead set: 1" in said.lines
    found = command("stats", "--json").document
    assert found["jobs"] == {"failed": 1, "queued": 1}
    group = {"task": "stage.call", "group": "ValueError", "reason": "failed", "entries": 1}
    assert found["dead"] == {"entries": 1, "groups": [group]}


# -- db --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(empty_database_url: str) -> Iterator[Celery]:
    """An app whose database is empty."""
    app = Celery("bare", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = empty_database_url
    yield app
    SideJob.runtime.fget(app.sidejob).connections.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [("jobs",), ("show", 1), ("run", 1)])
def test_a_command_does_not_wait_without_end_for_a_table_that_is_locked(
    command: Command, stage_database_url: str, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    """As a VACUUM FULL locks one, or a migration of somebody else's."""
    monkeypatch.setattr(waits, "PATIENCE_S", 1.5)
    with psycopg.connect(stage_database_url) as other:
        other.execute(f"LOCK TABLE {SCHEMA}.jobs IN ACCESS EXCLUSIVE MODE")

        assert "has been locked for too long" in command(*words, code=1).err


def test_db_upgrade_makes_the_schema_and_check_is_content(bare: Celery) -> None:
    SideJob(bare)
    head = meta.REVISION

    assert (
        ask(bare, "db", "current").out == f"Schema 'sidejob' does not exist; this version works on revision {head}.\n"
    )
    assert ask(bare, "db", "current", "--json").document == {"schema": "sidejob", "revision": None, "head": head}
    missing = ask(bare, "db", "check", "--json")
    assert (missing.code, missing.document["ok"]) == (4, False)
    assert "sidejob db upgrade" in missing.document["error"]
    assert missing.err == f"Error: {missing.document['error']}\n"

    assert ask(bare, "db", "upgrade").out == f"Schema 'sidejob' is now at revision {head}; it is new.\n"
    assert ask(bare, "db", "upgrade").out == f"Schema 'sidejob' is up to date: revision {head}.\n"

    assert ask(bare, "db", "check").out == "Schema 'sidejob' fits.\n"
    assert ask(bare, "db", "check", "--json").document == {"schema": "sidejob", "ok": True, "error": None}
    assert ask(bare, "db", "current", "--json").document["revision"] == head
    assert ask(bare, "jobs", "--json").document == []


def test_db_check_refuses_a_schema_of_another_app(bare: Celery, empty_database_url: str) -> None:
    SideJob(bare)
    ask(bare, "db", "upgrade")
    other = make_app("other", sidejob_database_url=empty_database_url)

    said = ask(other, "db", "check")

    assert said.code == 1
    assert "'bare'" in said.err


def test_db_check_tells_by_its_exit_code_what_is_to_be_done(bare: Celery, empty_database_url: str) -> None:
    SideJob(bare)
    assert ask(bare, "db", "check").code == 4
    ask(bare, "db", "upgrade")
    assert ask(bare, "db", "check").code == 0
    migrate.reassign(empty_database_url, owner={"app": "another", "broker": "memory /"})
    assert ask(bare, "db", "check").code == 1

    said = ask(bare, "db", "reassign")

    assert said.out == (
        "Schema 'sidejob' belongs to the app 'bare' and the broker 'memory /'; before: the app 'another' and the "
        "broker 'memory /'.\n"
    )
    assert ask(bare, "db", "check").code == 0
    assert ask(bare, "db", "reassign").out == "Schema 'sidejob' belongs to the app 'bare' and the broker 'memory /'.\n"


def test_db_check_tells_of_a_store_that_takes_no_writes(bare: Celery, empty_database_url: str) -> None:
    """As a standby does, or one whose disk its keeper has found full: no worker can start, and it is worth waiting."""
    SideJob(bare)
    ask(bare, "db", "upgrade")
    bare.sidejob.close()

    with only_reading(empty_database_url):
        said = ask(bare, "db", "check")

    assert said.code == 3
    assert "takes no writes" in said.err


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2/x@127.0.0.1/0", "redis://u:hunter2#x@127.0.0.1/0", "redis://:hunter2@127.0.0.1:99999/0",
     "redis://:hunter2@[::1/0", "carrier+pigeon://:hunter2@127.0.0.1"],
)  # fmt: skip
def test_a_broker_url_that_cannot_be_read_is_one_line_without_its_password(database_url: str, url: str) -> None:
    app = make_app("shop", broker=url, sidejob_database_url=database_url)

    for words in (("db", "check"), ("doctor",)):
        said = ask(app, *words)
        assert said.code == 1
        assert said.err.startswith("Error: broker_url ")
        assert "hunter2" not in said.err


def test_db_grants_connects_to_nothing() -> None:
    app = make_app("offline", sidejob_schema="elsewhere")

    said = ask(app, "db", "grants", "shop workers")

    assert said.code == 0, said
    assert said.out.splitlines()[0] == 'GRANT USAGE ON SCHEMA "elsewhere" TO "shop workers";'
    assert all(line.startswith("GRANT ") for line in said.out.splitlines())


def test_db_upgrade_as_sql_from_a_revision_on(tmp_path: Path) -> None:
    app = make_app("offline")
    with copied(tmp_path) as scripts:
        add_migration(scripts)

        said = ask(app, "db", "upgrade", "--sql", "--from", meta.REVISION)

        assert said.code == 0, said
        assert "CREATE TABLE" not in said.out
        assert "ADD COLUMN colour" in said.out
        unknown = ask(app, "db", "upgrade", "--sql", "--from", "7")
        assert unknown.err == "Error: There is no revision '7': there are 0001, 0002.\n"
        assert "Usage: " in ask(app, "db", "upgrade", "--from", meta.REVISION).err


def test_db_upgrade_as_sql_connects_to_nothing() -> None:
    app = make_app("offline", sidejob_schema="elsewhere")

    said = ask(app, "db", "upgrade", "--sql")

    assert said.code == 0, said
    assert 'CREATE SCHEMA IF NOT EXISTS "elsewhere"' in said.out
    assert "CREATE TABLE" in said.out


@pytest.mark.parametrize("command", ["upgrade", "reassign"])
def test_db_refuses_a_direct_url_to_another_database_before_anything_is_changed(
    empty_database_url: str, databases: Databases, command: str
) -> None:
    app = Celery("astray", broker="memory://", set_as_current=False)
    with databases.fresh() as name:
        other = databases.url_of(name)
        app.conf.update(sidejob_database_url=direct(empty_database_url), sidejob_direct_url=other)
        SideJob(app)

        said = ask(app, "db", command)

        assert said.code == 1
        assert "Nothing was changed" in said.err
        assert name in said.err
        assert (schema_check.current(other), schema_check.current(empty_database_url)) == (None, None)


def test_db_upgrade_takes_two_ways_to_one_database(empty_database_url: str) -> None:
    app = Celery("twice", broker="memory://", set_as_current=False)
    url = direct(empty_database_url)
    app.conf.update(sidejob_database_url=url, sidejob_direct_url=f"{url}?application_name=owner")
    SideJob(app)

    said = ask(app, "db", "upgrade")

    assert (said.code, said.err) == (0, "")


def test_db_upgrade_does_not_need_the_proxy_to_be_there(empty_database_url: str) -> None:
    app = make_app("early", sidejob_database_url=NOWHERE, sidejob_direct_url=direct(empty_database_url))

    said = ask(app, "db", "upgrade")

    assert said.code == 0
    assert "leads to the same database: Cannot connect" in said.err
    assert schema_check.current(empty_database_url) == meta.REVISION


def test_db_names_the_setting_whose_url_does_not_answer(empty_database_url: str) -> None:
    app = make_app("early", sidejob_database_url=direct(empty_database_url), sidejob_direct_url=NOWHERE)

    for words in ("upgrade",), ("current",), ("reassign",):
        assert "is sidejob_direct_url right?" in ask(app, "db", *words).err


def test_without_a_schema_every_command_says_what_to_do(bare: Celery) -> None:
    SideJob(bare)
    for words in (("jobs",), ("show", 1), ("tree", 1), ("run", 1), ("terminate", 1), ("poll",), ("stats",)):
        said = ask(bare, *words)
        assert said.code == 1
        assert said.err.startswith("Error: ")
        assert "sidejob db upgrade" in said.err


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("show",), ("revoke", "one"), ("jobs", "--queue"), ("dead", "list", "--task"), ("drain", "--queue")]
)
def test_bytes_that_are_no_text_are_a_usage_error(command: Command, words: tuple[str, ...]) -> None:
    """As Python gives them to a program: no store takes them, and no terminal shows them."""
    said = command(*words, os.fsdecode(b"caf\xe9"), code=2)

    assert "it is no text" in said.err


@pytest.mark.parametrize("name", ["show", "tree", "run", "terminate"])
@pytest.mark.parametrize("job_id", ["4711", "nobody", "9" * 40])
def test_a_job_that_is_not_there_is_an_error(command: Command, name: str, job_id: str) -> None:
    assert command(name, job_id, code=1).err.startswith("Error: There is no job ")


@pytest.mark.parametrize(
    "words",
    [
        ("none",),
        ("jobs", "--status", "sleeping"),
        ("jobs", "--limit", 0),
        ("jobs", "--after", "x"),
        ("jobs", "--after", "9" * 40),
        ("show",),
        ("run", 1, "--countdown", -1),
        ("run", 1, "--countdown", "inf"),
        ("run", 1, "--countdown", "nan"),
        ("dead", "purge", "--older-than", "nan"),
        ("tree", 1, "--depth", -1),
    ],
)
def test_a_command_that_cannot_be_understood_is_a_usage_error(command: Command, words: tuple[object, ...]) -> None:
    assert "Usage: " in command(*words, code=2).err


def test_a_store_that_is_away_is_one_line() -> None:
    app = make_app("away", sidejob_database_url=NOWHERE)
    for words in (("jobs",), ("db", "check"), ("db", "current"), ("db", "upgrade")):
        said = ask(app, *words)
        assert said.code == (3 if words == ("db", "check") else 1)
        assert said.err.startswith("Error: Cannot connect to the store: ")
        assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", ["port=99999", "port=1,2,3", "sslmode=foo", "gssencmode=foo", "target_session_attrs=foo",
              "ssl_min_protocol_version=foo", "connect_timeout=soon"],
)  # fmt: skip
def test_a_value_that_libpq_refuses_is_a_wrong_setting_and_no_outage(wrong: str) -> None:
    name = wrong.partition("=")[0]
    url = NOWHERE if name != "port" else "postgresql://nobody@127.0.0.1/none"
    app = make_app("refused", sidejob_database_url=f"{url}{'&' if '?' in url else '?'}{wrong}")
    said = ask(app, "jobs")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert re.match(f"Error: sidejob_database_url cannot be read: (invalid|could not match) .*{name}", said.err)


def test_a_store_that_is_away_is_down_for_a_monitor() -> None:
    app = make_app("away", sidejob_database_url=NOWHERE)

    said = ask(app, "stats", "--prometheus")

    assert said.code == 1
    assert said.out.splitlines()[-1] == "sidejob_up 0.0"
    assert said.err.startswith("Error: Cannot connect to the store: ")


def test_settings_that_are_wrong_are_one_line() -> None:
    app = make_app("wrong", sidejob_leese=3)

    said = ask(app, "jobs")

    assert said.code == 1
    assert said.err.startswith("Error: unknown setting sidejob_leese: ")
    assert said.err.endswith(" Did you mean sidejob_lease?\n")


def test_an_app_without_sidejob_is_told_how_to_add_it() -> None:
    said = ask(Celery("plain", set_as_current=False), "jobs")

    assert said.code == 1
    assert "The app 'plain' has no SideJob" in said.err
    assert "sidejob = SideJob(app)" in said.err
    assert "below `transport` work without one" in said.err


# -- redaction -------------------------------------------------------------------------------------------------------


def test_arguments_errors_and_tracebacks_are_redacted(database_url: str) -> None:
    def redact(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("secret", "***"))

    stage = Stage(database_url, sidejob_redact=redact)
    try:
        task = stage.task(_shout, name="stage.shout", inports={"in": {"default": {"secret": 1}}})
        job = stage.sidejob.enqueue(task, ("my secret",), {"word": "secret"}, aliases=["secret-1"], unique="secret")
        stage.perform(stage.claim(job))  # type: ignore[arg-type]
        job.set(secret="secret", token={"of": ["secret"]})

        for words in (("jobs", "--json"), ("show", job.id), ("show", job.id, "--json")):
            said = ask(stage.app, *words)
            assert "***" in said.out
            assert "secret" not in said.out
        details = ask(stage.app, "show", job.id, "--json").document
        assert (details["aliases"], details["state"]) == (["***-1"], {"***": "***", "token": {"of": ["***"]}})
        assert details["inports"]["in"]["default"] == {"***": 1}
    finally:
        stage.close()


def test_what_cannot_be_redacted_is_not_shown(database_url: str) -> None:
    def redact(value: Any) -> Any:
        raise RuntimeError

    stage = Stage(database_url, sidejob_redact=redact)
    try:
        job = stage.sidejob.enqueue(stage.task(_shout, name="stage.shout"), ("my secret",), {"word": "secret"})
        job.set(password="secret")

        nothing = "(not shown: sidejob_redact raised RuntimeError)"
        details = ask(stage.app, "show", job.id, "--json").document
        assert (details["args"], details["state"]) == (nothing, nothing)
        assert "secret" not in ask(stage.app, "show", job.id).out
    finally:
        stage.close()


def _shout(job: RunningJob, text: str, word: str) -> None:
    raise ValueError(f"{text} {word}")


# -- real processes --------------------------------------------------------------------------------------------------


@dataclass
class Shell:
    """Starts real `celery -A tests.cli.shop sidejob …` processes."""

    env: Mapping[str, str]
    processes: Processes

    def __call__(self, *words: object, code: int = 0) -> Said:
        """A copy of a process that has imported Celery, whose two streams are one."""
        done = self.processes.start(self._argv(*words), env=self.env)
        said = Said(done.wait(60), done.log(), done.log())
        assert said.code == code, said
        return said

    def alone(self, *words: object, code: int = 0) -> Said:
        """A process that imports all that it needs itself."""
        done = subprocess.run(
            self._argv(*words), env=environment(self.env), capture_output=True, text=True, timeout=60, check=False
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert said.code == code, said
        assert "Traceback" not in said.err
        return said

    def _argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", "tests.cli.shop", "sidejob", *map(str, words)]


def test_celery_finds_the_commands() -> None:
    (found,) = entry_points(group="celery.commands", name="sidejob")

    assert found.load() is group


def test_the_commands_of_a_real_app(
    empty_database_url: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    env = {"DATABASE_URL": empty_database_url, "BROKER_URL": redis_url}
    celery = Shell(env, processes)

    assert "celery -A tests.cli.shop sidejob db upgrade" in celery.alone("jobs", code=1).err
    assert "Run `celery -A tests.cli.shop sidejob db upgrade`." in celery("doctor", code=2).out
    celery("db", "upgrade")

    client = """
from tests.cli.shop import order, pay, sidejob
job = order.enqueue(("Ann",), {"price": 3}, aliases=["order"])
job.enqueue(pay, (7,), child_name="payment")
sidejob.close()
"""
    assert processes.start_python(client, env=env).wait() == 0
    assert [job["status"] for job in celery.alone("jobs", "--json").document] == ["queued", "queued"]

    worker = processes.start_worker("tests.cli.shop", env=env, pool="solo")
    worker.wait_for_log("entered in the dead set")
    failed = celery("jobs", "--status", Status.FAILED, "--json").document
    assert [job["child_name"] for job in failed] == ["payment"]
    payment = failed[0]["id"]
    assert "ValueError: no money: 7" in celery("show", payment).out
    assert "it is failed" in celery.alone("run", payment, code=1).err
    assert celery("run", payment, "--force", "--json").document["asked"] is True
    worker.wait_for_log("entered in the dead set", count=2)
    assert f"Job {payment} is failed: ValueError: no money: 7" in celery.alone("watch", payment, code=1).err
    made = celery("enqueue", "shop.order", "--args", '["Bea"]', "--json").document["job"]
    assert celery("watch", made).out.rstrip().endswith("completed")
    celery("write", made, "items", 1, '"two"')
    assert [packet["value"] for packet in celery("peek", made, "items", "--json").document] == [1, "two"]
    assert len(celery("tree", "order", "--json").document) == 2
    assert celery("stats", "--json").document["dead"]["entries"] == 1
    assert celery("poll", "--json").document["rescued"] == 0
    assert celery("terminate", "order", "--recursive", "--json").document["status"] in ("terminating", "terminated")


def test_colours_are_for_terminals_and_can_be_turned_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    job = stage.job()

    assert "\x1b[" in ask(stage.app, "show", job.id, no_color=False).out
    assert "\x1b[" not in ask(stage.app, "show", job.id).out
    assert "\x1b[" not in ask(stage.app, "show", job.id, "--json", no_color=False).out
