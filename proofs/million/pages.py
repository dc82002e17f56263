"""What people and monitors look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_sidejob.cli import sidejob as commands
from celery_sidejob.diagnosis import database, workers
from celery_sidejob.diagnosis.database import look
from celery_sidejob.examination import OF_FIRST_STORE
from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.inspection.queues import QueueViews
from celery_sidejob.inspection.statistics import StatisticsViews
from celery_sidejob.inspection.tasks import TaskViews
from celery_sidejob.jobs.job import Job
from tests.tools.in_process import Stage


@dataclass(frozen=True, slots=True)
class Page:
    """`is_stated`: the docstring of what is read tells of its cost."""

    read: Callable[[], Any]
    is_stated: bool = False


def pages_of(stage: Stage, rows: int) -> dict[str, Page]:
    """Return each page by the name of the command or the call."""
    sidejob, runtime = stage.sidejob, stage.runtime
    dead, port = sidejob.dead, Job(rows, runtime=stage.runtime).input("a")
    parent = Job(rows + 1, runtime=stage.runtime)
    newest = next(iter(dead.list(limit=1))).id
    return {
        "show: a job": Page(lambda: JobViews(runtime).details(Job(7, runtime=stage.runtime))),
        "show: a parent of all": Page(lambda: JobViews(runtime).details(parent)),
        "show: a port with all packets": Page(lambda: JobViews(runtime).details(Job(rows, runtime=stage.runtime))),
        "show: a durable task": Page(lambda: TaskViews(runtime).task("task-7")),
        "find(alias)": Page(lambda: sidejob.find("alias-7")),
        "for_task_id": Page(lambda: sidejob.for_task_id("closed-7")),
        "for_task_id, of no job": Page(lambda: sidejob.for_task_id("nobody's")),
        "tree --limit 1000": Page(lambda: JobViews(runtime).tree(parent, limit=1000)),
        "parent.child(name)": Page(lambda: parent.child("child-7")),
        "parent.children": Page(lambda: parent.children, is_stated=True),
        "len(port)": Page(lambda: len(port), is_stated=True),
        "port.has_data": Page(lambda: port.has_data),
        "port.peek()": Page(port.peek),
        "stats": Page(StatisticsViews(runtime).stats),
        "drain": Page(lambda: QueueViews(runtime).pending(horizon_s=60.0)),
        "drain --queue": Page(lambda: QueueViews(runtime).pending("rare", horizon_s=60.0)),
        "knows_queue, of none": Page(lambda: QueueViews(runtime).knows_queue("nobody's"), is_stated=True),
        "jobs()": Page(sidejob.jobs),
        "jobs(queued, queue)": Page(lambda: sidejob.jobs(status="queued", queue="waits"), is_stated=True),
        "jobs(queued, a small queue)": Page(lambda: sidejob.jobs(status="queued", queue="rare"), is_stated=True),
        "jobs(queued, no such queue)": Page(lambda: sidejob.jobs(status="queued", queue="nobody's"), is_stated=True),
        "jobs(queued)": Page(lambda: sidejob.jobs(status="queued"), is_stated=True),
        "jobs(running)": Page(lambda: sidejob.jobs(status="running")),
        "jobs(suspended)": Page(lambda: sidejob.jobs(status="suspended"), is_stated=True),
        "jobs(terminating)": Page(lambda: sidejob.jobs(status="terminating"), is_stated=True),
        "jobs(failed)": Page(lambda: sidejob.jobs(status="failed")),
        "jobs(failed, task)": Page(lambda: sidejob.jobs(status="failed", task="broken")),
        "jobs(completed)": Page(lambda: sidejob.jobs(status="completed")),
        "jobs(terminated)": Page(lambda: sidejob.jobs(status="terminated"), is_stated=True),
        "jobs(task)": Page(lambda: sidejob.jobs(task="broken"), is_stated=True),
        "jobs(queue)": Page(lambda: sidejob.jobs(queue="parents"), is_stated=True),
        "jobs(queue), of none": Page(lambda: sidejob.jobs(queue="nobody's"), is_stated=True),
        "jobs(tag)": Page(lambda: sidejob.jobs(tag="tag-7")),
        "jobs(tag), of none": Page(lambda: sidejob.jobs(tag="nobody's")),
        "jobs(older_than)": Page(lambda: sidejob.jobs(older_than=0)),
        "jobs(older_than), of none": Page(lambda: sidejob.jobs(older_than=1e9), is_stated=True),
        "tags()": Page(sidejob.tags, is_stated=True),
        "tracked()": Page(sidejob.tracked),
        "jobs(parent)": Page(lambda: sidejob.jobs(parent=parent), is_stated=True),
        "jobs(created_by), of nobody": Page(lambda: sidejob.jobs(created_by="nobody"), is_stated=True),
        "count_jobs()": Page(sidejob.count_jobs, is_stated=True),
        "len(dead)": Page(lambda: len(dead), is_stated=True),
        "dead.list()": Page(dead.list),
        "dead.list(task)": Page(lambda: dead.list(task="mail-7")),
        "dead.list(group)": Page(lambda: dead.list(group="Lost")),
        "dead.list(task), of none": Page(lambda: dead.list(task="nobody's")),
        "dead.list(group), of none": Page(lambda: dead.list(group="Nobody's")),
        "dead.list(group, task), of none": Page(lambda: dead.list(group="Lost", task="broken"), is_stated=True),
        "dead.list(queue)": Page(lambda: dead.list(queue="mail"), is_stated=True),
        "dead.list(queue), of none": Page(lambda: dead.list(queue="nobody's"), is_stated=True),
        "dead.list(task, queue)": Page(lambda: dead.list(task="mail-7", queue="mail")),
        "dead.list(task, queue), of none": Page(lambda: dead.list(task="broken", queue="nobody's"), is_stated=True),
        "dead.purge(), of nothing": Page(lambda: dead.purge(older_than=1e9), is_stated=True),
        "dead.purge(keep), of nothing": Page(lambda: dead.purge(keep=10**9), is_stated=True),
        "dead.retry_all(), of nothing": Page(lambda: dead.retry_all(task="nobody's")),
        "dead.groups()": Page(dead.groups, is_stated=True),
        "dead.get": Page(lambda: dead.get(newest)),
        "dead.for_task_id": Page(lambda: dead.for_task_id("buried-7")),
        "dead.for_task_id, of none": Page(lambda: dead.for_task_id("nobody's")),
        "job.terminated, of a parent of all": Page(lambda: parent.terminated, is_stated=True),
        **_checks(stage),
        **_commands(stage, rows),
    }


def _checks(stage: Stage) -> dict[str, Page]:
    """Return each check of `doctor` that reads tables."""
    runtime = stage.runtime
    named = {
        f"doctor: {check.__name__}": Page(lambda check=check: list(look(runtime, check, within_s=None)))
        for check in (*OF_FIRST_STORE, database.server)
    }
    owner = stage.sidejob.owner
    others = {
        "doctor: schema": Page(lambda: list(database.schema(runtime, owner, role="", within_s=None))),
        "doctor: liveness": Page(lambda: list(workers.liveness(runtime, within_s=None))),
        "doctor: rules": Page(lambda: list(look(runtime, partial(database.rules, thorough=False), within_s=None))),
        "doctor --thorough: rules": Page(
            lambda: list(look(runtime, partial(database.rules, thorough=True), within_s=None)), is_stated=True
        ),
    }
    return {**named, **others}


def _commands(stage: Stage, rows: int) -> dict[str, Page]:
    """Return each command that reads, in this process, with its printing."""

    def command(*words: object) -> Page:
        context = CLIContext(app=stage.app, no_color=True, workdir=None)

        def ask() -> None:
            done = CliRunner().invoke(commands, [str(word) for word in words], obj=context, catch_exceptions=False)
            assert done.exit_code != 2 or words[0] in ("doctor", "drain"), done.output

        return Page(ask, is_stated=words in stated)

    parent = rows + 1
    stated = {("doctor",), ("tree", parent), ("jobs", "--parent", parent)}
    return {
        "$ " + " ".join(map(str, words)): command(*words)
        for words in (
            ("show", 7), ("show", parent), ("show", rows), ("show", "task-7"), ("show", "closed-7"),
            ("show", "buried-7"), ("show", "alias-7"), ("tree", parent), ("tree", parent, "--limit", 100),
            ("tree", parent, "--json"), ("jobs",), ("jobs", "--json"), ("jobs", "--status", "failed"),
            ("jobs", "--parent", parent), ("stats",), ("stats", "--prometheus"), ("dead", "list"), ("dead", "show", 7),
            ("doctor",), ("drain", "--timeout", 0), ("db", "check"),
        )
    }  # fmt: skip
