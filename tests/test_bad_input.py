"""Whatever a public call is given: an error of ours, or Python's TypeError, and nothing is changed by a refusal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from celery_sidejob import InvalidValueError, RunningJob, SideJobError
from celery_sidejob.hooks.tasks.durable_task import DurableTask
from tests.tools.in_process import EMPTY, Stage

LONG = "x" * 5000
ITSELF: list[Any] = []
ITSELF.append({"in": ITSELF})


def deep(levels: int) -> list[Any]:
    """A list in a list, and so on."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


ODD: dict[str, Any] = {
    "NUL": "a\x00b", "5,000 characters": LONG, "a lone surrogate": "\ud800", "an empty text": "", "a word": "x",
    "a small number": 5, "a negative number": -1, "True": True, "a fraction": 1.5, "a list": [],
    "a list of lists": [[1]], "a mapping": {}, "an object": object(),
    "a large number": 2**70, "nan": float("nan"), "infinity": float("inf"),
    "bytes": b"x", "a date": dt.date(2026, 1, 1), "a time before all time": dt.datetime.min,
    "a time after all time": dt.datetime.max, "a timedelta": dt.timedelta.max, "a set": {1}, "a class": int,
    "a list in itself": ITSELF, "a mapping in itself": {"a": ITSELF}, "a list of 2,000 levels": deep(2000),
}  # fmt: skip


class Given:
    """What the calls are made of: a job with a port, a durable task, an entry of the dead set."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.sidejob, self.app = stage, stage.sidejob, stage.app
        self.job = stage.job(aliases=["alias"], state={"a": 1})
        self.port = self.job.input("numbers")
        self.port.write(1)
        self.mail = stage.app.tasks["mail"]
        self.stage.sql(
            "INSERT INTO dead (task_id, task, queue, reason, payload) VALUES ('t', 'mail', 'q', 'lost', '{}')"
        )


MANY = [f"n{number}" for number in range(10_001)]


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.job.tag(*MANY), lambda g: g.job.untag(*MANY), lambda g: g.job.set(dict.fromkeys(MANY)),
        lambda g: g.job.unset(*MANY), lambda g: g.sidejob.subscribe(*(f"/{name}" for name in MANY)),
        lambda g: setattr(g.port, "channels", [f"/{name}" for name in MANY]),
        lambda g: g.stage.job(inports={"a": {"channels": [f"/{name}" for name in MANY]}}),
        lambda g: g.stage.job(tags=MANY), lambda g: g.stage.job(aliases=MANY),
        lambda g: g.stage.job(state=dict.fromkeys(MANY)), lambda g: g.stage.job(inports=MANY),
        lambda g: g.stage.job(outports=dict.fromkeys(MANY)),
    ],
)  # fmt: skip
def test_too_many_names_in_one_call_are_refused(given: Given, call: Callable[[Given], Any]) -> None:
    before = given.stage.everything(without=MARKS)
    with pytest.raises(InvalidValueError, match=r"^One call takes at most 10000 .*: give them in several calls"):
        call(given)
    assert given.stage.everything(without=MARKS) == before


def test_texts_that_people_read_are_bounded(given: Given) -> None:
    before = given.stage.everything(without=MARKS)
    for call in (given.job.log, given.sidejob.queue("q").pause):
        with pytest.raises(InvalidValueError, match="it has 1000001 characters; 1000000 are allowed"):
            call("x" * 1_000_001)
    assert given.stage.everything(without=MARKS) == before


MARKS = ("published_at", "next_check_at")
"""The columns of a message that a call which was not refused still writes, a little later, in its own time."""
Call = Callable[[Given, Any], Any]
OPTIONS = (
    "queue", "parent", "child_name", "eta", "countdown", "created_by", "inports", "outports", "aliases", "state",
    "priority", "limit_key", "task_id", "link", "link_error", "headers", "expires", "time_limit", "soft_time_limit",
    "shadow", "ignore_result", "exchange", "routing_key", "transaction", "root_id", "parent_id", "group_id",
    "group_index", "reply_to", "chain", "chord", "stamped_headers", "replaced_task_nesting",
)  # fmt: skip


def enqueue_with(option: str) -> Call:
    return lambda g, odd: g.sidejob.enqueue(g.stage.idle, **{option: odd})


def call_with(option: str) -> Call:
    return lambda g, odd: g.mail.apply_async(**{option: odd})


def assign(name: str) -> Call:
    return lambda g, odd: setattr(g.port, name, odd)


CALLS: dict[str, Call] = {
    **{f"enqueue({option}=)": enqueue_with(option) for option in OPTIONS},
    **{f"apply_async({option}=)": call_with(option) for option in OPTIONS
       if option not in ("parent", "child_name", "created_by", "inports", "outports", "aliases", "state")},
    "apply_async([])": lambda g, odd: g.stage.app.tasks["plus"].apply_async((1, odd)),
    "apply_async({})": lambda g, odd: g.stage.app.tasks["plus"].apply_async((), {"one": 1, "other": odd}),
    "enqueue(task)": lambda g, odd: g.sidejob.enqueue(odd),
    "enqueue(args)": lambda g, odd: g.sidejob.enqueue(g.stage.idle, odd),
    "enqueue(kwargs)": lambda g, odd: g.sidejob.enqueue(g.stage.idle, (), odd),
    "enqueue_many()": lambda g, odd: g.sidejob.enqueue_many(odd),
    "enqueue_many([])": lambda g, odd: g.sidejob.enqueue_many([odd]),
    "enqueue_many([{}])": lambda g, odd: g.sidejob.enqueue_many([{"task": g.stage.idle, "kwargs": odd}]),
    "send_many()": lambda g, odd: g.sidejob.send_many(odd),
    "send_many([])": lambda g, odd: g.sidejob.send_many([odd]),
    "find()": lambda g, odd: g.sidejob.find(odd),
    "get()": lambda g, odd: g.sidejob.get(odd),
    "for_task_id()": lambda g, odd: g.sidejob.for_task_id(odd),
    "jobs(status=)": lambda g, odd: g.sidejob.jobs(status=odd),
    "jobs(task=)": lambda g, odd: g.sidejob.jobs(task=odd),
    "jobs(queue=)": lambda g, odd: g.sidejob.jobs(queue=odd),
    "jobs(created_by=)": lambda g, odd: g.sidejob.jobs(created_by=odd),
    "jobs(schedule=)": lambda g, odd: g.sidejob.jobs(schedule=odd),
    "jobs(tag=)": lambda g, odd: g.sidejob.jobs(tag=odd),
    "jobs(batch=)": lambda g, odd: g.sidejob.jobs(batch=odd),
    "jobs(older_than=)": lambda g, odd: g.sidejob.jobs(older_than=odd),
    "jobs(parent=)": lambda g, odd: g.sidejob.jobs(parent=odd),
    "jobs(limit=)": lambda g, odd: g.sidejob.jobs(limit=odd),
    "jobs(after=)": lambda g, odd: g.sidejob.jobs(after=odd),
    "iter_jobs(page=)": lambda g, odd: list(g.sidejob.iter_jobs(page=odd)),
    "iter_jobs(after=)": lambda g, odd: list(g.sidejob.iter_jobs(after=odd)),
    "count_jobs()": lambda g, odd: g.sidejob.count_jobs(odd),
    "publish(channel)": lambda g, odd: g.sidejob.publish(odd, 1),
    "publish(message)": lambda g, odd: g.sidejob.publish("/a", odd),
    "publish(transaction=)": lambda g, odd: g.sidejob.publish("/a", 1, transaction=odd),
    "context()": lambda g, odd: write_in(g, g.sidejob.context(key=odd)),
    "job.run(eta=)": lambda g, odd: g.job.run(eta=odd),
    "job.run(countdown=)": lambda g, odd: g.job.run(countdown=odd),
    "job.run(transaction=)": lambda g, odd: g.job.run(transaction=odd),
    "job.cancel_timer()": lambda g, odd: g.job.cancel_timer(odd),
    "job.terminate(transaction=)": lambda g, odd: g.job.terminate(transaction=odd),
    "job.wait(statuses)": lambda g, odd: g.job.wait(odd, timeout=0),
    "job.wait(timeout=)": lambda g, odd: g.job.wait("queued", timeout=odd),
    "job.child()": lambda g, odd: g.job.child(odd),
    "job.enqueue(child_name=)": lambda g, odd: g.job.enqueue(g.stage.idle, child_name=odd),
    "job.adopt(job)": lambda g, odd: g.job.adopt(odd, "name"),
    "job.adopt(name)": lambda g, odd: g.job.adopt(g.stage.job(), odd),
    "job.disown()": lambda g, odd: g.job.disown(odd),
    "job.add_alias()": lambda g, odd: g.job.add_alias(odd),
    "job.remove_alias()": lambda g, odd: g.job.remove_alias(odd),
    "job.input()": lambda g, odd: g.job.input(odd),
    "job.output()": lambda g, odd: g.job.output(odd),
    "job.configure_ports(inports=)": lambda g, odd: g.job.configure_ports(inports=odd),
    "job.configure_ports(outports=)": lambda g, odd: g.job.configure_ports(outports=odd),
    "job.get()": lambda g, odd: g.job.get(odd),
    "job.set()": lambda g, odd: g.job.set(odd),
    "job.set({})": lambda g, odd: g.job.set({odd: 1} if odd.__hash__ else odd),
    "job.set(key=)": lambda g, odd: g.job.set(key=odd),
    "job.set(transaction=)": lambda g, odd: g.job.set(key=1, transaction=odd),
    "job.unset()": lambda g, odd: g.job.unset(odd),
    "job.publish()": lambda g, odd: g.job.publish(odd),
    "port.write()": lambda g, odd: g.port.write(odd),
    "port.write(transaction=)": lambda g, odd: g.port.write(1, transaction=odd),
    "port.write_many()": lambda g, odd: g.port.write_many(odd),
    "port.read_many()": lambda g, odd: g.port.read_many(odd),
    "port.read_many(transaction=)": lambda g, odd: g.port.read_many(1, transaction=odd),
    "port.peek()": lambda g, odd: g.port.peek(odd),
    "port.default": assign("default"),
    "port.channels": assign("channels"),
    "port.channels = []": lambda g, odd: setattr(g.port, "channels", [odd]),
    "dead.list(group=)": lambda g, odd: g.sidejob.dead.list(group=odd),
    "dead.list(task=)": lambda g, odd: g.sidejob.dead.list(task=odd),
    "dead.list(queue=)": lambda g, odd: g.sidejob.dead.list(queue=odd),
    "dead.list(limit=)": lambda g, odd: g.sidejob.dead.list(limit=odd),
    "dead.list(after=)": lambda g, odd: g.sidejob.dead.list(after=odd),
    "dead.get()": lambda g, odd: g.sidejob.dead.get(odd),
    "dead.for_task_id()": lambda g, odd: g.sidejob.dead.for_task_id(odd),
    "dead.retry()": lambda g, odd: g.sidejob.dead.retry(odd),
    "dead.retry_all(group=)": lambda g, odd: g.sidejob.dead.retry_all(group=odd),
    "dead.retry_all(task=)": lambda g, odd: g.sidejob.dead.retry_all(task=odd),
    "dead.retry_all(queue=)": lambda g, odd: g.sidejob.dead.retry_all(queue=odd),
    "dead.retry_all(limit=)": lambda g, odd: g.sidejob.dead.retry_all(group="none", limit=odd),
    "dead.delete()": lambda g, odd: g.sidejob.dead.delete(odd),
    "dead.purge(older_than=)": lambda g, odd: g.sidejob.dead.purge(older_than=odd),
    "dead.purge(keep=)": lambda g, odd: g.sidejob.dead.purge(keep=odd),
    "task.retention": lambda g, odd: g.sidejob.task(named(), name=f"t{id(odd)}", retention=odd),
    "task.max_losses": lambda g, odd: g.sidejob.task(named(), name=f"u{id(odd)}", max_losses=odd),
    "task.inports": lambda g, odd: g.sidejob.task(named(), name=f"v{id(odd)}", inports=odd),
    "job.retry(countdown=)": lambda g, odd: g.stage.inside(lambda job: refused(job.retry, countdown=odd)),
    "job.for_inputs()": lambda g, odd: g.stage.inside(lambda job: refused(lambda: list(job.for_inputs(odd)))),
    "job.for_inputs(commit_every=)": lambda g, odd: g.stage.inside(
        lambda job: refused(lambda: list(job.for_inputs("a", commit_every=odd)))
    ),
    "job.for_inputs(commit_within=)": lambda g, odd: g.stage.inside(
        lambda job: refused(lambda: list(job.for_inputs("a", commit_within=odd)))
    ),
    "port.peek() in a run": lambda g, odd: g.stage.inside(lambda job: refused(job.input("a").peek, odd)),
    "job.child() in a run": lambda g, odd: g.stage.inside(lambda job: refused(job.child, odd)),
    "job.disown() in a run": lambda g, odd: g.stage.inside(lambda job: refused(job.disown, odd)),
    "job.set_priority()": lambda g, odd: g.job.set_priority(odd),
    "queue()": lambda g, odd: g.sidejob.queue(odd).counts,
    "queue.pause()": lambda g, odd: g.sidejob.queue("q").pause(odd),
    "queue.configure(ordered=)": lambda g, odd: g.sidejob.queue("q").configure(ordered=odd),
    "queue.configure(limit=)": lambda g, odd: g.sidejob.queue("q").configure(limit=odd),
    "queue.configure(limit_per_key=)": lambda g, odd: g.sidejob.queue("q").configure(limit_per_key=odd),
    "queue.configure(rate=)": lambda g, odd: g.sidejob.queue("q").configure(rate=odd),
    "queue.peek()": lambda g, odd: g.sidejob.queue("q").peek(odd),
    "revoke()": lambda g, odd: g.app.control.revoke(odd),
}  # fmt: skip


def named() -> Any:
    def body(job: RunningJob) -> None:
        pass

    return body


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """In a run: do it; what is ours or a TypeError is as it should be."""
    with suppress(SideJobError, TypeError):
        call(*args, **kwargs)


def write_in(given: Given, scope: Any) -> None:
    with scope:
        given.port.write(1)


@pytest.fixture(scope="module")
def shared(stage_database_url: str) -> Iterator[Stage]:
    """An app that all of these tests use: to make one takes longer than most of them."""
    made = Stage(stage_database_url)

    @made.app.task(name="mail", durable=True, shared=False)
    def mail() -> None:
        pass

    @made.app.task(name="plus", durable=True, shared=False)
    def plus(one: Any, other: Any) -> None:
        pass

    made.app.finalize()
    assert isinstance(made.app.tasks["mail"], DurableTask)
    yield made
    made.close()


@pytest.fixture
def given(shared: Stage) -> Iterator[Given]:
    shared.worker_id = shared.new_worker()
    yield Given(shared)
    shared.sql(EMPTY)


@pytest.mark.few(1000)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_cannot_be_done_is_refused_with_an_error_of_ours(given: Given, call: str) -> None:
    wrong = []
    before: dict[str, list[str]] | None = None
    for what, odd in ODD.items():
        before = before or given.stage.everything(without=MARKS)
        try:
            CALLS[call](given, odd)
        except (SideJobError, TypeError, TimeoutError):
            if "adopt" not in call:
                assert given.stage.everything(without=MARKS) == before, f"{call} of {what}"
                continue  # the next call finds this too
        except BaseException as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:150]}")
        before = None
    assert wrong == []


REFUSED = [
    ("jobs(after=)", "x"), ("jobs(after=)", True), ("jobs(queue=)", "a\x00b"), ("jobs(task=)", 5),
    ("iter_jobs(after=)", "x"), ("dead.get()", True), ("dead.list(group=)", "a\x00b"), ("dead.list(after=)", True),
    ("port.peek()", -1), ("port.peek()", True), ("enqueue(state=)", "x"), ("enqueue(task_id=)", LONG),
    ("apply_async(task_id=)", LONG), ("enqueue(queue=)", "a\x00b"), ("apply_async(queue=)", "a\x00b"),
    *((f"{call}({option}=)", odd) for call in ("enqueue", "apply_async") for option, odd in (
        ("link", 5), ("link", [5]), ("link", "mail"), ("link_error", 5), ("chain", 5), ("chain", [[]]), ("chord", []),
        ("headers", {"task": "other"}), ("time_limit", "x"), ("time_limit", -1), ("soft_time_limit", float("nan")),
        ("expires", float("inf")), ("countdown", float("nan")), ("shadow", 5), ("root_id", []), ("group_index", "x"),
        ("ignore_result", "no"), ("stamped_headers", "x"), ("priority", -1),
    )),
    ("job.wait(timeout=)", "soon"), ("job.child()", 5), ("dead.purge(keep=)", -1),
]  # fmt: skip


def test_what_would_fail_later_is_refused_at_once(given: Given) -> None:
    for call, odd in REFUSED:
        with pytest.raises(InvalidValueError):
            CALLS[call](given, odd)
