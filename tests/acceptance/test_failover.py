"""Durable tasks with several stores: the next takes them while the first is away, and nothing runs or dies twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from celery import chain

from celery_sidejob import StoreUnavailableError, embedded
from tests.acceptance.test_durable import APP, TIMEOUT_S, Site
from tests.tools.brokers import Broker
from tests.tools.crash_points import Arm, lost
from tests.tools.databases import SCHEMA, Databases, Eye, prepare_template
from tests.tools.freezing import frozen
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes


class Stores(Site):
    """A site with two stores: the first behind a proxy for each side, the second as it is."""

    def __init__(self, first: str, second: str, broker: Broker, record: Record, processes: Processes) -> None:
        self.to_clients, self.to_workers = TcpProxy.to(first).start(), TcpProxy.to(first).start()
        self.first, self.second = first, second
        self._eyes: dict[str, Eye] = {}
        self._failover = {"sidejob_failover_urls": [second]}
        super().__init__(first, broker, record, processes)
        self.env |= {
            "SIDEJOB_DATABASE_URL": self.to_workers.url_for(first), "SIDEJOB_FAILOVER_URLS": second, **FAST,
        }  # fmt: skip

    def client(self, **settings: Any) -> Any:
        """A client with both stores."""
        url = self.to_clients.url_for(self.first)
        return super().client(**{**settings, "sidejob_database_url": url, **self._failover})

    def close(self) -> None:
        """Close what is open, the proxies last."""
        super().close()
        for eye in self._eyes.values():
            eye.close()
        for proxy in (self.to_clients, self.to_workers):
            proxy.close()

    def away(self) -> None:
        """Take the first store from everybody."""
        for proxy in (self.to_clients, self.to_workers):
            proxy.refuse()

    def back(self) -> None:
        """Give it back."""
        for proxy in (self.to_clients, self.to_workers):
            proxy.pass_through()

    def of(self, url: str, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in one of the stores."""
        if url not in self._eyes:
            self._eyes[url] = Eye(url)
        return self._eyes[url].rows(statement, *parameters)

    def kept(self, url: str) -> list[str]:
        """The ids of the tasks that a store has."""
        return [row.task_id for row in self.of(url, "SELECT task_id FROM messages ORDER BY 1")]

    def wait_quiet(self) -> None:
        """Wait until neither store keeps a message any more."""
        wait_until(
            lambda: not self.kept(self.first) and not self.kept(self.second), timeout=2 * TIMEOUT_S,
            message="no message to be left",
        )  # fmt: skip

    def command(self, *words: str, code: int = 0) -> str:
        """What a command says, given in a process of its own, which must end soon and with this code."""
        argv = [sys.executable, "-m", "celery", "-A", APP, "sidejob", *words]
        process = self.processes.start(argv, env=self.env, name="command")
        assert process.wait(TIMEOUT_S) == code, process.log()
        return process.log()

    def dead(self) -> list[Any]:
        """What died in either store."""
        return [*self.of(self.first, "SELECT * FROM dead"), *self.of(self.second, "SELECT * FROM dead")]


two_at_once = pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
DIED = """
    INSERT INTO dead (task_id, task, queue, reason, error, payload, body)
    VALUES (%s, 'mail', 'q', 'lost', 'gone', json_build_object(
      'publication', '{"v": 2, "about": "{}"}', 'generation', 1), 'x')"""
FAST = {"SIDEJOB_LOST_AFTER": "1", "STORE_PAUSE_S": "1.5"}


def named_anew(url: str) -> str:
    """Give a store that was cloned from a template a name of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"UPDATE {SCHEMA}.meta SET value = gen_random_uuid()::text WHERE key = 'identity'")
    return url


@pytest.fixture
def second_url(databases: Databases, database_template: str) -> Iterator[str]:
    """Another store of this test's own."""
    with databases.fresh(template=database_template) as name:
        yield named_anew(databases.url_of(name))


@pytest.fixture
def first_url(databases: Databases, database_template: str) -> Iterator[str]:
    """A store of this test's own."""
    with databases.fresh(template=database_template) as name:
        yield named_anew(databases.url_of(name))


@pytest.fixture
def stores(first_url: str, second_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[Stores]:
    """Two stores, a broker and a record of this test's own, and what starts workers on them."""
    made = Stores(first_url, second_url, broker, record, processes)
    yield made
    made.close()


# -- one store is away -----------------------------------------------------------------------------------------------


def test_what_is_held_before_it_begins_runs_at_once(stores: Stores) -> None:
    """Its process does not look for a row that its own worker holds: only after a lease it would be given back."""
    stores.worker(env={"SIDEJOB_LEASE": "600"})
    result = stores.call("step", 1)
    stores.record.wait_for("ran", id=result.id, timeout=TIMEOUT_S)
    stores.wait_quiet()


@two_at_once
def test_all_forms_of_tasks_run_on_in_the_second_store_and_the_first_comes_back(stores: Stores) -> None:
    worker = stores.worker(concurrency=2)
    held = stores.call("repeatable", 1)
    before = [stores.call("noted", number) for number in range(3)]
    stores.holding(held)
    assert [result.get(timeout=TIMEOUT_S) for result in before] == [0, 1, 2]

    stores.away()
    plus = lambda *args: stores.s("plus", *args)  # noqa: E731
    linked = chain(plus(1), plus(), plus()).apply_async()
    retried, nesting, failing = stores.call("retrying", 2), stores.call("nesting", 7), stores.call("failing")
    assert (linked.get(timeout=TIMEOUT_S), retried.get(timeout=TIMEOUT_S)) == (4, 2)
    stores.record.wait_for("ran", timeout=TIMEOUT_S, id=nesting.get(timeout=TIMEOUT_S))
    wait_until(lambda: stores.of(stores.second, "SELECT 1 FROM dead"), timeout=TIMEOUT_S)
    stores.back()
    stores.go(held)

    stores.wait_quiet()
    assert held.get(timeout=TIMEOUT_S) == 1
    ((entry,), left) = (stores.of(stores.second, "SELECT * FROM dead"), stores.of(stores.first, "SELECT * FROM dead"))
    assert (entry.task_id, entry.reason, left) == (failing.id, "failed", [])
    assert len(stores.record.of("ran", task=f"{APP}.plus")) == 3
    assert [len(stores.ran(result)) for result in (retried, nesting, failing)] == [3, 1, 1]
    assert worker.alive


def test_a_killed_postgres_loses_and_doubles_nothing(
    own_postgres: embedded.Postgres, second_url: str, broker: Broker, record: Record, processes: Processes
) -> None:
    """`kill -9` in the midst of publishing; the next store has what comes then; the first returns."""
    prepare_template(own_postgres.url)
    site = Stores(own_postgres.url, second_url, broker, record, processes)
    site.env["SIDEJOB_DATABASE_URL"] = own_postgres.url
    site.worker(concurrency=2)
    source = f"""
import sys
from {APP} import noted
from tests.tools.recorder import Record
for number in range(250):
    Record.from_env().note("accepted", id=noted.delay(number).id)
"""
    client = processes.start_python(source, env=site.env)
    record.wait_for("accepted", count=50, timeout=TIMEOUT_S)

    own_postgres.kill()
    record.wait_for("accepted", count=200, timeout=TIMEOUT_S)
    assert site.kept(second_url) or record.of("ran")
    own_postgres.start()

    assert client.wait(TIMEOUT_S) == 0
    site.wait_quiet()
    accepted = [line["id"] for line in record.of("accepted")]
    ran = [line["id"] for line in record.of("ran")]
    assert (len(set(accepted)), len(accepted)) == (250, 250)
    assert sorted(ran) == sorted(set(ran)), "run twice"
    # Whose publisher's answer, or whose run's end, was lost in the kill is known to the store alone.
    assert set(accepted) <= set(ran) | {entry.task_id for entry in site.dead()}
    assert {entry.reason for entry in site.dead()} <= {"lost"}
    assert site.of(second_url, "SELECT 1 FROM dead") == []
    site.close()


def test_a_worker_that_starts_without_the_first_store_runs_what_is_in_the_second(stores: Stores) -> None:
    waiting = stores.call("noted", 1)
    stores.away()
    worker = stores.worker()
    result = stores.call("noted", 2)
    assert result.get(timeout=TIMEOUT_S) == 2

    stores.back()
    assert waiting.get(timeout=TIMEOUT_S) == 1
    stores.wait_quiet()
    assert (len(stores.ran(waiting)), len(stores.ran(result)), stores.dead()) == (1, 1, [])
    assert worker.alive


@two_at_once
def test_what_dies_in_the_second_store_follows_on_lost_there(stores: Stores) -> None:
    first = stores.worker(concurrency=2)
    stores.away()
    repeated, once = stores.call("repeatable", 1), stores.call("holder", 2)
    stores.holding(repeated)
    stores.holding(once)
    stores.worker()

    first.kill_group()

    stores.holding(repeated, count=2)
    stores.go(repeated)
    wait_until(lambda: not stores.kept(stores.second), timeout=TIMEOUT_S)
    stores.back()
    (entry,) = stores.dead()
    assert (entry.task_id, entry.reason) == (once.id, "lost")
    assert repeated.get(timeout=TIMEOUT_S) == 1


@pytest.mark.slow
def test_commands_do_not_wait_without_end_for_a_further_store_that_is_frozen(
    first_url: str, own_postgres: embedded.Postgres, broker: Broker, record: Record, processes: Processes
) -> None:
    prepare_template(own_postgres.url)
    site = Stores(first_url, own_postgres.url, broker, record, processes)
    for url, task_id in ((first_url, "one"), (own_postgres.url, "two")):
        site.of(url, DIED, task_id)
    assert site.command("dead", "list").count("mail") == 2

    with frozen(own_postgres.pid):
        assert 'sidejob_failover_stores{state="away"} 1.0' in site.command("stats", "--prometheus")
        listed = site.command("dead", "list")
        assert ("one" in listed, "two" in listed) == (True, False)
        assert "passed over. Store 1 of sidejob_failover_urls: " in listed
        assert str(urlsplit(own_postgres.url).password) not in listed
        assert "error: store 1. " in site.command("doctor", code=2)
        assert "1 entry retried." in site.command("dead", "retry", "--all", "--yes")

    assert site.command("dead", "list").count("mail") == 1
    site.close()


# -- two copies ------------------------------------------------------------------------------------------------------


def test_a_copy_that_the_first_store_had_all_along_does_not_run(stores: Stores, at: Arm) -> None:
    """Committed there, the answer lost; it runs to its end in the second; then the first comes back with its row."""
    stores.worker()
    warm(stores)
    at("durable-keep:after-commit", lambda: (stores.away(), lost()))
    result = stores.call("noted", 1)
    assert (stores.kept(stores.first), result.get(timeout=TIMEOUT_S)) == ([result.id], 1)

    stores.back()

    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead(), result.state) == (1, [], "SUCCESS")


def test_many_copies_that_the_first_store_had_all_along_do_not_run(stores: Stores, at: Arm) -> None:
    stores.worker(concurrency=2)
    warm(stores)
    at("durable-keep:after-commit", lambda: (stores.away(), lost()))
    results = stores.app.sidejob.send_many([stores.s("noted", number) for number in range(30)])
    assert sorted(stores.kept(stores.first)) == sorted(result.id for result in results)
    assert [result.get(timeout=TIMEOUT_S) for result in results] == list(range(30))

    stores.back()

    stores.wait_quiet()
    assert ([len(stores.ran(result)) for result in results], stores.dead()) == ([1] * 30, [])


def test_an_insert_that_arrives_when_the_task_is_done_does_not_run(stores: Stores) -> None:
    """A black hole, in which the statement is under way until the network is mended."""
    stores.worker()
    warm(stores)
    stores.to_clients.black_hole()
    stores.to_workers.refuse()
    result = stores.call("noted", 1)
    assert (stores.kept(stores.first), result.get(timeout=TIMEOUT_S)) == ([], 1)

    stores.back()
    wait_until(
        lambda: (
            stores.of(stores.first, "SELECT 1 FROM messages WHERE task_id = %s", result.id)
            or stores.of(
                stores.first, "SELECT n_tup_del FROM pg_stat_user_tables WHERE relname = 'messages' AND n_tup_ins > 1"
            )
        ),
        timeout=TIMEOUT_S,
    )

    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead()) == (1, [])


@pytest.mark.parametrize("task", ["noted", pytest.param("holder", marks=two_at_once), "failing"])
def test_a_copy_in_the_second_store_gives_way_to_what_has_begun_in_the_first(
    stores: Stores, at: Arm, task: str
) -> None:
    """Its publisher is slow: the first store's sweeper has published the row that it does not know of."""
    stores.worker(concurrency=2)
    warm(stores)
    event = "holding" if task == "holder" else "ran"

    def cut_off() -> None:
        stores.to_clients.refuse()
        stores.record.wait_for(event, task=f"{APP}.{task}", timeout=TIMEOUT_S, count=1 + (task == "noted"))
        if task != "holder":
            wait_until(lambda: not stores.kept(stores.first), timeout=TIMEOUT_S)
        lost()

    at("durable-keep:after-commit", cut_off)
    result = stores.call(task)
    wait_until(lambda: not stores.kept(stores.second), timeout=TIMEOUT_S, message="the second copy to give way")
    stores.go(result)

    stores.wait_quiet()
    assert len(stores.ran(result)) == 1
    assert [entry.task_id for entry in stores.dead()] == ([result.id] if task == "failing" else [])
    assert stores.of(stores.second, "SELECT 1 FROM dead") == []


def test_a_copy_that_expired_in_the_first_store_is_not_reported(stores: Stores, at: Arm) -> None:
    """Nor to who asks for a result that was forgotten meanwhile."""
    stores.worker()
    warm(stores)
    at("durable-keep:after-commit", lambda: (stores.away(), lost()))
    result = stores.call("noted", 1, expires=600)
    assert result.get(timeout=TIMEOUT_S) == 1
    result.forget()
    stores.of(stores.first, "UPDATE messages SET expires_at = now()")

    stores.back()

    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead(), result.state) == (1, [], "PENDING")


def test_a_task_id_that_is_used_again_is_no_copy(stores: Stores, at: Arm) -> None:
    """The second store remembers the first call of that id; the next one is published by the sweeper, and runs."""
    stores.worker()
    warm(stores)
    at("durable-keep:after-commit", lambda: (stores.away(), lost()))
    assert stores.call("noted", 1, task_id="daily").get(timeout=TIMEOUT_S) == 1
    stores.back()
    stores.wait_quiet()
    stores.app.sidejob.runtime.store.answered()

    at(
        "durable-keep:after-commit",
        lambda: setattr(stores.app.sidejob.runtime.publisher._connection, "_paused_until", 1e18),
    )
    stores.call("noted", 2, task_id="daily")

    stores.wait_quiet()
    assert [line["value"] for line in stores.record.of("ran", id="daily")] == [1, 2]
    assert stores.dead() == []


def test_a_row_that_may_be_of_this_very_call_makes_a_copy_that_is_noted(stores: Stores, at: Arm) -> None:
    """The answer is lost, a second try finds the row, and the store is gone before it says whose that is."""
    stores.worker()
    warm(stores)
    at("durable-keep:after-commit", lambda: (at("read:before-commit", lambda: (stores.away(), lost())), lost()))
    result = stores.call("noted", 1)
    assert (stores.kept(stores.first), result.get(timeout=TIMEOUT_S)) == ([result.id], 1)

    stores.back()

    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead()) == (1, [])


def warm(stores: Stores) -> None:
    """Have the client and the workers know both stores."""
    assert stores.call("noted", 0).get(timeout=TIMEOUT_S) == 0
    stores.wait_quiet()


# -- revocations -----------------------------------------------------------------------------------------------------


def test_what_waits_in_the_second_store_and_was_revoked_does_not_run_after_a_restart(stores: Stores) -> None:
    worker = stores.worker()
    warm(stores)
    stores.to_clients.refuse()
    running, waiting, later = stores.call("holder"), stores.call("noted", 1), stores.call("noted", 2, countdown=3600)
    stores.holding(running)
    stores.to_clients.pass_through()
    assert stores.kept(stores.second) == sorted([running.id, waiting.id, later.id])

    worker.kill_group()  # and with it its memory
    waiting.revoke()
    stores.app.control.revoke([later.id])
    stores.worker()

    stores.wait_quiet()
    assert stores.of(stores.first, "SELECT 1 FROM dead") == []
    assert {(entry.task_id, entry.reason) for entry in stores.dead()} == {
        (waiting.id, "revoked"), (later.id, "revoked"), (running.id, "lost"),
    }  # fmt: skip
    assert [waiting.state, later.state] == ["REVOKED"] * 2
    assert [stores.ran(waiting), stores.ran(later)] == [[], []]


def test_two_copies_that_are_revoked_are_told_of_once(stores: Stores, at: Arm) -> None:
    worker = stores.worker()
    warm(stores)
    worker.kill_group()
    at("durable-keep:after-commit", lambda: (stores.away(), lost()))
    result = stores.call("noted", 1)
    stores.back()
    assert [stores.kept(stores.first), stores.kept(stores.second)] == [[result.id]] * 2

    result.revoke()
    stores.worker()

    stores.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in stores.dead()] == [(result.id, "revoked")]
    stores.record.wait_for("revoked", timeout=TIMEOUT_S, id=result.id)  # told after the row has gone
    assert (stores.ran(result), len(stores.record.of("revoked", id=result.id)), result.state) == ([], 1, "REVOKED")


# -- a lock that comes too late ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lock_that_the_store_applies_too_late_is_no_lost_run(stores: Stores) -> None:
    """Of a task that may not be repeated: the store is silent, the worker goes on, then the store does what it had."""
    worker = stores.worker()
    warm(stores)
    stores.to_workers.black_hole()
    result = stores.call("noted", 1)
    wait_until(lambda: f"Task {result.id} is left" in worker.log(), timeout=TIMEOUT_S)
    assert stores.of(stores.first, "SELECT locked_by FROM messages") == [(None,)]

    stores.to_workers.pass_through()
    wait_until(
        lambda: stores.of(stores.first, "SELECT 1 FROM messages WHERE locked_by IS NOT NULL") or stores.ran(result),
        timeout=TIMEOUT_S,
    )

    assert result.get(timeout=TIMEOUT_S) == 1
    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead(), worker.alive) == (1, [], True)


# -- what is not known, and what is not there ------------------------------------------------------------------------


def test_a_message_that_does_not_name_its_store_is_looked_for_in_all(stores: Stores) -> None:
    """Of a client that knows the second store only."""
    stores.worker()
    client = Site.client(stores, sidejob_database_url=stores.second)
    result = client.send_task(f"{APP}.noted", (5,))

    assert result.get(timeout=TIMEOUT_S) == 5
    stores.wait_quiet()
    assert (len(stores.ran(result)), stores.dead()) == (1, [])


@pytest.mark.parametrize("how", ["error", "publish"])
def test_all_stores_are_down(stores: Stores, second_url: str, how: str) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    stores._failover = {"sidejob_failover_urls": [nowhere], "sidejob_on_store_down": how}
    client = stores.client()
    stores.to_clients.refuse()
    if how == "error":
        for found in ("Cannot connect", "none is asked just now"):
            with pytest.raises(StoreUnavailableError, match=found):
                client.send_task(f"{APP}.noted", (1,))
        assert stores.queued() == 0
        return
    result = client.send_task(f"{APP}.noted", (1,))
    stores.worker()
    assert result.get(timeout=TIMEOUT_S) == 1
    stores.wait_quiet()
    assert len(stores.ran(result)) == 1


@pytest.mark.brokers("redis", only=["redis", "sidejob"], reason="loses its marker with its queues")
def test_an_emptied_broker_is_noticed_for_both_stores(stores: Stores) -> None:
    stores.worker(env={"SIDEJOB_LOST_AFTER": "600"})
    warm(stores)
    stores.to_clients.refuse()
    stores.processes.started[0].stop_signal()
    second = [stores.call("noted", number) for number in range(3)]
    stores.to_clients.pass_through()
    stores.app.sidejob.runtime.store.answered()
    first = [stores.call("noted", number) for number in range(3)]
    assert (len(stores.kept(stores.first)), len(stores.kept(stores.second))) == (3, 3)

    stores.empty_broker()
    stores.processes.started[0].cont()

    stores.wait_quiet()
    assert [len(stores.ran(result)) for result in first + second] == [1] * 6
