"""A client without a task's code: it makes jobs by what workers have registered."""

from __future__ import annotations

from typing import Any

from celery import signals

from celery_sidejob.store import registry
from tests.tools.in_process import Stage

REGISTERED = {"task": "far.away", "queue": "far", "options": '{"inports": {"a": {"channels": []}}, "outports": {}}'}


def test_the_ports_of_its_task_are_looked_up_without_a_call(stage: Stage) -> None:
    registry.register(stage.runtime.connections, [REGISTERED])
    job = stage.sidejob.enqueue("far.away")
    called: list[str] = []

    def note(sender: str, **_: Any) -> None:
        called.append(sender)

    signals.before_task_publish.connect(note)
    try:
        job.configure_ports(outports=["z"])
    finally:
        signals.before_task_publish.disconnect(note)

    assert (job.queue, called) == ("far", [])
    assert ([port.name for port in job.inports], [port.name for port in job.outports]) == (["a"], ["z"])
