"""The pool `asyncio` in real workers, of an app with a SideJob and of an app that has nothing else of this package."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult

from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.pools.coroutine_app"
TIMEOUT_S = 20.0


@pytest.fixture(params=["plain", "sidejob"])
def env(request: pytest.FixtureRequest, redis_url: str, record: Record) -> dict[str, str]:
    given = {"BROKER_URL": redis_url, **record.env}
    if request.param == "sidejob":
        given |= {"DATABASE_URL": request.getfixturevalue("database_url"), "SIDEJOB_SYNC_THREADS": "2"}
        given["WITHOUT_UVLOOP"] = "1"  # each kind of loop has all tests, and one kind of app
    return given


@pytest.fixture
def client(redis_url: str) -> Iterator[celery.Celery]:
    app = celery.Celery(broker=redis_url, backend=redis_url, set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def start(processes: Processes, env: dict[str, str]) -> Callable[..., WorkerProcess]:
    def started(concurrency: int = 10) -> WorkerProcess:
        return processes.start_worker(APP, env=env, pool="asyncio", concurrency=concurrency)

    return started


@pytest.fixture
def send(client: celery.Celery) -> Callable[..., AsyncResult]:
    def sent(name: str, *args: Any) -> AsyncResult:
        return client.send_task(f"{APP}.{name}", args)

    return sent


def value(result: AsyncResult) -> Any:
    return result.get(timeout=TIMEOUT_S, interval=0.05)


Start = Callable[..., WorkerProcess]
Send = Callable[..., AsyncResult]


def test_a_body_knows_its_request_after_each_await_and_in_its_tasks(start: Start, send: Send) -> None:
    start()
    results = [send("follow", 0.01 * number) for number in range(10)]

    for result in results:
        assert value(result) == [result.id] * 5


def test_bodies_run_at_once_as_many_as_the_concurrency_says(
    start: Start, send: Send, record: Record, client: celery.Celery, env: dict[str, str]
) -> None:
    worker = start(concurrency=3)
    results = [send("meet", number) for number in range(6)]

    record.wait_for("here", count=3)
    fetched = 3 if "DATABASE_URL" in env else 6  # with a SideJob a worker fetches no more than it can begin
    wait_until(lambda: worker.log().count("received") == fetched, timeout=TIMEOUT_S)
    stats = client.control.inspect([worker.nodename]).stats()[worker.nodename]["pool"]
    assert stats["running"] == len(record.of("here")) == 3
    record.note("open")

    assert sorted(map(value, results)) == list(range(6))


def test_ordinary_bodies_run_in_threads_beside_the_loop(start: Start, send: Send, record: Record) -> None:
    start()
    name, is_main = value(send("thread_of"))
    assert (name.startswith("ThreadPoolExecutor"), is_main) == (True, False)

    held = [send("hold") for _ in range(3)]
    record.wait_for("held", count=2)
    assert value(send("add", 1, 2)) == 3, "the loop goes on"
    assert len(record.of("held")) == 2, "as many as sidejob_sync_threads says"
    record.note("open")
    for result in held:
        value(result)


def test_retries_refusals_and_signals_are_celery_s(start: Start, send: Send, record: Record) -> None:
    worker = start()

    assert value(send("again")) == 2
    assert value(send("auto")) == 2
    for name in ("ignored", "rejected"):
        result = send(name)
        wait_until(lambda of=result: is_over(worker, of), timeout=TIMEOUT_S)
    failed = send("fail")
    with pytest.raises(ValueError, match="as asked"):
        value(failed)
    assert "raise ValueError" in failed.traceback
    added = send("add", 1, 2)
    assert value(added) == 3
    assert value(send("call_it")) == 3
    assert value(send("apply_it")) == 3

    record.wait_for("postrun", count=3)
    for event in ("prerun", "postrun"):
        lines = record.of(event)
        assert {line["id"] for line in lines} >= {failed.id, added.id}
        assert all(line["id"] == line["seen"] for line in lines)
    assert {line["state"] for line in record.of("postrun") if line["id"] == failed.id} == {"FAILURE"}


def is_over(worker: WorkerProcess, result: AsyncResult) -> bool:
    """A refused task has no result: only the worker's next answers show that it is over."""
    active = result.app.control.inspect([worker.nodename], timeout=1).active() or {}
    return active.get(worker.nodename) == [] and f"[{result.id}] received" in worker.log()


def test_callbacks_chains_and_chords_go_on(start: Start, client: celery.Celery) -> None:
    start()
    add = client.signature(f"{APP}.add")

    assert value((add.clone((1, 2)) | add.clone((4,))).apply_async()) == 7
    both = celery.group([add.clone((1, 1)), add.clone((2, 2))], app=client)
    total = celery.chord(both, app=client)(client.signature(f"{APP}.add", (5, 6), immutable=True))
    assert value(total) == 11


def test_a_soft_time_limit_is_raised_where_the_body_awaits(start: Start, send: Send, record: Record) -> None:
    start()

    assert value(send("soft")) == "heard"
    assert [line["event"] for line in record.read()] == ["cancelled", "heard"], "the group ends its tasks first"
    with pytest.raises(SoftTimeLimitExceeded):
        value(send("soft_unheard"))


def test_a_hard_time_limit_cancels_the_body(start: Start, send: Send, record: Record) -> None:
    start()

    with pytest.raises(TimeLimitExceeded):
        value(send("hard"))
    assert [line["name"] for line in record.of("cancelled")] == ["hard"]


def test_a_body_that_does_not_heed_its_cancellation_is_given_up(start: Start, send: Send, record: Record) -> None:
    worker = start(concurrency=1)

    with pytest.raises(TimeLimitExceeded):
        value(send("deaf"))
    worker.wait_for_log("went on after it was cancelled (its time limit of 0.3 s), and is given up")
    assert value(send("add", 1, 2)) == 3, "its place is free"


def test_a_revoked_body_is_cancelled(start: Start, send: Send, record: Record) -> None:
    start(concurrency=1)
    result = send("rest")
    record.wait_for("resting")

    result.revoke(terminate=True)

    with pytest.raises(TaskRevokedError):
        value(result)
    record.wait_for("cancelled")
    assert value(send("add", 1, 2)) == 3


def test_what_a_body_leaves_behind_is_cancelled(start: Start, send: Send, record: Record) -> None:
    worker = start()

    assert value(send("leave")) == "done"
    assert [line["name"] for line in record.of("cancelled")] == ["left"]
    worker.wait_for_log("has left 1 tasks of its own behind")


def test_a_body_that_cancels_itself_or_leaves_its_process_fails(start: Start, send: Send) -> None:
    start()

    with pytest.raises(RuntimeError, match="was cancelled"):
        value(send("cancel_itself"))
    with pytest.raises(Exception, match="SystemExit"):
        value(send("leave_process"))
    assert value(send("add", 1, 2)) == 3


def test_a_body_that_blocks_the_loop_is_named_with_its_line(start: Start, send: Send) -> None:
    worker = start()
    result = send("block")

    value(result)

    worker.wait_for_log("The event loop of this worker has stood still for")
    (line,) = [line for line in worker.log().splitlines() if "stood still" in line]
    assert f"block[{result.id}] is in block, line" in line
    assert "coroutine_app.py" in line


def test_uvloop_is_used_where_it_is_installed(start: Start, send: Send, env: dict[str, str]) -> None:
    pytest.importorskip("uvloop", reason="uvloop is not installed: all tests of the pool are on asyncio's own loop")
    start()
    assert value(send("loop")) == ("asyncio.unix_events" if "WITHOUT_UVLOOP" in env else "uvloop")


@pytest.mark.parametrize(
    ("given", "found"), [(700, [20_000, 30, 10]), (50_000, [50_000, 30, 10]), (0, [0, 30, 10])], ids=str
)
def test_garbage_is_collected_seldom(
    start: Start, send: Send, env: dict[str, str], given: int, found: list[int]
) -> None:
    env["GC_THRESHOLD"] = str(given)
    start()
    assert value(send("collected")) == [found, True]


def test_a_warm_stop_waits_for_bodies(start: Start, send: Send, record: Record) -> None:
    worker = start()
    result = send("meet", 1)
    record.wait_for("here")

    worker.terminate()
    worker.wait_for_log("Warm shutdown")
    record.note("open")

    assert worker.wait(TIMEOUT_S) == 0
    assert value(result) == 1


def test_a_cold_stop_cancels_bodies_and_gives_them_back(start: Start, send: Send, record: Record) -> None:
    worker = start()
    send("rest_late")
    record.wait_for("resting")

    worker.send_signal(signal.SIGQUIT)

    worker.wait(TIMEOUT_S)
    assert record.of("cancelled")
    assert "Traceback" not in worker.log()
    start()
    record.wait_for("resting", count=2)


def test_the_pool_grows_and_shrinks(start: Start, send: Send, record: Record, client: celery.Celery) -> None:
    worker = start(concurrency=1)
    send("meet", 1)
    record.wait_for("here")
    send("meet", 2)

    client.control.pool_grow(1, destination=[worker.nodename], reply=True)
    record.wait_for("here", count=2)
    client.control.pool_shrink(1, destination=[worker.nodename], reply=True)
    stats = client.control.inspect([worker.nodename]).stats()[worker.nodename]["pool"]
    assert (stats["max-concurrency"], stats["running"]) == (1, 2)
    record.note("open")
