"""A user's module that uses every public name, as `mypy --strict` sees it; it is checked, and never run.

`assert_type` fails the check where a name has lost its type, also where it has become Any. What the package has for
Celery's own untyped classes is Any by necessity: tasks made by `@app.task`, signatures and results of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, assert_type

from celery import Celery
from sqlalchemy.orm import Session

import celery_sidejob
from celery_sidejob import (
    FINISHED,
    NO_DATA,
    Batch,
    CapacityPool,
    DeadEntry,
    DeadSet,
    HistoryEntry,
    Job,
    JobFailed,
    Packet,
    PollReport,
    Port,
    Progress,
    Queue,
    RunningJob,
    Schedule,
    SideJob,
    SideJobError,
    SideJobTask,
    Statistics,
    Status,
    Step,
    Subscription,
    WorkerInfo,
    current_job,
    heartbeat,
    job_status_changed,
    sidejob_task,
    step_ended,
    stopping,
    task_buried,
    task_lost,
    task_recovered,
)

app = Celery("shop")
sidejob = SideJob(app)
later = SideJob()
later.init_app(app)

pool = CapacityPool("cards", 10, covers="running", shards=2)


@sidejob_task(inports=["a", "b"], outports={"sum": {"channels": ["/sums"]}}, queue="math", capacity=pool)
def add(job: RunningJob, scale: int = 1) -> float:
    for a, b in job.for_inputs("a", "b", commit_every=10, commit_within=1.5):
        job.output("sum").write(scale * (a + b))
    return 1.5


@sidejob_task
def bare(job: RunningJob, name: str) -> None:
    job.heartbeat()


@sidejob.task
def of_app(job: RunningJob) -> str:
    return "done"


@sidejob.task(name="shop.named", max_losses=5)
def named(job: RunningJob, count: int, *, label: str = "") -> list[int]:
    return [count]


@add.on_startup
def begin(job: RunningJob) -> None:
    job.set(begun=True)


@add.on_shutdown
def end(job: RunningJob) -> None:
    job.unset("begun")


class Multiply(SideJobTask):
    name = "shop.multiply"
    inports = ["a"]

    def run(self, job: RunningJob, by: int) -> None: ...


def calls(job: Job) -> None:
    """What a task's parameters and its result are."""
    assert_type(add.delay(2).get(timeout=1), float)
    assert_type(add.delay(scale=2).job, Job)
    assert_type(named.delay(3, label="x").get(), list[int])
    assert_type(named.apply_async((3,)).job, Job)
    assert_type(named.enqueue((3,), {"label": "x"}, countdown=3), Job)
    assert_type(bare(job, "name"), None)
    assert_type(of_app.delay().get(), str)
    add.delay("two")  # type: ignore[arg-type]
    named.delay()  # type: ignore[call-arg]
    named.delay(1, label=2)  # type: ignore[arg-type]
    add(2)  # type: ignore[arg-type]


def make(session: Session) -> None:
    """What makes jobs, and finds them."""
    assert_type(sidejob.enqueue(add, (2,), queue="math", tags=("a",), transaction=session), Job)
    assert_type(sidejob.enqueue_many([add.s(1), {"task": "shop.named", "args": (1,)}]), list[Job])
    assert_type(sidejob.send_many([]), list[Any])
    assert_type(sidejob.find(1), Job | None)
    assert_type(sidejob.get("alias"), Job)
    assert_type(sidejob.for_task_id("uuid"), Job | None)
    assert_type(sidejob.jobs(status=Status.FAILED, older_than=timedelta(days=1), limit=3), list[Job])
    assert_type(sidejob.iter_jobs(task="shop.named", newest_first=True), Iterator[Job])
    assert_type(sidejob.count_jobs(by="queue", status="queued"), dict[str, int])
    assert_type(sidejob.tags(limit=3), list[tuple[str, int]])
    assert_type(sidejob.tracked(), list[Job])
    assert_type(sidejob.workers(), list[WorkerInfo])
    assert_type(sidejob.cancel(1, "alias", with_dependents=True), list[Job])


def handle(job: Job, other: Job, session: Session) -> None:
    """A job's attributes and verbs."""
    assert_type(job.id, int)
    assert_type(job.status, Status)
    assert_type(job.task, str)
    assert_type(job.queue, str)
    assert_type(job.args, list[Any])
    assert_type(job.kwargs, dict[str, Any])
    assert_type(job.created_at, datetime | None)
    assert_type(job.created_by, str | None)
    assert_type(job.ran_at, datetime | None)
    assert_type(job.task_id, str | None)
    assert_type(job.parent, Job | None)
    assert_type(job.children, dict[str, Job])
    assert_type(job.child("name"), Job | None)
    assert_type(job.aliases, list[str])
    assert_type(job.info, dict[str, Any])
    assert_type(job.exists, bool)
    assert_type(job.refresh(), Job)
    assert_type(job.run(parent=True, force=True, countdown=3), Job | None)
    assert_type(job.terminate(recursive=True), Job)
    assert_type(job.terminated, bool)
    assert_type(job.delete(), bool)
    assert_type(job.enqueue(named, child_name="one", args=(1,)), Job)
    job.adopt(other, "child")
    job.disown("child")
    job.add_alias("alias")
    job.remove_alias("alias")
    assert_type(job.input("a"), Port)
    assert_type(job.output("sum"), Port)
    assert_type(job.inports, list[Port])
    assert_type(job.outports, list[Port])
    job.configure_ports(inports=["a"], outports={"sum": {"default": 0}})
    assert_type(job.state, dict[str, Any])
    assert_type(job.get("key", default=1), Any)
    job.set({"key": 1}, transaction=session)
    job.unset("key")
    job.publish("message")
    assert_type(job.wait(FINISHED, timeout=3), Job)
    assert_type(job.waiting_for, list[str])
    assert_type(job.set_priority(3), Job)
    assert_type(job.move(queue="other", force=True), Job)
    job.depend_on(other, on_failure="fail")
    job.undepend(other)
    assert_type(job.dependencies, list[Job])
    assert_type(job.dependents, list[Job])
    assert_type(job.tags, list[str])
    job.tag("a", "b")
    job.untag("a")
    job.track()
    job.untrack()
    assert_type(job.tracked, bool)
    assert_type(job.history, list[HistoryEntry])
    job.log("message", number=1)
    assert_type(job.progress_of, Progress | None)
    assert_type(job.schedule, str | None)
    assert_type(job.nominal_time, datetime | None)


def running(job: RunningJob, session: Session) -> None:
    """What a body has beside that."""
    assert_type(job.run_no, int)
    assert_type(job.stopping, bool)
    assert_type(job.request, Any)
    job.progress(1, 3, "note")
    job.checkpoint()
    job.then(named, (1,), queue="other")
    with job.unit(transaction=session):
        session.commit()
    if job.get("retry"):
        raise job.retry(countdown=3)
    if job.get("failed"):
        raise JobFailed("group", "message")
    assert_type(current_job, RunningJob)
    heartbeat(strict=False)
    assert_type(stopping(), bool)
    job.suspend()


@sidejob.step(retries=3, retry_on=(OSError, ValueError))
def charge(order: int) -> str:
    return str(order)


def steps(job: RunningJob, session: Session) -> None:
    """What a body has finished."""
    assert_type(job.step("charge", charge, 1, retries=5, backoff=2), str)
    assert_type(job.step("charge", charge, 1, retries=5, retry_on=OSError), str)
    job.step("charge", charge, 1, retries=5, retry_on="OSError")  # type: ignore[call-overload]
    job.step("charge", charge, 1, retries=5, retry_on=KeyboardInterrupt)  # type: ignore[arg-type]
    sidejob.step(retries=5, retry_on=OSError("down"))  # type: ignore[call-overload]
    assert_type(charge(1), str)
    with job.step("invoice", transaction=session) as step:
        if step.is_new:
            step.value = 1
    assert_type(job.call("pack", named, (1,)), Any)
    assert_type(job.call_all("measure", [named.s(1)], limit=4), list[Any])
    job.sleep("cool off", days=3)
    assert_type(job.receive("a", timeout=timedelta(days=14)), Any)
    assert_type(job.since("new pricing"), bool)
    job.forget("charge")
    assert_type(job.steps, list[Step])
    assert_type(sidejob.fork(job, before="pack"), Job)
    job.run(fresh=True)


def ports(port: Port) -> None:
    """Ports."""
    assert_type(port.job, Job)
    assert_type(port.direction, Literal["in", "out"])
    assert_type(port.name, str)
    port.write({"a": [1, None]})
    port.write_many([1, 2])
    if port.read() is NO_DATA:
        return
    assert_type(port.read_many(3), list[Any])
    assert_type(port.read_packet(), Packet | None)
    assert_type(port.peek(3), list[Packet])
    assert_type(len(port), int)
    assert_type(port.has_data, bool)
    for value in port:
        assert_type(value, Any)
    port.default = 3
    assert_type(port.has_default, bool)
    del port.default
    port.channels = ["/a"]
    port.connect_to(port)


def around(queue: Queue, dead: DeadSet, entry: DeadEntry, batch: Batch, schedule: Schedule) -> None:
    """Queues, the dead set, batches, schedules, channels, capacity."""
    assert_type(sidejob.queue("mail"), Queue)
    assert_type(sidejob.queues(), list[Queue])
    queue.pause(reason="deploy")
    queue.resume()
    queue.configure(limit=3, rate="600/m")
    assert_type(queue.paused, bool)
    assert_type(queue.counts.waiting, int)
    assert_type(queue.peek(limit=3), list[Job])
    queue.unmanage()

    assert_type(sidejob.dead, DeadSet)
    assert_type(len(dead), int)
    assert_type(next(iter(dead)), DeadEntry)
    assert_type(dead.list(group="ValueError", limit=3), Sequence[DeadEntry])
    assert_type(dead.count(task="shop.named"), int)
    assert_type(dead.groups(), dict[str, int])
    assert_type(dead.get(1), DeadEntry)
    assert_type(entry.died_at, datetime)
    dead.retry(1)
    dead.retry_all(task="shop.named", limit=3)
    dead.delete(1)
    assert_type(dead.purge(older_than=timedelta(days=30)), int)

    with sidejob.batch("night", on_complete=named.s(1)) as opened:
        assert_type(opened, Batch)
    batch.close()
    assert_type(sidejob.get_batch("night"), Batch)
    assert_type(sidejob.batches(), list[Batch])

    assert_type(sidejob.schedule("nightly", add, cron="0 3 * * *", catch_up="all", overlap="skip"), Schedule)
    assert_type(sidejob.schedules(), list[Schedule])
    assert_type(sidejob.get_schedule("nightly"), Schedule)
    assert_type(schedule.next_times(3), list[datetime])
    schedule.pause()
    schedule.resume()
    schedule.delete()

    assert_type(sidejob.publish("/orders", {"id": 1}), int)
    assert_type(sidejob.subscribe("/orders", timeout=1), Subscription)
    sidejob.log({"message": "text"})
    with sidejob.port_options(log=False, notify=False), sidejob.context(user=1):
        pass

    assert_type(pool.used, int)
    pool.resize(20)
    assert_type(pool.for_key("customer"), CapacityPool)
    assert_type(sidejob.poll(), PollReport)
    assert_type(sidejob.stats(), dict[str, Any])
    assert_type(sidejob.statistics(task=named, day="today"), Statistics)
    sidejob.close()


def told(sender: Any, **facts: Any) -> None:
    """A receiver of the signals."""


for signal in (task_lost, task_buried, task_recovered, job_status_changed, step_ended):
    signal.connect(told)

errors: Mapping[str, type[BaseException]] = {
    name: getattr(celery_sidejob, name) for name in celery_sidejob.__all__ if name.endswith("Error")
}
assert_type(SideJobError("text").args, tuple[Any, ...])


# -- coroutines -------------------------------------------------------------------------------------------------------


async def price_of(order: str) -> float:
    return 1.5


@sidejob.step
async def pack(order: str) -> str:
    return order


@sidejob.task(inports=["orders"])
async def fulfil(job: RunningJob, least: int) -> None:
    """What a body awaits."""
    async for _ in job.aio.for_inputs("orders", commit_every=2):
        assert_type(await job.aio.step("price", price_of, "book"), float)
        assert_type(await job.aio.step("count", len, "book"), int)
        assert_type(await pack("book"), str)
    async with job.aio.step("rows", transaction=object()) as step:
        if step.is_new:
            await step.keep(1)
    async with job.aio.unit(transaction=object()):
        await job.aio.checkpoint()
    assert_type(await job.aio.receive("orders", timeout=1), Any)
    assert_type(await job.aio.since("new"), bool)


async def awaited(job: Job, session: Session) -> None:
    """The verbs of handles, awaited."""
    assert_type(await job.aio.run(countdown=3), Job | None)
    assert_type(await job.aio.wait(timeout=3), Job)
    assert_type(await job.aio.set(page=7, transaction=session), Job)
    assert_type(await job.aio.children, dict[str, Job])
    assert_type(await job.aio.history, list[HistoryEntry])
    assert_type(await job.aio.status, Status)
    assert_type(await job.input("orders").aio.write("book"), None)
    assert_type(await job.input("orders").aio.count(), int)
    assert_type(await sidejob.aio.enqueue(add, (2,)), Job)
    assert_type(await sidejob.aio.find(1), Job | None)
    assert_type(await sidejob.queue("mail").aio.pause("rest"), None)
    assert_type(await pool.aio.used, int)
    assert_type(await add.aenqueue((2,)), Job)
    assert_type((await add.adelay(2)).get(), float)
    async for found in sidejob.aio.iter_jobs():
        assert_type(found, Job)
    async for entry in sidejob.dead.aio:
        assert_type(entry, DeadEntry)
    async for _, message in sidejob.aio.subscribe("/news"):
        assert_type(message, Any)
    await job.aio.run(countdown="three")  # type: ignore[arg-type]
    await add.adelay("two")  # type: ignore[arg-type]
