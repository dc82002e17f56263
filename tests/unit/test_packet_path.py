"""The way of a packet, from a client's `write` to the body that reads it: how many modules, and how many statements."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import pytest

from celery_sidejob import RunningJob
from celery_sidejob.store import audience
from celery_sidejob.store.connection.own_executor import OwnExecutor
from tests.tools.in_process import Stage

PACKET = "the packet that is followed"


@contextmanager
def followed(modules: set[str]) -> Iterator[None]:
    """Note the modules of the package that have the packet in hand within the block."""

    def look(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event not in ("call", "return") or not module.startswith("celery_sidejob."):
            return
        if any(map(holds_packet, list(frame.f_locals.values()))):
            modules.add(module)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def holds_packet(value: Any) -> bool:
    if isinstance(value, str):
        return PACKET in value
    if isinstance(value, dict):
        return any(map(holds_packet, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(holds_packet, value))
    if is_dataclass(value) and not isinstance(value, type):
        return any(holds_packet(getattr(value, field.name, None)) for field in fields(value))
    return False


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our statements as they are run, without BEGIN and COMMIT."""
    run, noted = OwnExecutor.run, []

    def noting(self: OwnExecutor, statement: Any, /, **parameters: Any) -> Any:
        if statement is not audience._ASK:  # which is asked once a second, whatever is done
            noted.append(statement.text)
        return run(self, statement, **parameters)

    monkeypatch.setattr(OwnExecutor, "run", noting)
    return noted


def test_a_packet_passes_at_most_twelve_modules(stage: Stage) -> None:
    """A module is on the way if the packet is among the arguments or local variables of one of its functions.

    It may be inside lists, tuples, mappings and dataclasses. So the modules that lock the reader, or ring for it, are
    not on the way, and what carries the packet to Postgres and back is.
    """
    read: list[Any] = []
    modules: set[str] = set()

    @stage.task(name="reads", inports=["i"])
    def reads(job: RunningJob) -> None:
        with followed(modules):
            read.append(job.input("i").read())

    job = reads.enqueue()
    with followed(modules):
        job.input("i").write(PACKET)
    stage.run(job)

    assert read == [PACKET]
    assert {"celery_sidejob.jobs.port", "celery_sidejob.store.packets", "celery_sidejob.unit.read_ahead"} <= modules
    assert len(modules) <= 12, sorted(modules)


def test_each_step_of_the_way_asks_the_store_for_nothing_twice(stage: Stage, statements: list[str]) -> None:
    seen: list[list[str]] = []

    def ran() -> list[str]:
        found = [text.partition(" ")[0] for text in statements]
        statements.clear()
        return found

    @stage.task(name="passes_on", inports=["i"], outports=["o"])
    def passes_on(job: RunningJob) -> None:
        statements.clear()
        source, target = job.input("i"), job.output("o")
        seen.append(ran())
        assert [source.read(), source.read()] == [1, 2]
        seen.append(ran())
        target.write_many([3, 4])
        seen.append(ran())

    job = passes_on.enqueue()
    job.input("i").write(1)
    statements.clear()
    port = job.input("i")
    assert ran() == []
    port.write(2)
    assert len(ran()) == 4, "the ports, the lock, the packet, the wake"
    stage.run(job)
    assert [len(step) for step in seen] == [0, 1, 0]
    statements.clear()
    assert job.output("o").read() == 3
    assert len(ran()) == 1


def test_a_turn_reads_the_ports_and_the_parent_in_one_statement(stage: Stage, statements: list[str]) -> None:
    turns: list[int] = []

    @stage.task(name="turns", inports=["i"], outports=["o"])
    def turns_of(job: RunningJob) -> None:
        for value in job.for_inputs("i"):
            turns.append(len(statements))
            statements.clear()
            job.output("o").write(value)

    job = stage.job().enqueue(turns_of, child_name="c")
    job.input("i").write_many([1, 2, 3])
    stage.run(job)
    assert turns[1:] == [5, 4], (
        "the ports with the parent, the lock, the fence with the packet read, the one written, the wake"
    )


def test_a_call_does_not_read_what_it_has_just_made(stage: Stage, statements: list[str]) -> None:
    @stage.task(name="called")
    def called(job: RunningJob, number: int) -> None: ...

    statements.clear()
    result = called.delay(5)
    assert [text.split()[0] for text in statements if "SELECT" in text.split()[:1]] == []
    assert result.id == result.job.task_id
