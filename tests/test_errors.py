"""Each error says what docs/errors.md says, and whoever is refused has written nothing."""

from __future__ import annotations

import contextvars
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from celery import Celery, _state, group
from celery.concurrency import get_implementation
from celery.schedules import crontab

from celery_sidejob import (
    CapacityPool,
    Job,
    JobFailed,
    RunningJob,
    Schedule,
    SideJob,
    SideJobError,
    StoreUnavailableError,
    current_job,
    heartbeat,
)
from celery_sidejob.hooks import apps
from celery_sidejob.hooks.beat import declaration_of
from celery_sidejob.hooks.messages import carried
from celery_sidejob.hooks.tasks import durable_task
from celery_sidejob.hooks.worker import pool_process
from celery_sidejob.jobs import schedule as scheduling
from celery_sidejob.model import errors, native
from celery_sidejob.model.durable import Message
from celery_sidejob.model.schedule import parse
from celery_sidejob.model.settings import read_settings
from celery_sidejob.operations.changes import batches
from celery_sidejob.operations.ledger import durable_ends, durable_runs, keeping
from celery_sidejob.pools import coroutines
from celery_sidejob.results import backend
from celery_sidejob.services.heartbeat.liveness import HeartbeatFile
from celery_sidejob.store import require_libpq
from celery_sidejob.unit.open_unit import OpenUnit
from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


@dataclass(frozen=True)
class Row:
    """A line of the page's table."""

    error: str
    when: str
    message: str

    @property
    def pattern(self) -> str:
        """What the message must match as a whole."""
        return re.sub(r"<\w+>", ".+", re.escape(self.message).replace(r"<…>", ".+"))


def documented() -> dict[str, Row]:
    """Return the table's lines by their second column."""
    found = {}
    for line in PAGE.read_text().splitlines():
        match = re.fullmatch(r"\| `(\w+)` \| (.+?) \| (?:`` (.+) ``|`(.+)`) \| .+ \|", line)
        if match:
            error, when, *messages = match.groups()
            assert when not in found, f"twice: {when}"
            found[when] = Row(error, when, messages[0] or messages[1])
    return found


ROWS = documented()


def ordinary() -> None:
    """A task of Celery's own kind."""


def under_gevent() -> None:
    """Run a coroutine where gevent has replaced threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_patched", lambda: True)
        coroutines.run(asynchronous())


def generator(*args: Any) -> Iterator[None]:
    yield


async def asynchronous(*args: Any) -> None:
    """What no worker runs."""


def filled(s: Any) -> Any:
    """A full port of a new job."""
    port = s.stage.job(inports={"in": {"limit": 2}}).input("in")
    port.write_many([1, 2])
    return port


def stored_at(url: str, **options: Any) -> None:
    """Keep a result at such a URL."""
    with Celery("plain", set_as_current=False) as app:
        app.conf.update(result_backend=url, result_backend_transport_options=options)
        app.backend.mark_as_done("t", 1)


def too_large(scene: Scene) -> None:
    """Get a result in whose place the backend keeps an error."""
    with Celery("plain", set_as_current=False) as app:
        app.conf.result_backend = in_postgres(scene.stage.database_url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "MOST_BYTES", 1000)
            app.backend.mark_as_done("t", "x" * 1000)
        app.AsyncResult("t").get(timeout=10)


def nothing(job: RunningJob) -> None:
    """A task of ours with one port."""


class Scene:
    """What the cases work on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.sidejob = stage.sidejob
        stage.app.task(ordinary, name="ordinary", shared=False)
        self.job = stage.sidejob.enqueue(stage.idle, aliases=["mine"], inports=["a"], unique="mine")
        self.strict = stage.task(nothing, name="strict", inports=["a"]).enqueue()
        self.other = stage.job()
        self.kid = self.job.enqueue(stage.idle, child_name="kid")
        self.ended = stage.job()
        self.ended.terminate()
        self.gone = Job(10**9, runtime=stage.runtime)
        stage.runtime.connections.write_behind_now()  # what was counted, which is written within a second

    def inside(self, body: Callable[[RunningJob], Any]) -> None:
        """Run the body in a run; the run itself is rolled back with what it is refused."""
        self.stage.inside(body)


Case = Callable[[Scene], Any]


class Obscure(Exception):
    """An error that cannot be made of its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raising_obscurely() -> None:
    """A step that fails so."""
    raise Obscure(code=7)


def step_in_block(job: RunningJob, scene: Scene) -> None:
    """A step where a unit is open."""
    with scene.stage.connect(autocommit=False) as connection, job.unit(transaction=connection):
        job.step("a", str)


def step_in_hook(scene: Scene) -> None:
    """A hook that comes to a step."""
    task = scene.stage.task(nothing, name="starting")
    task.on_startup(lambda job: job.step("a", str))
    scene.stage.run(task.enqueue())


def read_before_step(scene: Scene) -> None:
    """A run that reads a packet, and then comes to a step."""

    def body(job: RunningJob) -> None:
        job.input("a").read()
        job.step("a", str)

    job = scene.stage.job(body)
    job.input("a").write(1)
    scene.stage.run(job)


def failed_child(scene: Scene) -> None:
    """A parent whose child has failed."""
    child = scene.stage.task(nothing, name="failing")
    job = scene.stage.job(lambda job: job.call("child", child))
    scene.stage.run(job)
    job.child("child").terminate()  # type: ignore[union-attr]
    scene.stage.drain()
    raise scene.stage.raised[job.id]


def in_transaction(scene: Scene, work: Callable[[Any], Any]) -> None:
    """Do something in a transaction."""
    with scene.stage.connect(autocommit=False) as connection:
        work(connection)


def keyed_unseen(scene: Scene, call: Callable[..., Any]) -> None:
    """Give a key that was taken after the transaction had begun to read."""
    with scene.stage.connect(autocommit=False) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM sidejob.jobs")
        call(unique="new")
        call(unique="new", transaction=connection)


def lent(scene: Scene, before: str) -> None:
    """Make a job in a transaction in which something was done before."""
    with scene.stage.connect(autocommit=False) as connection:
        with suppress(psycopg.Error):
            connection.execute(before)
        scene.stage.job(transaction=connection)


def scheduled(scene: Scene, **given: Any) -> None:
    """Make a schedule of something that cannot be."""
    scene.sidejob.schedule("s", scene.stage.idle, **{"every": 60, **given})


def deleting_the_declared() -> None:
    """Delete a schedule that the configuration declares."""
    app = make_app("declares", sidejob_schedules={"s": {"task": "any.task", "every": 60}})
    Schedule("s", runtime=app.sidejob.runtime).delete()


def unmanaging_the_declared(scene: Scene) -> None:
    """Have nobody manage a queue that the configuration declares."""
    make_app("declares", sidejob_queues={"mail": {"limit": 5}}).sidejob.queue("mail").unmanage()


UNWRITTEN: dict[str, Case] = {
    "`run(fresh=True)` with `transaction=`": lambda s: s.job.run(fresh=True, transaction=object()),
    "`fork` before a step that is not finished": lambda s: s.sidejob.fork(s.job, before="pack"),
    "`get` of an unknown id or alias": lambda s: s.sidejob.get("nobody"),
    "the job of a handle was deleted": lambda s: s.gone.set(a=1),
    "`parent=` names no job": lambda s: s.sidejob.enqueue(s.stage.idle, parent=10**9, child_name="x"),
    "the dead set does not have this entry any more": lambda s: s.sidejob.dead.retry(10**9),
    "no module here has the task, and no worker serves it": lambda s: s.sidejob.enqueue("no.such.task"),
    "the task makes no jobs": lambda s: s.sidejob.enqueue("ordinary"),
    "the argument is not a task": lambda s: s.sidejob.enqueue(7),
    "a child is made for a job that is ending or has ended": lambda s: s.ended.enqueue(s.stage.idle, child_name="x"),
    "`adopt` by a job that is ending or has ended": lambda s: s.ended.adopt(s.other, "x"),
    "`current_job` outside a run": lambda s: current_job.id,
    "`heartbeat(strict=True)` outside a run": lambda s: heartbeat(strict=True),
    "the job has no such port": lambda s: s.strict.input("b").write(1),
    "`write(wait=)` with `transaction=`": lambda s: s.job.input("a").write(1, wait=1, transaction=object()),
    "`write(wait=)` is not a time": lambda s: s.job.input("a").write(1, wait="long"),
    "`connect_to` names a port twice": lambda s: s.job.input("a").connect_to(s.job.input("b"), s.job.input("b")),
    "`connect_to` without ports": lambda s: s.job.input("a").connect_to(),
    "an argument of `connect_to` is not a port": lambda s: s.job.input("a").connect_to("b"),
    "a port is connected to itself": lambda s: s.job.input("a").connect_to(s.job.input("a")),
    "the limit of a port is not a number of packets": lambda s: s.stage.job(inports={"a": {"limit": 0}}),
    "a port's name breaks the rules": lambda s: s.job.input("a-b"),
    "ports are neither names nor a mapping": lambda s: s.stage.job(inports="ab"),
    "an unknown option of a port": lambda s: s.stage.job(inports={"a": {"defualt": 1}}),
    "a channel's name does not begin with a slash": lambda s: s.sidejob.publish("sums", 1),
    "`channels` is set to a string": lambda s: setattr(s.job.input("a"), "channels", "/sums"),
    "an alias does not begin with a letter": lambda s: s.job.add_alias("1st"),
    "an alias looks like a UUID": lambda s: s.stage.job(aliases=["a" * 32]),
    "`remove_alias` of an alias that the job does not have": lambda s: s.job.remove_alias("yours"),
    "a value is not JSON": lambda s: s.job.input("a").write({"x": [float("nan")]}),
    "JSON does not have the type of a value": lambda s: s.job.set(a=b"bytes"),
    "one call has more than 10,000 tags, aliases, channels, ports or keys of the state": lambda s: s.job.tag(
        *(f"tag{number}" for number in range(10_001))
    ),
    "the arguments of a durable task are too large": lambda s: durable(s, typing=False).delay("x" * carried.MOST_BYTES),
    "a value is too large": lambda s: s.job.input("a").write("x" * 1_100_000),
    "an invalid key of the state": lambda s: s.job.set({"k" * 300: 1}),
    "an invalid name of a child": lambda s: s.job.enqueue(s.stage.idle, child_name=""),
    "`parent=` without `child_name=`, or the reverse": lambda s: s.sidejob.enqueue(s.stage.idle, parent=s.job),
    "a priority out of range": lambda s: s.stage.job(priority=10),
    "the name of a queue is empty": lambda s: s.sidejob.queue(""),
    "`ordered` of a queue is not a boolean": lambda s: s.sidejob.queue("mail").configure(ordered="yes"),  # type: ignore[arg-type]
    "a limit of a queue is not a number of runs": lambda s: s.sidejob.queue("mail").configure(limit=0),
    "`unmanage` of a queue that `sidejob_queues` declares": unmanaging_the_declared,
    "there is no schedule of this name": lambda s: s.sidejob.get_schedule("nothing"),
    "the name of a schedule is not a text, or empty": lambda s: s.sidejob.schedule("", s.stage.idle, every=1),
    "the task of a schedule is not a task": lambda s: s.sidejob.schedule("s", 5, every=1),
    "the task of a schedule is neither durable nor a sidejob task": lambda s: s.sidejob.schedule(
        "s", "ordinary", every=1
    ),
    "`args=` of a schedule is not a list": lambda s: scheduled(s, args=5),
    "`kwargs=` of a schedule is not a mapping": lambda s: scheduled(s, kwargs=5),
    "a schedule has both `every=` and `cron=`": lambda s: scheduled(s, cron="* * * * *"),
    "a schedule has neither `every=` nor `cron=`": lambda s: scheduled(s, every=None),
    "`every=` of a schedule is not an interval": lambda s: scheduled(s, every=0),
    "`cron=` is not a text": lambda s: scheduled(s, every=None, cron=5),
    "`cron=` is not a cron expression": lambda s: scheduled(s, every=None, cron="61 * * * *"),
    "`timezone=` of a schedule is not a time zone": lambda s: scheduled(s, timezone="Mars"),
    "a schedule needs a time zone": lambda s: parse("s", {"task": "t", "cron": "0 6 * * *"}, timezone=None),
    "`start=` or `end=` of a schedule is not a time": lambda s: scheduled(s, start=5),
    "`start=` or `end=` of a schedule is beyond the calendar": lambda s: scheduled(
        s, end=datetime.max, timezone="America/New_York"
    ),
    "a schedule ends before it starts": lambda s: scheduled(s, start=datetime(2027, 1, 2), end=datetime(2027, 1, 1)),
    "an invalid `catch_up=`": lambda s: scheduled(s, catch_up="some"),
    "an invalid `overlap=`": lambda s: scheduled(s, overlap="skipp"),
    "an invalid `jitter=`": lambda s: scheduled(s, jitter=-1),
    "a schedule has an option that only a single call can have": lambda s: scheduled(s, countdown=5),
    "a misspelt option of a schedule": lambda s: scheduled(s, catchup="all"),
    "`expires=` of a schedule is a time": lambda s: scheduled(s, expires=datetime(2027, 1, 1)),
    "`delete` of a schedule that `sidejob_schedules` declares": lambda s: deleting_the_declared(),
    "the task would refuse its call in `sidejob_schedules`": lambda s: scheduling.apply_declared(
        s.stage.runtime, {"s": {"task": s.stage.idle, "every": 1, "qeue": "q"}}
    ),
    "a beat entry cannot be imported, because of its times": lambda s: declaration_of(
        "e", {"task": "t", "schedule": "at dawn"}
    ),
    "a beat entry has days of the month and of the week": lambda s: declaration_of(
        "e", {"schedule": crontab("0", "0", day_of_month="13", day_of_week="fri")}
    ),
    "the rate of a queue is not a rate": lambda s: s.sidejob.queue("mail").configure(rate="often"),
    "a countdown that is not a time": lambda s: s.job.run(countdown=float("inf")),
    "an unknown status": lambda s: s.job.wait("complete"),
    "the first argument of `wait` is a number": lambda s: s.job.wait(10),  # type: ignore[arg-type]
    "the argument of `set` is not a mapping": lambda s: s.job.set(3),  # type: ignore[arg-type]
    "`reason=` of the dead set is not a reason": lambda s: s.sidejob.dead.list(reason="expierd"),
    "`older_than=` of `purge` is not a time": lambda s: s.sidejob.dead.purge(older_than="3d"),  # type: ignore[arg-type]
    "`send_many` with a single signature": lambda s: s.sidejob.send_many(durable(s).s()),
    "`enqueue_many` with a single item": lambda s: s.sidejob.enqueue_many(s.stage.idle.s()),
    "the transaction in `transaction=` has failed already": lambda s: lent(s, "SELECT 1/0"),
    "the transaction in `transaction=` is read-only": lambda s: lent(s, "SET TRANSACTION READ ONLY"),
    "an `eta` that is not a datetime": lambda s: s.job.run(eta=60),  # type: ignore[arg-type]
    "another asking has this `task_id=`": lambda s: s.stage.job(task_id=s.job.task_id),
    "a call of a durable task with a misspelt option": lambda s: durable(s).apply_async(countdwn=5),
    "a call of a durable task with a countdown that is not a number": lambda s: durable(s).apply_async(countdown="5s"),
    "a call of a durable task with an `eta` or `expires` that is not a time": lambda s: durable(s).apply_async(
        expires="soon"
    ),
    "a call of a durable task with a priority out of range": lambda s: durable(s).apply_async(priority=300),
    "the `headers` of a call are not a mapping": lambda s: durable(s).apply_async(headers=5),
    "the `headers` of a call contain one of Celery's own": lambda s: durable(s).apply_async(headers={"task": "other"}),
    "a message with this `task_id=`, `queue=`, `routing_key=` or `exchange=` cannot be sent": lambda s: s.stage.job(
        queue=""
    ),
    "RabbitMQ cannot carry the headers or properties of a call": lambda s: carried.check_sendable(
        "The call of mail", "amqp", {"n": 2**70}, {}
    ),
    "an item of `send_many` is not a signature": lambda s: s.sidejob.send_many([durable(s)]),
    "a group or a chord in `send_many`": lambda s: s.sidejob.send_many([durable(s).s(), group([durable(s).s()])]),
    "`send_many` of a task that is not durable": lambda s: s.sidejob.send_many([s.stage.app.signature("ordinary")]),
    "`send_many` of a sidejob task": lambda s: s.sidejob.send_many([durable(s).s(), s.stage.idle.s()]),
    "`transaction=` for a task that is not durable, and the broker is not the store": lambda s: s.stage.app.tasks[
        "ordinary"
    ].apply_async(transaction=object()),
    "a signature of another app in `send_many`": lambda s: s.sidejob.send_many([Celery().signature("durable")]),
    "a signature of `send_many` with a transaction of its own": lambda s: s.sidejob.send_many(
        [durable(s).s().set(transaction="default")]
    ),
    "one task id twice in `send_many`": lambda s: s.sidejob.send_many([durable(s).s().set(task_id="one")] * 2),
    "an item of `enqueue_many` that `enqueue` would refuse": lambda s: s.sidejob.enqueue_many([{"task": "no.such"}]),
    "`write_many` with a text or a mapping": lambda s: s.job.input("a").write_many("abc"),
    "an item of `enqueue_many` does not describe a job": lambda s: s.sidejob.enqueue_many([s.stage.idle.s(), "x"]),  # type: ignore[list-item]
    "an invalid `created_by=`": lambda s: s.stage.job(created_by="x" * 300),
    "`exchange=` and `routing_key=` lead to no queue": lambda s: s.stage.job(routing_key="nowhere"),
    "a search by a value that is not an id": lambda s: s.sidejob.find(1.5),  # type: ignore[arg-type]
    "counting by an unknown column": lambda s: s.sidejob.count_jobs(by="args"),
    "a durable task's `task_id=` has a reserved prefix": lambda s: durable(s).apply_async(task_id="continuation:1"),
    "the group of a `JobFailed` cannot be kept": lambda s: JobFailed(""),
    "`job.log` without a message": lambda s: s.job.log(""),
    "`older_than=` of `jobs` is not a time": lambda s: s.sidejob.jobs(older_than=-1),
    "`since=` of `jobs` is not a time": lambda s: s.sidejob.jobs(since="2h"),  # type: ignore[arg-type]
    "`tags=` that is not a list": lambda s: s.stage.job(tags="a"),
    "a tag that cannot be kept": lambda s: s.job.tag(["a", "b"]),  # type: ignore[arg-type]
    "`day=` of `statistics` is not a day": lambda s: s.sidejob.statistics(day="monday"),
    "`purge` of the dead set without a condition": lambda s: s.sidejob.dead.purge(),
    "a number of entries, jobs or packets is not a whole number, or too small": lambda s: s.sidejob.dead.list(limit=0),
    "no row can contain this filter or name": lambda s: s.sidejob.jobs(queue="a\x00b"),
    "`after=` or `before=` of `jobs` is neither a job nor its id": lambda s: s.sidejob.jobs(before="x"),  # type: ignore[arg-type]
    "the id of an entry of the dead set is neither a number nor a text": lambda s: s.sidejob.dead.get(True),
    "one of Celery's options has a wrong type, such as `link=5`": lambda s: s.stage.job(link=5),
    "`expires=` of a job is not a time": lambda s: s.stage.job(expires="soon"),
    "`state=` is not a mapping": lambda s: s.stage.job(state="x"),
    "an `eta` at the end of the calendar": lambda s: s.job.run(
        eta=datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
    ),
    "the argument of `cancel_timer` is not a timer": lambda s: s.job.cancel_timer("one"),  # type: ignore[arg-type]
    "`timeout=` of `wait` is not a time": lambda s: s.job.wait(timeout="soon"),  # type: ignore[arg-type]
    "an option of a durable task is not a JSON value": lambda s: durable(s).apply_async(headers={"x": object()}),
    "another job has the alias": lambda s: s.other.add_alias("mine"),
    '`unique=` of an open job with `on_duplicate="refuse"`': lambda s: s.stage.job(
        unique="mine", on_duplicate="refuse"
    ),
    "`on_duplicate=` is none of the three": lambda s: s.stage.job(unique="x", on_duplicate="ignore"),
    "`on_duplicate=` without `unique=`": lambda s: s.stage.job(on_duplicate="return"),
    "`unique=` beside `link=`, `chain` or a group": lambda s: s.stage.job(unique="x", link=[s.stage.idle.s()]),
    "`unique=` of a signature that follows a call, in `link`, a chain or a chord": lambda s: s.stage.job(
        link=[s.stage.idle.s().set(unique="x")]
    ),
    "two new jobs of one call have the same `unique=`, and the second one refuses or replaces": lambda s: (
        s.sidejob.enqueue_many([{"task": s.stage.idle, "unique": "x", "on_duplicate": "refuse"}] * 2)
    ),
    "`unique=` of a task that is not durable": lambda s: s.stage.app.send_task("ordinary", unique="x"),
    "`unique=` in `send_many`": lambda s: s.sidejob.send_many([durable(s).s().set(unique="x")]),
    '`on_duplicate="replace"` with `transaction=` would replace a job': lambda s: in_transaction(
        s, lambda transaction: s.stage.job(unique="mine", on_duplicate="replace", transaction=transaction)
    ),
    "`capacity=` in a call": lambda s: s.stage.idle.apply_async(capacity=CapacityPool("pool", 1)),
    "a pool's call of a task that is not durable": lambda s: CapacityPool("pool", 1).cast("ordinary"),
    "a pool's call of a chain, a group or a chord": lambda s: CapacityPool("pool", 1).cast(group([s.stage.idle.s()])),
    "an invalid name of a capacity pool": lambda s: CapacityPool("", 1),
    "an invalid limit of a capacity pool": lambda s: CapacityPool("pool", 0),
    "an invalid `shards=`": lambda s: CapacityPool("pool", 1, shards=0),
    "an invalid `covers=`": lambda s: CapacityPool("pool", 1, covers="all"),
    '`on_full="drop"` of a pool with `covers="running"`': lambda s: CapacityPool("pool", 1, covers="running").cast(
        s.stage.idle, on_full="drop"
    ),
    "a pool has more shards than slots": lambda s: CapacityPool("pool", 1, shards=2),
    "`resize` below the number of shards": lambda s: CapacityPool("pool", 2, shards=2).resize(1),
    "an empty key in `for_key`": lambda s: CapacityPool("pool", 1).for_key(""),
    "an invalid `weight=`": lambda s: CapacityPool("pool", 1).cast(s.stage.idle, weight=0),
    "a `weight=` is greater than a shard": lambda s: CapacityPool("pool", 1).cast(s.stage.idle, weight=2),
    "an invalid `on_full=`": lambda s: CapacityPool("pool", 1).cast(s.stage.idle, on_full="later"),
    "an invalid `bounded=`": lambda s: CapacityPool("pool", 1).cast(s.stage.idle, bounded=None),
    "`bounded=False` with `on_full=`": lambda s: CapacityPool("pool", 1).cast(
        s.stage.idle, bounded=False, on_full="drop"
    ),
    "`timeout=` of a pool's `call` is not a time": lambda s: CapacityPool("pool", 1).call(s.stage.idle, timeout="soon"),  # type: ignore[arg-type]
    "two new jobs have the same alias": lambda s: s.sidejob.enqueue_many(
        [{"task": s.stage.idle, "aliases": ["x"]}] * 2
    ),
    "the parent has a child of this name": lambda s: s.job.enqueue(s.stage.idle, child_name="kid"),
    "two new children have the same name": lambda s: s.sidejob.enqueue_many(
        [{"task": s.stage.idle, "parent": s.job, "child_name": "twin"}] * 2
    ),
    "`adopt` under a name that is taken": lambda s: s.job.adopt(s.other, "kid"),
    "the job to be adopted has a parent": lambda s: s.other.adopt(s.kid, "x"),
    "the job to be disowned is not a child": lambda s: s.job.disown("nobody"),
    "a job would be its own ancestor": lambda s: s.kid.adopt(s.job, "x"),
    "a job would wait for itself": lambda s: s.job.depend_on(s.job),
    "`depends_on` with an alias that no job has": lambda s: s.stage.job(depends_on=["nobody"]),
    "`cancel` of a job that does not exist": lambda s: s.sidejob.cancel(s.job, "nobody"),
    "`depends_on` is not a list": lambda s: s.stage.job(depends_on="mine"),
    "a dependency is not a job": lambda s: s.stage.job(depends_on=[s.job.result]),
    "`on_failure` is none of the three": lambda s: s.stage.job(depends_on=[s.job], on_failure="stop"),
    "`move` of a job that is terminating or terminated": lambda s: s.ended.move(queue="new"),
    "`waiting_for=` of `jobs` is not a reason": lambda s: s.sidejob.jobs(waiting_for="godot"),
    "there is no batch of this name": lambda s: s.sidejob.get_batch("nobody"),
    "the call that follows a batch is not one task": lambda s: s.sidejob.batch("new", on_success=7),
    "the call that follows a batch has other options": lambda s: s.sidejob.batch(
        "new", on_success=s.stage.idle.s().set(link=s.stage.idle.s())
    ),
    "`on_failure` without `depends_on`": lambda s: s.stage.job(on_failure="fail"),
}
"""Asked outside of runs: no table has a row more or less afterwards."""

IN_A_RUN: dict[str, Case] = {
    "a step inside a step": lambda s: s.inside(lambda job: job.step("a", lambda: job.step("b", str))),
    "a step in a thread without the run's context": (
        lambda s: s.inside(lambda job: s.stage.outside(lambda: job.step("a", str)))
    ),
    "a step in `on_startup` or `on_shutdown`": step_in_hook,
    "the block of `job.step(name, transaction=…)` was not entered": (
        lambda s: s.inside(lambda job: job.step("a", transaction=object()).is_new)
    ),
    "the function of a step has returned a coroutine or a generator": (
        lambda s: s.inside(lambda job: job.step("a", lambda: (n for n in range(3))))
    ),
    "a step inside a block of `job.unit()`": lambda s: s.inside(lambda job: step_in_block(job, s)),
    "a step after a packet that was read outside of steps": lambda s: read_before_step(s),
    "`checkpoint`, `unit`, `suspend` or `then` in a step": (
        lambda s: s.inside(lambda job: job.step("a", job.checkpoint))
    ),
    "a step sets a key of the state that the body has set before it": (
        lambda s: s.inside(lambda job: (job.set(a=1), job.step("a", job.set, a=2)))
    ),
    "a step uses a job that the body has made before it": (
        lambda s: s.inside(lambda job: job.step("a", job.enqueue(s.stage.idle, child_name="new").terminate))
    ),
    "a step's name breaks the rules": lambda s: s.inside(lambda job: job.step("", str)),
    "the steps of a name are of two kinds": (
        lambda s: s.inside(lambda job: (job.step("a", str), job.sleep("a", seconds=1)))
    ),
    "a step has failed with an error that cannot be made again": (
        lambda s: s.inside(lambda job: job.step("a", raising_obscurely))
    ),
    "`delete` inside a run": lambda s: s.inside(lambda job: s.other.delete()),
    "`terminate(without_shutdown=True)` inside a run, or with `transaction=`": (
        lambda s: s.inside(lambda job: s.other.terminate(without_shutdown=True))
    ),
    '`on_duplicate="replace"` in `job.unit(transaction=)`': (lambda s: s.inside(lambda job: replaced_in_block(job, s))),
    "`wait` for a batch inside a run": lambda s: s.inside(lambda job: s.sidejob.batch("new").wait()),
    "`done=` or `total=` of `progress` is not a number": lambda s: s.inside(lambda job: job.progress(-1)),
    "`timeout=` of `suspend` is not a time": lambda s: s.inside(lambda job: job.suspend(timeout=-1)),
    "`note=` of `progress` is not a note": lambda s: s.inside(lambda job: job.progress(note=7)),
    "`move(force=True)` inside a run": lambda s: s.inside(lambda job: s.other.move(queue="new", force=True)),
    "a pool's `call` is used in a task": lambda s: s.inside(lambda job: CapacityPool("pool", 1).call(s.stage.idle)),
    "`wait` inside a run": lambda s: s.inside(lambda job: s.other.wait()),
    "`commit_every` below 1": lambda s: s.inside(lambda job: list(job.for_inputs("a", commit_every=0))),
    "`commit_within` is not a time": lambda s: s.inside(lambda job: list(job.for_inputs("a", commit_within=-1))),
    "`for_inputs` names a port twice": lambda s: s.inside(lambda job: list(job.for_inputs("a", "a"))),
    "`read(transaction=)` inside a run": lambda s: s.inside(lambda job: s.job.input("a").read(transaction=object())),
    "a block of `job.unit()` inside another such block": lambda s: after_block(s, lambda job, *_: None, depth=2),
    "a run goes on while the transaction that it gave to `job.unit()` is open": lambda s: after_block(
        s, lambda job, *_: job.set(a=1)
    ),
    "a body goes on after a block that was not committed": lambda s: after_block(s, rolled_back),
    "`cancel_timer` of another job in a block of `job.unit()`": lambda s: cancelling_in_a_block(s),
    "`cancel_timer` of a timer that the same unit has set": lambda s: s.inside(
        lambda job: (job.run(countdown=60), job.cancel_timer(job.timers[0]))
    ),
}


def cancelling_in_a_block(scene: Scene) -> None:
    other = scene.stage.job(countdown=60)

    def body(job: RunningJob) -> None:
        with psycopg.connect(direct(scene.stage.database_url)) as connection, job.unit(transaction=connection):
            other.cancel_timer(other.timers[0])

    scene.stage.inside(body)


def after_block(scene: Scene, then: Callable[[RunningJob, Any, TcpProxy], Any], depth: int = 1) -> None:
    """Read a packet for a block of `job.unit()` (or for blocks in each other), and go on after it."""

    def body(job: RunningJob) -> None:
        with scene.sidejob.port_options(notify=False):
            job.input("a").write(1)
        job.checkpoint()
        try:
            with TcpProxy.to(url) as proxy, psycopg.connect(proxy.url_for(url)) as connection:
                job.input("a").read()
                with ExitStack() as blocks:
                    for _ in range(depth):
                        blocks.enter_context(job.unit(transaction=connection))
                then(job, connection, proxy)
        except SideJobError as error:
            met.append(error)
            raise

    met: list[SideJobError] = []
    url = direct(scene.stage.database_url)
    scene.stage.inside(body, inports=["a"])
    raise met[0]  # by which no run fails


def rolled_back(job: RunningJob, connection: psycopg.Connection[Any], _: TcpProxy) -> None:
    """Roll the block's transaction back, and read on."""
    connection.rollback()
    job.input("a").read()


def broken(job: RunningJob, connection: psycopg.Connection[Any], proxy: TcpProxy) -> None:
    """Have the connection break before the commit, and read on when the server has noticed."""
    pid = connection.info.backend_pid
    proxy.cut()
    with psycopg.connect(direct(job._runtime.settings.database_url), autocommit=True) as outside:
        wait_until(lambda: not outside.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]).fetchall())
    with suppress(psycopg.Error):
        connection.commit()
    job.input("a").read()


def unheard(job: RunningJob, connection: psycopg.Connection[Any], proxy: TcpProxy) -> None:
    """Have the answer to the commit lost, and begin another block."""
    proxy.cut_after(b"COMMIT")
    with suppress(psycopg.Error):
        connection.commit()
    job.checkpoint(transaction=connection)


def undecided(job: RunningJob, connection: psycopg.Connection[Any], proxy: TcpProxy) -> None:
    """Have the connection break while its server is busy, and go on."""
    with psycopg.connect(direct(job._runtime.settings.database_url), autocommit=True) as holding:

        def cut() -> None:
            blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: holding.execute(blocked).fetchall())
            proxy.cut()

        holding.execute("SELECT pg_advisory_lock(4711)")
        cutting = threading.Thread(target=cut)
        cutting.start()
        with suppress(psycopg.Error):
            connection.execute("SELECT pg_advisory_xact_lock(4711)")
        cutting.join()
        job.set(a=1)


def fenced(scene: Scene, act: Callable[[RunningJob], None]) -> None:
    """Have a run released under way, and tell what it then meets."""
    from celery_sidejob.operations.runs import recovery

    met: list[BaseException] = []

    def body(job: RunningJob) -> None:
        hold = scene.stage.holds[job.id]
        recovery.release(scene.stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id)
        job.set(a=1)
        try:
            act(job)
        except errors.LeaseLostError as error:
            met.append(error)
            raise

    scene.stage.inside(body)
    raise met[0]


def without_store(scene: Scene) -> None:
    """Ask a store at which nobody listens."""
    app = Celery("away", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    SideJob(app).find(1)


def revoking_without_store(scene: Scene) -> None:
    """Revoke a task while nobody listens at the store's address."""
    app = make_app("away", sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing")
    app.control.revoke("one")


def upgrading_elsewhere(scene: Scene) -> None:
    """Upgrade by a direct URL that leads to another database of the server."""
    url = direct(scene.stage.database_url)
    app = Celery("astray", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=url, sidejob_direct_url=url.rpartition("/")[0] + "/postgres")
    SideJob(app).upgrade_schema()


def without_schema(scene: Scene) -> None:
    """Ask a store whose schema was never made."""
    app = make_app("new", sidejob_database_url=scene.stage.database_url, sidejob_schema="never")
    sidejob = app.sidejob
    try:
        sidejob.find(1)
    finally:
        sidejob.close()


def without_url(scene: Scene) -> None:
    """Ask an app that has no store."""
    SideJob(Celery("bare", broker="memory://", set_as_current=False)).find(1)


def broker_without_store(scene: Scene) -> None:
    """Connect to the store as the broker, where there is none."""
    make_app(broker="sidejobpg://").connection()


def unknown_setting(scene: Scene) -> None:
    """Configure something that does not exist."""
    app = Celery("typo", broker="memory://", set_as_current=False)
    app.conf.sidejob_leese = 20
    _ = SideJob(app).settings


def left_behind(scene: Scene) -> None:
    """Ask with the context of a run that is over, as a thread of its body does."""
    kept: list[contextvars.Context] = []
    scene.stage.inside(lambda job: kept.append(contextvars.copy_context()))
    kept[0].run(scene.job.set, a=1)


def durable(scene: Scene, **options: Any) -> Any:
    """An ordinary durable task."""
    task = scene.stage.app.task(ordinary, name="durable", shared=False, **{"durable": True, **options})
    durable_task.mark(scene.stage.app)
    return task


def taken(scene: Scene) -> None:
    """Call a durable task twice with one id."""
    durable(scene).apply_async(task_id="one")
    scene.stage.app.send_task("durable", (1,), task_id="one")


def replaced_in_transaction(scene: Scene) -> None:
    """Replace a durable task in a transaction."""
    task = durable(scene)
    task.apply_async(unique="mine")
    in_transaction(
        scene, lambda transaction: task.apply_async(unique="mine", on_duplicate="replace", transaction=transaction)
    )


def replaced_in_block(job: RunningJob, scene: Scene) -> None:
    """Replace a job in a block with the caller's SQL."""
    with scene.stage.connect(autocommit=False) as connection, job.unit(transaction=connection):
        scene.stage.job(unique="mine", on_duplicate="replace")


def keyed_twice(scene: Scene) -> None:
    """Call a durable task twice with one key."""
    for _ in range(2):
        durable(scene).apply_async(unique="mine", on_duplicate="refuse")


def replaced_too_late(scene: Scene) -> None:
    """Replace a job that has begun."""
    scene.stage.claim(scene.job)
    scene.stage.job(unique="mine", on_duplicate="replace")


def batched_elsewhere(scene: Scene) -> None:
    """Call a durable task for a batch where another store might keep it."""
    app = stores_of(scene, "postgresql://nobody@127.0.0.1:9/other")
    with batches.within(1):
        keeping._check_takes_tasks(app.runtime)


def moved_to_a_time(scene: Scene) -> None:
    """Move a job that has failed, and say when."""

    def fails(job: RunningJob) -> None:
        raise ValueError("it does not work")

    job = scene.stage.job(fails)
    with suppress(ValueError):
        scene.stage.run(job)
    job.move(queue="new", countdown=5)


def ending(scene: Scene) -> OpenUnit:
    """Return the unit of a shutdown."""
    scene.other.terminate()
    hold = scene.stage.claim(scene.other)
    assert hold is not None
    return OpenUnit(scene.stage.runtime, hold)


def depended_on(scene: Scene) -> None:
    """Cancel a job for which another one waits."""
    scene.stage.job(depends_on=[scene.job])
    scene.sidejob.cancel(scene.job)


def failed_with_another(scene: Scene) -> None:
    """Run a job that is to fail with one that was terminated."""
    scene.other.terminate(without_shutdown=True)
    scene.stage.run(scene.stage.job(depends_on=[scene.other], on_failure="fail"))


def overloaded(scene: Scene) -> None:
    """Call a full pool."""
    for _ in range(2):
        CapacityPool("pool", 1).cast(scene.stage.idle)


def declared_otherwise(scene: Scene) -> None:
    """Use a pool that another declaration has made."""
    for limit in (1, 2):
        CapacityPool("pool", limit).cast(scene.stage.idle)


def pooled_elsewhere(scene: Scene) -> None:
    """Make a job of a task whose pool nobody has made, and whose code is not here."""
    scene.stage.task(nothing, name="elsewhere", capacity=CapacityPool("pool", 1))
    scene.sidejob.register_tasks()
    scene.stage.sql("DELETE FROM capacity_pools")
    client = make_app("client", sidejob_database_url=scene.stage.database_url)
    try:
        client.sidejob.enqueue("elsewhere")
    finally:
        client.close()


def foreign_handle(scene: Scene) -> None:
    """Unpickle a handle beside another app."""
    app = make_app("beside", sidejob_database_url=scene.stage.database_url)
    scene.stage.app.main = "gone"
    handle = pickle.loads(pickle.dumps(scene.stage.job()))
    scene.stage.app.main = "renamed"
    try:
        handle.refresh()
    finally:
        app.close()


def handle_of_a_namesake(scene: Scene) -> None:
    """Unpickle a handle of one of two apps without a name, which have stores of their own."""
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = "postgresql://127.0.0.1:1/another"
    SideJob(app)
    scene.stage.app.main = None
    try:
        pickle.loads(pickle.dumps(scene.stage.job())).refresh()
    finally:
        app.close()


def protocol_one(scene: Scene) -> None:
    """Call a durable task by the old protocol."""
    scene.stage.app.conf.task_protocol = 1
    durable(scene).delay()


def stores_of(scene: Scene, *urls: str) -> Any:
    """A client with further stores."""
    app = Celery("failing", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=scene.stage.database_url, sidejob_failover_urls=urls)
    return SideJob(app)


def refused_by_libpq(url: str, parameter: str) -> None:
    """Connect with a further parameter."""
    app = Celery("refused", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = f"{url}{'&' if '?' in url else '?'}{parameter}"
    SideJob(app).stats()


def misread(scene: Scene) -> None:
    """A password with a `#` that has slipped behind the database's name."""
    app = Celery("misread", broker="memory://", set_as_current=False)
    app.conf.sidejob_database_url = "postgresql://host/shop#secret"
    SideJob(app).runtime  # noqa: B018


def one_store_twice(scene: Scene) -> None:
    """The same database by two names."""
    further = urlsplit(scene.stage.database_url)
    further = further._replace(netloc=further.netloc.replace("127.0.0.1", "localhost"))
    stores = stores_of(scene, further.geturl()).runtime.stores
    for store in stores:
        stores.name_of(store)


def without_sidejob(name: str, *, default: bool, alone: bool) -> None:
    """Call a task of an app that has no SideJob, which may be the default one of Celery's, alone in its process."""
    app = Celery(name, broker="memory://", set_as_current=False)
    with pytest.MonkeyPatch.context() as patch:
        if default:
            patch.setattr(_state, "default_app", app)
        if alone:
            patch.setattr(apps, "every_app", lambda: [app])
        apps.runtime_for(app, "shop.add is a sidejob task")


def without(library: str, module: str) -> None:
    """Import a module of ours where a library is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        patch.delitem(sys.modules, module, raising=False)
        import_module(module)


def without_psycopg() -> None:
    """Look for libpq where psycopg cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "psycopg", None)
        require_libpq()


def part_of_a_deletion(scene: Scene) -> None:
    """Disown a job of a tree whose deletion has begun."""
    scene.stage.sql("INSERT INTO tree_deletions VALUES (%s)", scene.job.id)
    scene.job.terminate(recursive=True)
    scene.stage.drain()
    scene.job.disown(scene.kid)


def no_store(scene: Scene) -> None:
    """Neither store answers, and both are left alone."""
    app = Celery("away", broker="memory://", set_as_current=False)
    nowhere = "postgresql://127.0.0.1:1/nothing"
    app.conf.update(sidejob_database_url=nowhere, sidejob_failover_urls=[nowhere.replace(":1/", ":2/")])
    SideJob(app)
    app.conf.sidejob_durable_tasks = ["shop.*"]
    with suppress(StoreUnavailableError):
        app.send_task("shop.mail")
    app.send_task("shop.mail")


def lost_on_the_way(scene: Scene) -> None:
    """A run goes on whose row is gone."""
    message = Message("gone", "durable", "q", "{}", b"[]")
    run = durable_runs.Run(("gone", 1), "durable", 1, scene.stage.runtime, message.content)
    durable_ends.go_on(scene.stage.runtime, run, message)


ELSEWHERE: dict[str, Case] = {
    "a child that a step has called has failed": failed_child,
    "psycopg finds no libpq when this package is imported": lambda s: without_psycopg(),
    "a worker with the pool `asyncio` without greenlet": lambda s: without("greenlet", "celery_sidejob.pools.asyncio"),
    "metrics for Prometheus without its library": lambda s: without("prometheus_client", "celery_sidejob.prometheus"),
    "a call in a process that has not imported the module with the app": lambda s: without_sidejob(
        "default", default=True, alone=True
    ),
    "a call in a thread that has no current app, and several apps have a `SideJob`": lambda s: without_sidejob(
        "default", default=True, alone=False
    ),
    "a call whose app has no `SideJob`": lambda s: without_sidejob("shop", default=False, alone=True),
    '`result_backend = "sidejobpg://"` in an app without `SideJob`': lambda s: stored_at("sidejobpg://"),
    "the URL of `result_backend` is ambiguous": lambda s: stored_at("sidejobpg://user:a/b@host/db"),
    "an option of `result_backend_transport_options` is not a text": lambda s: stored_at(
        "sidejobpg://host/db", schema=1
    ),
    "`get()` of a task whose result is too large": too_large,
    "`cancel` of a job on which another job depends": depended_on,
    "a batch was deleted or replaced": lambda s: (batch := s.sidejob.batch("old"), batch.delete(), batch.closed),
    "a member is added to a closed batch": lambda s: s.sidejob.batch("old").close().add(s.job),
    "a member is added to a deleted batch": lambda s: (
        batch := s.sidejob.batch("old"),
        batch.delete(),
        batch.add(s.job),
    ),
    "a batch is opened, and a closed batch of the same name has not ended": lambda s: s.sidejob.batch(
        s.sidejob.batch("old").close().name
    ),
    "a batch is opened again with other calls": lambda s: s.sidejob.batch(
        s.sidejob.batch("old").name, on_success=s.stage.idle
    ),
    "the argument of a batch's `add` is neither a job nor a result": lambda s: s.sidejob.batch("old").add("me"),
    "`timeout` of a batch's `wait` is not a time": lambda s: s.sidejob.batch("old").wait(timeout="soon"),
    "a durable task is called for a batch in an app with several stores": batched_elsewhere,
    "`move` of a job whose run is in progress": lambda s: s.stage.claim(s.other) and s.other.move(queue="new"),
    "`move` of a failed job to a time": moved_to_a_time,
    "`then` is called in a shutdown": lambda s: RunningJob(ending(s), s.other._read()).then(),
    'a job with `on_failure="fail"` begins after its dependency has failed': failed_with_another,
    "`depend_on` or `undepend` of a job that has begun": lambda s: s.stage.claim(s.job) and s.job.depend_on(s.other),
    "a client writes to a full port": lambda s: filled(s).write(3),
    "one call writes more packets than the port's limit": lambda s: filled(s).write_many([1, 2, 3]),
    "a run writes to a full port that only its own job reads": lambda s: s.stage.inside(
        lambda job: job.input("in").write_many([1, 2]) or job.checkpoint() or job.input("in").write(3),
        inports={"in": {"limit": 2}},
    ),
    "a thread or a forked process uses a run that is over": left_behind,
    "`disown` of a job whose large tree is being deleted": part_of_a_deletion,
    "a durable task's run calls `retry` after it was declared lost": lost_on_the_way,
    "a durable task with this `task_id=` waits or runs": taken,
    "the body or a hook of a sidejob task is a generator": lambda s: s.stage.task(generator),
    "a hook (`on_startup`, `on_shutdown`, or the method of a task class) has other arguments than the job": lambda s: (
        s.stage.task(ordinary).on_shutdown(lambda job, reason: None)
    ),
    "the argument of `on_startup` or `on_shutdown` is not a function": lambda s: s.stage.task(ordinary).on_shutdown(7),
    "the body of a durable task is a generator": lambda s: s.stage.app.task(generator, durable=True, shared=False).name,
    "a body has returned a generator": lambda s: s.stage.inside(lambda job: generator()),
    "a body or a hook is an `async def`, and its worker has the pool gevent": lambda s: under_gevent(),
    "a pickled handle comes from an app that this process does not have": foreign_handle,
    "a pickled handle could belong to two apps with the same name and different stores": handle_of_a_namesake,
    "a durable task is called with `task_protocol = 1`": protocol_one,
    "a durable task's `on_lost` is not valid": lambda s: durable(s, on_lost="retry"),
    "a durable task's `max_losses` is not a number": lambda s: durable(s, max_losses=0),
    "a durable task has a `Request` class of its own": lambda s: durable(s, Request="my.own:Request"),
    "a store's URL is not a URL, or libpq would misread it": misread,
    "kombu or libpq would misread the broker's URL, and could show its password": lambda s: make_app(
        broker="redis://u:54/secret@h/0"
    ).connection(),
    "the scheme of the broker's URL is a slip of one of this package's": lambda s: make_app(
        broker="sidejobpq://"
    ).connection(),
    "a parameter in a store's URL has a value that libpq refuses, such as a port above 65535": lambda s: (
        refused_by_libpq(s.stage.database_url, "port=99999")
    ),
    "a store is named twice": lambda s: stores_of(s, s.stage.database_url).settings,
    "one of `sidejob_failover_urls` cannot be read": lambda s: stores_of(s, "postgresql://h/x?no=1").runtime,
    "two stores are the same database, or copies": one_store_twice,
    "no store has answered a moment ago, and the pause before the next attempt has not ended": no_store,
    "the id of an entry of the dead set is a text of another form": lambda s: s.stage.sidejob.dead.get("one"),
    "an entry's store is unknown in this process": lambda s: s.stage.sidejob.dead.get("12345678:1"),
    "a run commits, and is no longer the job's current run": lambda s: fenced(s, lambda job: job.checkpoint()),
    "a run calls `heartbeat`, and is no longer the job's current run": lambda s: fenced(s, lambda job: job.heartbeat()),
    "a body goes on after the connection of its block broke before the commit": lambda s: after_block(s, broken),
    "a block begins after a block whose commit had no answer": lambda s: after_block(s, unheard),
    "a run goes on after its connection broke, and Postgres has not decided about the transaction yet": lambda s: (
        after_block(s, undecided)
    ),
    "no server listens at the store's address": without_store,
    "`revoke` is called while the store does not answer": revoking_without_store,
    "the schema does not exist, or is incomplete": without_schema,
    "no store is configured": without_url,
    "`broker_url` is `sidejobpg://` and no store is configured": broker_without_store,
    "`db upgrade` finds that `sidejob_direct_url` leads to another database": upgrading_elsewhere,
    "an unknown setting": unknown_setting,
    "a misspelt variable of the environment": lambda s: read_settings({}, {"SIDEJOB_LESE": "30"}),
    "`SideJob` with something that is not an app": lambda s: SideJob("shop"),  # type: ignore[arg-type]
    "a worker cannot write its heartbeat file": lambda s: HeartbeatFile("/no/such", every_s=2).clear(),
    "a worker starts with the pool eventlet": lambda s: pool_process.check(get_implementation("eventlet")),
    "a worker starts with gevent, and gevent was chosen too late": lambda s: pool_process.check(
        get_implementation("gevent")
    ),
    '`unique=` of a durable task that is not done, with `on_duplicate="refuse"`': keyed_twice,
    '`on_duplicate="replace"` of a job that has begun': replaced_too_late,
    "the pool of a call is full": overloaded,
    "a pool that exists with another declaration": declared_otherwise,
    "a job's task has a pool that does not exist, and its code is not in this process": pooled_elsewhere,
    "`capacity=` of a task that is neither durable nor a sidejob task": lambda s: s.stage.app.task(
        ordinary, name="pooled", shared=False, capacity=CapacityPool("pool", 1)
    ).delay(),
    "`unique=` in a transaction that sees an older state of the store": lambda s: keyed_unseen(s, s.stage.job),
    "`unique=` of a durable task in a transaction that sees an older state of the store": (
        lambda s: keyed_unseen(s, durable(s).apply_async)
    ),
    '`on_duplicate="replace"` with `transaction=` would replace a durable task': replaced_in_transaction,
    "a rate of runs is not valid": lambda s: s.stage.task(lambda job: None, run_rate="600/min"),
    '`on_run_rate="terminate"` without a rate': lambda s: s.stage.task(lambda job: None, on_run_rate="terminate"),
    "an option of a sidejob task is misspelt": lambda s: s.stage.task(lambda job: None, inport=["a"]),
    "an option of a durable task is misspelt": lambda s: s.stage.app.task(ordinary, shared=False, durabel=True),
    "an option of jobs on an ordinary task": lambda s: durable(s, inports=["a"]),
    "a sidejob task with `durable`": lambda s: s.stage.task(lambda job: None, durable=True),
    '`lease_renewal="manual"` without `lease`': lambda s: s.stage.task(lambda job: None, lease_renewal="manual"),
}


@pytest.mark.few(1000)
@pytest.mark.parametrize("when", UNWRITTEN)
def test_bad_input_is_refused_before_anything_is_written(stage: Stage, when: str) -> None:
    scene = Scene(stage)
    before = stage.row_counts()
    check(scene, when, UNWRITTEN[when])
    assert stage.row_counts() == before


@pytest.mark.parametrize("when", IN_A_RUN)
def test_what_has_no_place_in_a_run(stage: Stage, when: str) -> None:
    check(Scene(stage), when, IN_A_RUN[when])
    assert stage.sidejob.count_jobs()["failed"] == 1


@pytest.mark.few(1000)
@pytest.mark.parametrize("when", ELSEWHERE)
def test_the_others_say_what_is_documented(stage: Stage, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.delenv("SIDEJOB_DIRECT_URL", raising=False)  # of a stage behind a PgBouncer
    check(Scene(stage), when, ELSEWHERE[when])


def check(scene: Scene, when: str, case: Case) -> None:
    """Raise the error and compare it with its line."""
    row = ROWS[when]
    with pytest.raises(SideJobError) as caught:
        case(scene)
    public = next(kind for kind in type(caught.value).__mro__ if kind.__module__ == errors.__name__)
    assert public.__name__ == row.error
    assert re.fullmatch(row.pattern, str(caught.value)), f"{caught.value} is not as documented: {row.message}"


def test_the_page_has_every_error_and_every_line_has_a_test() -> None:
    classes = {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, SideJobError) and found is not SideJobError
    }
    # A revoked asking is told by its result, as Celery's own error of that name. Bodies raise JobFailed themselves.
    assert classes - {row.error for row in ROWS.values()} <= {"JobFailed", "Overloaded", "TaskRevokedError"}
    assert {row.error for row in ROWS.values()} <= classes
    assert UNWRITTEN.keys() | IN_A_RUN.keys() | ELSEWHERE.keys() == ROWS.keys()
