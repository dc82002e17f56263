"""A caller that waits for a result is told of it, over one session of its process; behind that it looks for itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult, ResultSet, denied_join_result

from celery_sidejob import StoreUnavailableError, embedded
from celery_sidejob.results import place as place_of
from celery_sidejob.results import waiting as ear_of
from celery_sidejob.results import waiting as waiting_of
from celery_sidejob.results.backend import PostgresBackend
from celery_sidejob.results.place import READERS
from celery_sidejob.results.waiting import add_awaited_calls
from celery_sidejob.store import results
from celery_sidejob.store.connection import own_executor
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.store.statement import Frequent
from tests.results.conftest import Make, Rows
from tests.tools.brokers import in_postgres
from tests.tools.freezing import frozen
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import patient, wait_until

TIMEOUT_S = patient(10)


@pytest.fixture
def never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is told is found, and all is told: no result is left to the look that follows a notification."""
    monkeypatch.setattr(place_of, "APART_S", 0.0)
    monkeypatch.setattr(ear_of, "BACK_OFF_S", (3600.0,))
    monkeypatch.setattr(waiting_of, "INTERVAL_S", 3600.0)


def waits(app: Celery, key: str) -> None:
    """Return once the ear of this process waits for a key."""
    ear = app.backend.place.ear
    wait_until(lambda: ear.listens and any(key in wait.keys for wait in list(ear._waits)), message=f"a wait for {key}")


@pytest.fixture
def getting(app: Celery) -> Callable[..., list[Any]]:
    """Begins a `get` in a thread, and returns the list that gets its result once it waits."""

    def begun(result: Any, **options: Any) -> list[Any]:
        got: list[Any] = []

        def get() -> None:
            try:
                got.append(result.get(timeout=TIMEOUT_S, **options))
            except Exception as error:
                got.append(error)

        threading.Thread(target=get, daemon=True).start()
        first = result.results[0] if isinstance(result, ResultSet) else result
        waits(app, f"task:{first.id}")
        return got

    return begun


@pytest.mark.usefixtures("never_looks")
def test_a_caller_is_told_of_each_state(app: Celery, getting: Any) -> None:
    told: list[Any] = []
    got = getting(app.AsyncResult("t"), on_message=lambda meta: told.append((meta["status"], meta["result"])))
    for step in range(3):
        app.backend.store_result("t", {"step": step}, "PROGRESS")
        wait_until(lambda step=step: len(told) == step + 1, message=f"step {step} to be told")  # type: ignore[misc]
    app.backend.mark_as_done("t", 42)
    wait_until(lambda: got, message="the result")
    assert (got, told) == ([42], [*(("PROGRESS", {"step": step}) for step in range(3)), (states.SUCCESS, 42)])


@pytest.mark.usefixtures("never_looks")
def test_what_is_told_during_a_look_is_heard(app: Celery, getting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, looked = results.read, threading.Event()

    def read_slowly(executor: Any, keys: Any) -> Any:
        found = read(executor, keys)
        if found and not looked.is_set() and threading.current_thread().name == "sidejob-results-ear":
            looked.set()  # the look that found the progress; the caller itself looks too, as it begins to wait
            app.backend.mark_as_done("t", 42)
            executor.run(Frequent("SELECT pg_sleep(0.5)::text AS slept"))  # its answer comes with the notification
        return found

    monkeypatch.setattr(results, "read", read_slowly)
    monkeypatch.setattr(ear_of, "IDLE_S", 3600.0)
    told: list[Any] = []
    got = getting(app.AsyncResult("t"), on_message=lambda meta: told.append(meta["status"]))
    app.backend.store_result("t", None, "PROGRESS")
    wait_until(lambda: got, message="the result")
    assert (got, told) == ([42], ["PROGRESS", states.SUCCESS])


@pytest.mark.usefixtures("never_looks")
def test_an_error_is_raised_where_it_is_waited_for(app: Celery, getting: Any) -> None:
    got, propagated = getting(app.AsyncResult("t")), getting(app.AsyncResult("t"), propagate=False)
    app.backend.mark_as_failure("t", KeyError("x"))
    wait_until(lambda: got and propagated, message="both")
    assert [type(one) for one in (*got, *propagated)] == [KeyError, KeyError]


def test_what_nobody_tells_of_is_looked_for(app: Celery, getting: Any, rows: Rows) -> None:
    app.backend.mark_as_done("other", 5)
    got = getting(app.AsyncResult("t"))
    rows.run("UPDATE results SET key = 'task:t'")
    wait_until(lambda: got, message="the result")
    assert got == [5]


@pytest.mark.usefixtures("never_looks")
def test_a_group_is_told_of_each_part_and_keeps_its_order(app: Celery, getting: Any) -> None:
    ids = [f"part{number}" for number in range(30)]
    group = GroupResult("g", [app.AsyncResult(one) for one in ids], app=app)
    got = getting(group)
    for one in reversed(ids):
        app.backend.mark_as_done(one, one)
        sleep(0.002)  # each is told by a notification of its own
    wait_until(lambda: got, message="the results")
    assert got == [ids]


def test_nested_groups_and_parts_that_are_known_already(app: Celery) -> None:
    inner = GroupResult("inner", [app.AsyncResult("b"), app.AsyncResult("c")], app=app)
    outer = GroupResult("outer", [app.AsyncResult("a"), inner], app=app)
    for one in "abc":
        app.backend.mark_as_done(one, one)
    assert outer.results[0].get() == "a"
    assert outer.get(timeout=TIMEOUT_S) == ["a", ["b", "c"]]
    assert ResultSet([], app=app).get() == []


def test_results_are_iterated_as_they_come(app: Celery) -> None:
    group = GroupResult("g", [app.AsyncResult(one) for one in "abc"], app=app)
    found = group.iter_native(timeout=TIMEOUT_S)
    seen = []
    for one in "cab":
        app.backend.mark_as_done(one, one)
        task_id, meta = next(found)
        seen.append((task_id, meta["result"]))
    assert seen == [(one, one) for one in "cab"]
    assert list(found) == []


def test_callbacks_are_called_by_the_caller_that_waits(app: Celery, getting: Any) -> None:
    result = app.AsyncResult("t")
    called: list[Any] = []
    result.then(lambda one: called.append((one.id, one.result)))
    got = getting(result)
    app.backend.mark_as_done("t", 1)
    wait_until(lambda: got, message="the result")
    assert called == [("t", 1)]


def test_timeouts(app: Celery) -> None:
    began = monotonic()
    for timeout in (0, 0.05):
        with pytest.raises(CeleryTimeoutError):
            app.AsyncResult("never").get(timeout=timeout)
    with pytest.raises(CeleryTimeoutError):
        GroupResult("g", [app.AsyncResult("never")], app=app).get(timeout=0.05)
    assert monotonic() - began < patient(2)
    app.backend.mark_as_done("t", 1)
    assert app.AsyncResult("t").get(timeout=0) == 1


@pytest.mark.parametrize("begins", ["with a connection", "without", "behind others", "with retries"])
def test_a_wait_that_begins_while_postgres_is_frozen_ends_at_its_timeout(
    make: Make, own_postgres: embedded.Postgres, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    monkeypatch.setattr(own_executor, "IDLE_S", 600.0)  # or the connection is closed before, on a slow machine
    upgrade(own_postgres.url)
    app = make(result_backend=in_postgres(own_postgres.url), result_backend_always_retry=begins == "with retries")
    app.backend.mark_as_done("t", 1)
    place = app.backend.place
    if begins == "without":
        place.connections.close()
    if begins == "behind others":  # which have no timeout
        for _ in range(READERS):
            place._readers.acquire()
    began = monotonic()
    with frozen(own_postgres.pid):
        with pytest.raises(CeleryTimeoutError):
            app.AsyncResult("t").get(timeout=1)
        assert 1 <= monotonic() - began < 3.5
        began = monotonic()
        with pytest.raises(CeleryTimeoutError):
            asyncio.run(app.AsyncResult("t").aget(timeout=0.5))
        assert monotonic() - began < 3.5
    if begins == "behind others":
        place._readers.release(READERS)
    assert app.AsyncResult("t").get(timeout=TIMEOUT_S) == 1


def test_a_parent_that_has_failed_ends_the_wait(app: Celery, getting: Any) -> None:
    result = app.AsyncResult("child", parent=app.AsyncResult("parent"))
    got = getting(result)
    app.backend.mark_as_failure("parent", ValueError("before it"))
    wait_until(lambda: got, message="the parent's error")
    assert isinstance(got[0], ValueError)


@pytest.mark.few(0)
def test_all_that_wait_cost_one_session_and_those_that_do_not_none(
    app: Celery, rows: Rows, getting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ear_of, "IDLE_S", 0.2)
    app.backend.mark_as_done("t", 1)
    assert app.AsyncResult("t").get() == 1
    GroupResult("g", [app.AsyncResult("never")], app=app)
    assert rows.listening == 0, "a result that is there needs no session, and a group that is not waited for"
    got = [getting(app.AsyncResult(f"w{number}")) for number in range(20)]
    many = getting(GroupResult("m", [app.AsyncResult(f"m{number}") for number in range(3000)], app=app))
    assert rows.listening == 1
    for number in range(20):
        app.backend.mark_as_done(f"w{number}", number)
    for number in range(3000):
        app.backend.mark_as_done(f"m{number}", number)
    wait_until(lambda: all(got) and many, message="all results")
    assert [one[0] for one in got] == list(range(20))
    assert many == [list(range(3000))]
    wait_until(lambda: rows.listening == 0, message="the session to be closed")


def test_callers_that_begin_to_wait_at_once_share_a_few_sessions(
    app: Celery, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    opened: list[Any] = []
    mget, connections = PostgresBackend.mget, app.backend.place.connections
    connect = connections.connect
    monkeypatch.setattr(
        PostgresBackend, "mget", lambda self, keys, **options: (begun.append(keys), mget(self, keys, **options))[1]
    )
    monkeypatch.setattr(connections, "connect", lambda deadline: (opened.append(deadline), connect(deadline))[1])
    got: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: got.append(app.AsyncResult(f"t{n}").get(timeout=TIMEOUT_S)), daemon=True)
        for n in range(20)
    ]
    with psycopg.connect(direct(database_url)) as locks:
        locks.execute("LOCK TABLE sidejob.results")
        for thread in threads:
            thread.start()
        wait_until(lambda: len(begun) == len(threads), message="all to read")
    for n in range(len(threads)):
        app.backend.mark_as_done(f"t{n}", n)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(len(threads)))
    assert len(opened) <= READERS + 1, "and one that has kept the results"


def test_nobody_is_notified_while_nobody_waits(app: Celery, getting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    tell = results.tell

    def noted(executor: Any, keys: Any, **options: Any) -> None:
        told.append(keys)
        tell(executor, keys, **options)

    monkeypatch.setattr(results, "tell", noted)
    for number in range(50):
        app.backend.mark_as_done(f"t{number}", number)
    assert told == []
    got = getting(app.AsyncResult("t"))
    app.backend.mark_as_done("t", 1)
    wait_until(lambda: got, message="the result")
    assert told == [["task:t"]]


def test_results_in_quick_succession_are_told_together(
    app: Celery, getting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.results.place.APART_S", 3600.0)
    first, second = getting(app.AsyncResult("a")), getting(app.AsyncResult("b"))
    app.backend.place._told_at = monotonic()
    app.backend.mark_as_done("a", 1)
    app.backend.mark_as_done("b", 2)
    wait_until(lambda: first and second, message="both to be looked for")
    assert app.backend.place._untold == ["task:a", "task:b"]


def test_a_lost_session_is_opened_again(app: Celery, rows: Rows, getting: Any) -> None:
    got = getting(app.AsyncResult("t"))
    rows.end_listening()
    app.backend.mark_as_done("t", 1)
    wait_until(lambda: got, message="the result")
    assert got == [1]
    got = getting(app.AsyncResult("again"))
    app.backend.mark_as_done("again", 2)
    wait_until(lambda: got, message="the result")


@pytest.fixture
def looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each reason to look there is one look, and no later one."""
    monkeypatch.setattr(ear_of, "BACK_OFF_S", (0.01, 3600.0))


@pytest.mark.usefixtures("looks_once")
def test_a_notification_lets_it_look_for_those_that_none_names(app: Celery, getting: Any) -> None:
    place = app.backend.place
    named, unnamed = getting(app.AsyncResult("named")), getting(app.AsyncResult("unnamed"))
    wait_until(lambda: place.ear._look_at > monotonic() + 1000, message="the look at what was there before")
    place._told_at = inf
    app.backend.mark_as_done("unnamed", 1)
    place._untold.clear()  # as if it were another process's, which has had no result after it
    place._told_at = -inf
    app.backend.mark_as_done("named", 2)
    wait_until(lambda: named and unnamed, message="both")
    assert (named, unnamed) == ([2], [1])


@pytest.mark.usefixtures("looks_once")
def test_a_notification_of_others_results_lets_it_look_too(app: Celery, getting: Any) -> None:
    place = app.backend.place
    got = getting(app.AsyncResult("unnamed"))
    wait_until(lambda: place.ear._look_at > monotonic() + 1000, message="the look at what was there before")
    place._told_at = inf
    app.backend.mark_as_done("unnamed", 1)
    place._untold.clear()  # as if the process that has told of another had no result after it
    place._told_at = -inf
    app.backend.mark_as_done("of another process", 2)
    wait_until(lambda: got, message="the result")
    assert got == [1]


@pytest.mark.usefixtures("never_looks")
def test_a_result_is_kept_where_nobody_can_be_told_of_it(
    app: Celery, getting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(*args: Any, **options: Any) -> None:
        raise StoreUnavailableError("away")

    with monkeypatch.context() as away:
        away.setattr(results, "tell", tell)
        first = getting(app.AsyncResult("first"))
        app.backend.mark_as_done("first", 1)
    app.backend.place._told_at = -inf
    app.backend.store_result("first", 1, states.SUCCESS)
    wait_until(lambda: first, message="the result")
    assert first == [1]


@pytest.mark.usefixtures("looks_once")
def test_a_network_that_was_away(make: Make, database_url: str, app: Celery) -> None:
    with TcpProxy.to(database_url) as proxy:
        away = make(result_backend=in_postgres(proxy.url_for(database_url)))
        got: list[Any] = []
        told: list[Any] = []
        waiting = partial(away.AsyncResult("t").get, timeout=TIMEOUT_S, on_message=told.append)
        threading.Thread(target=lambda: got.append(waiting()), daemon=True).start()
        wait_until(lambda: away.backend.place.ear.listens, message="the session")
        app.backend.store_result("t", None, "STARTED")
        wait_until(lambda: told, message="the caller to wait, and to read nothing itself any more")
        ear = away.backend.place.ear
        wait_until(lambda: ear._look_at > monotonic() + 1000, message="the looks after that")
        proxy.refuse()
        app.backend.mark_as_done("t", 1)
        wait_until(lambda: not away.backend.place.ear.listens, message="the session to be lost")
        assert got == []
        proxy.pass_through()
        wait_until(lambda: got, message="the result")


def test_a_forked_process_waits_over_a_session_of_its_own(app: Celery, getting: Any, rows: Rows) -> None:
    got = getting(app.AsyncResult("parent"))
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if app.AsyncResult("child").get(timeout=TIMEOUT_S) == 7 else 2
        finally:
            os._exit(code)
    wait_until(lambda: rows.listening == 2, message="the child to listen")
    app.backend.mark_as_done("child", 7)
    assert os.waitpid(child, 0)[1] == 0
    app.backend.mark_as_done("parent", 8)
    wait_until(lambda: got, message="the parent's result")
    assert got == [8]


class TestBehindAPgBouncer:
    """It pools transactions: no notification is heard unless a direct URL is given."""

    @pytest.fixture
    def pooled(self) -> bool:
        """Here all goes through the proxy."""
        return True

    def test_it_polls(self, app: Celery) -> None:
        got: list[Any] = []
        threading.Thread(target=lambda: got.append(app.AsyncResult("t").get(timeout=TIMEOUT_S)), daemon=True).start()
        ear = app.backend.place.ear
        wait_until(lambda: ear._waits and ear._ready.is_set(), message="a caller to wait")
        assert not ear.listens
        app.backend.mark_as_done("t", 1)
        wait_until(lambda: got, message="the result")

    @pytest.mark.usefixtures("never_looks")
    def test_it_listens_past_it(self, make: Make, database_url: str) -> None:
        app = make(result_backend_transport_options={"direct_url": direct(database_url)})
        got: list[Any] = []
        threading.Thread(target=lambda: got.append(app.AsyncResult("t").get(timeout=TIMEOUT_S)), daemon=True).start()
        waits(app, "task:t")
        app.backend.mark_as_done("t", 1)
        wait_until(lambda: got, message="the result")


# -- in an event loop -------------------------------------------------------------------------------------------------


def test_thousands_wait_in_an_event_loop_and_are_told(app: Celery) -> None:
    """Over the one session of the process, and without a thread for each."""
    ids = [f"t{number}" for number in range(1000)]
    before = threading.active_count()

    async def client() -> list[Any]:
        waiting = [asyncio.create_task(app.AsyncResult(each).aget(timeout=patient(120))) for each in ids]
        ear = app.backend.place.ear
        while not ear.listens or len(ear._waits) < len(ids):
            await asyncio.sleep(0.01)
        threads = threading.active_count() - before
        for each in ids:
            await asyncio.to_thread(app.backend.mark_as_done, each, each)
        found = await asyncio.gather(*waiting)
        assert threads < 40
        return found

    assert asyncio.run(client()) == ids


@pytest.mark.usefixtures("never_looks")
def test_a_group_is_awaited_in_its_order(app: Celery) -> None:
    async def client() -> list[Any]:
        waiting = asyncio.create_task(GroupResult("g", [app.AsyncResult(each) for each in "abc"]).aget())
        while not any(isinstance(wait.told, partial) for wait in list(app.backend.place.ear._waits)):
            await asyncio.sleep(0.01)
        for each in "cab":
            await asyncio.to_thread(app.backend.mark_as_done, each, each.upper())
            await asyncio.sleep(0.002)  # each is told by a notification of its own
        found: list[Any] = await asyncio.wait_for(waiting, patient(30))
        return found

    assert asyncio.run(client()) == ["A", "B", "C"]


def test_an_awaited_failure_is_raised_and_one_that_does_not_come_is_late(app: Celery) -> None:
    app.backend.mark_as_failure("failed", ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        asyncio.run(app.AsyncResult("failed").aget(timeout=60))
    assert repr(asyncio.run(app.AsyncResult("failed").aget(timeout=60, propagate=False))) == "ValueError('no')"
    with pytest.raises(CeleryTimeoutError):
        asyncio.run(app.AsyncResult("never").aget(timeout=0.05))


def test_a_result_may_be_awaited_in_a_task(app: Celery) -> None:
    app.backend.mark_as_done("t", 1)
    with denied_join_result():  # as in a task, where `get` is refused
        assert asyncio.run(app.AsyncResult("t").aget(timeout=60)) == 1


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8
@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_awaited_result_ends_with_its_parent_s_error(app: Celery, redis_url: str, elsewhere: bool) -> None:
    """Its own result never comes: what follows a task that was revoked is not called."""
    if elsewhere:
        app = Celery("other", broker="memory://", backend=redis_url, set_as_current=False)
    result = app.AsyncResult("child", parent=app.AsyncResult("parent"))

    async def client() -> Any:
        waiting = asyncio.create_task(result.aget(timeout=60))
        await asyncio.sleep(0)
        await asyncio.to_thread(app.backend.mark_as_revoked, "parent", "revoked")
        return await waiting

    with pytest.raises(TaskRevokedError):
        asyncio.run(client())
    with pytest.raises(CeleryTimeoutError):
        asyncio.run(result.aget(timeout=0.05, propagate=False))
    app.close()


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8
def test_an_awaited_result_of_another_backend(redis_url: str) -> None:
    app = Celery("other", broker="memory://", backend=redis_url, set_as_current=False)
    add_awaited_calls()

    async def client() -> Any:
        waiting = asyncio.create_task(app.AsyncResult("later").aget(timeout=60))
        await asyncio.sleep(0)
        await asyncio.to_thread(app.backend.mark_as_done, "later", 42)
        return await waiting

    assert asyncio.run(client()) == 42
    app.close()
