"""An app with bodies of `async def`; with a store it has a SideJob, otherwise it is any Celery app."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from typing import Any

from celery import Celery, Task, current_task, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from tests.tools.recorder import Record

if os.environ.get("WITHOUT_UVLOOP"):
    sys.modules["uvloop"] = None  # type: ignore[assignment] # as if it were not installed

if "GC_THRESHOLD" in os.environ:
    gc.set_threshold(int(os.environ["GC_THRESHOLD"]), 30, 10)

app = Celery("coroutines", broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"])
app.conf.broker_connection_retry_on_startup = False
if "DATABASE_URL" in os.environ:
    from celery_sidejob import SideJob

    app.conf.sidejob_database_url = os.environ["DATABASE_URL"]
    SideJob(app)
else:
    app.conf.sidejob_sync_threads = 2


def note(event: str, **data: Any) -> None:
    Record.from_env().note(event, **data)


@app.task(bind=True)
async def follow(self: Task, seconds: float) -> list[str | None]:
    """Return the task's id as it is seen before and after an await, in a task of a group and in a thread."""
    seen = [self.request.id]
    await asyncio.sleep(seconds)
    seen += [follow.request.id, current_task.request.id]
    async with asyncio.TaskGroup() as group:
        children = [group.create_task(_id()), group.create_task(asyncio.to_thread(lambda: follow.request.id))]
    return seen + [child.result() for child in children]


async def _id() -> str | None:
    await asyncio.sleep(0)
    found: str | None = current_task.request.id
    return found


@app.task
async def meet(number: int) -> int:
    """Note that it is here, and wait until `open`."""
    note("here", number=number)
    while not any(line["event"] == "open" for line in Record.from_env().read()):
        await asyncio.sleep(0.05)
    return number


@app.task
def thread_of() -> list[Any]:
    return [threading.current_thread().name, threading.current_thread() is threading.main_thread()]


@app.task
def hold() -> None:
    """Note that it is here, in a thread, and wait until `open`."""
    note("held")
    while not any(line["event"] == "open" for line in Record.from_env().read()):
        time.sleep(0.05)


@app.task(bind=True, max_retries=3)
async def again(self: Task) -> int:
    await asyncio.sleep(0)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(bind=True, autoretry_for=(ConnectionError,), max_retries=3, default_retry_delay=0)
async def auto(self: Task) -> int:
    await asyncio.sleep(0)
    if self.request.retries < 2:
        raise ConnectionError
    return int(self.request.retries)


@app.task
async def ignored() -> None:
    await asyncio.sleep(0)
    raise Ignore


@app.task(acks_late=True)
async def rejected() -> None:
    await asyncio.sleep(0)
    raise Reject("no", requeue=False)


@app.task
async def collected() -> tuple[list[int], bool]:
    """When the garbage collector looks, and whether it passes over what was loaded before."""
    return list(gc.get_threshold()), gc.get_freeze_count() > 100_000


@app.task
async def loop() -> str:
    return type(asyncio.get_running_loop()).__module__


@app.task
async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("as asked")


@app.task
async def add(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


@app.task
async def call_it() -> int:
    """Call another task as a function."""
    result: int = await add(1, 2)
    return result


@app.task
async def apply_it() -> int:
    """Apply another task here."""
    result: int = add.apply((1, 2)).get(disable_sync_subtasks=False)
    return result


@app.task(soft_time_limit=0.3)
async def soft() -> str:
    """Wait in a group until the soft time limit."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_rest("child"))
    except SoftTimeLimitExceeded:
        note("heard")
        return "heard"
    return "not heard"


@app.task(soft_time_limit=0.3)
async def soft_unheard() -> None:
    await asyncio.sleep(60)


async def _rest(name: str) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        note("cancelled", name=name)


@app.task
async def rest() -> None:
    note("resting")
    await _rest("rest")


@app.task(acks_late=True)
async def rest_late() -> None:
    note("resting")
    await _rest("rest")


@app.task(time_limit=0.3)
async def hard() -> None:
    await _rest("hard")


@app.task(time_limit=0.3)
async def deaf() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            note("unheard")


@app.task
async def leave() -> str:
    """Leave a task behind."""
    leave.left = asyncio.create_task(_rest("left"))
    await asyncio.sleep(0)
    return "done"


@app.task
async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


@app.task
async def block() -> None:
    time.sleep(2)  # this line is named


@app.task
async def leave_process() -> None:
    await asyncio.sleep(0)
    raise SystemExit


@signals.task_prerun.connect(weak=False)
def before(task_id: str, task: Task, **_: Any) -> None:
    if task.name.endswith(("add", "fail")):
        note("prerun", id=task_id, seen=task.request.id)


@signals.task_postrun.connect(weak=False)
def after(task_id: str, task: Task, state: str, **_: Any) -> None:
    if task.name.endswith(("add", "fail")):
        note("postrun", id=task_id, seen=task.request.id, state=state)
