"""A call meets only what it uses: how many files and functions of the package one without options passes through.

So does a packet, from the call that writes it to the body that reads it.

The broker is the store, the process is warm, and each call wakes the workers. Who listens to announcements is known.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

import celery_sidejob
from celery_sidejob import NO_DATA, RunningJob
from celery_sidejob.hooks.worker.holding import WorkerOutbox
from celery_sidejob.model.durable import WORKER
from celery_sidejob.operations import audience
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.store import measured
from celery_sidejob.transport.postgres import link
from tests.tools.apps import make_app
from tests.tools.in_process import Stage
from tests.transport.consuming import Consuming

PACKAGE = str(Path(celery_sidejob.__file__).parent)
WARM = 8


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a call takes does not change what it does."""
    monkeypatch.setattr(link, "APART_S", 0.0)
    monkeypatch.setattr(audience, "KNOWN_S", 3600.0)
    monkeypatch.setattr(measured, "EVERY_S", 3600.0)


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    """An app whose broker is its store."""
    made = make_app("lean", broker="sidejobpg://", sidejob_database_url=database_url, task_ignore_result=True)
    yield made
    made.sidejob.close()
    made.close()


def passed(call: Callable[[], Any]) -> tuple[int, int]:
    """Return through how many files and functions of the package a call passes."""
    for _ in range(WARM):
        call()
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            seen.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len({file for file, _ in seen}), len(seen)


def test_delay_of_a_durable_task(app: Celery) -> None:
    @app.task(name="durable", durable=True, shared=False)
    def durable(number: int) -> None:
        pass

    files, functions = passed(lambda: durable.delay(5))

    assert files <= 25, "of the package"
    assert functions <= 80, "of the package"


def test_enqueue(app: Celery) -> None:
    @app.sidejob.task(name="job")
    def job(job: Any, number: int) -> None:
        pass

    files, functions = passed(lambda: job.enqueue((5,)))

    assert files <= 30, "of the package"
    assert functions <= 110, "of the package"


def test_a_packet_from_write_to_the_body(database_url: str) -> None:
    stage = Stage(database_url, broker="sidejobpg://", task_ignore_result=True)
    trace = build_tracer("stage.call", stage.app.tasks["stage.call"], app=stage.app)
    read: list[Any] = []

    def body(job: RunningJob) -> None:
        read.append(job.input("numbers").read())
        sys.setprofile(None)  # what follows the read is not counted

    heart = Heartbeat(stage.runtime)
    with closing(stage), closing(heart), stage.app.connection_for_read() as connection:
        heart.register()
        stage.sidejob.heartbeats = [heart]
        connection.transport.outbox = WorkerOutbox(stage.app)
        job, consuming = stage.job(body), Consuming(connection, "celery")

        def deliver() -> None:
            while not consuming.messages:
                consuming.drain_once()
            message = consuming.messages.pop()
            trace(message.headers["id"], [], {}, {**message.headers, "delivery_info": {}, WORKER: stage.worker_id})
            message.ack()

        def pass_on() -> None:
            job.input("numbers").write(len(read))
            deliver()

        deliver()
        files, _ = passed(pass_on)

    assert read == [NO_DATA, *range(1, WARM + 2)]
    assert files <= 80, "of the package"


FAILOVER = {"Store", "Stores", "failover_urls", "in_each_store", "is_left_alone", "several", "stores"}
"""Names by which code knows that an app may have several stores."""


def test_few_files_know_that_there_may_be_several_stores() -> None:
    """`Runtime` tells the others what they need to know of their store among them."""
    knowing = {path.relative_to(PACKAGE).as_posix() for path in Path(PACKAGE).rglob("*.py") if _names(path) & FAILOVER}

    assert len(knowing) <= 15, sorted(knowing)


def _names(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found
