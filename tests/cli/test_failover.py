"""Commands with two stores: what is in either is shown and can be decided about, and each is migrated and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from celery_sidejob import JobNotFoundError, StoreUnavailableError, deadset
from celery_sidejob.operations import stores
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store import dead, meta, registry, workers
from tests.tools.apps import make_app
from tests.tools.commands import Said, ask
from tests.tools.databases import SCHEMA, Databases
from tests.tools.proxy import TcpProxy

Command = Callable[..., Said]
DIED = """
    INSERT INTO dead (task_id, task, queue, reason, error, payload, body)
    SELECT %s || n, 'mail', 'q', 'lost', 'WorkerLostError: gone', json_build_object(
      'publication', '{"v": 2, "about": "{}"}', 'generation', 1), 'x' FROM generate_series(1, 2) n"""


HELD = """
    INSERT INTO messages (task_id, task, queue, publication, body, generation, check_interval, next_check_at,
      published_at, locked_by, locked_at, locked_pid, on_lost, max_losses)
    VALUES (gen_random_uuid(), 'mail', 'q', '{}', 'x', 1, '1 s', 'infinity', now(), 99, now(), 1, 'requeue', 3)"""
"""By a worker that is no more."""

WAITS = """
    INSERT INTO messages (task_id, task, queue, publication, body, generation, check_interval)
    VALUES (%s, 'mail', 'q', '{}', 'x', 1, '1 s')"""


class Pair:
    """An app with two stores, the second behind a proxy."""

    def __init__(self, first: str, second: str, proxy: TcpProxy) -> None:
        self.urls = (first, second)
        self.proxy = proxy
        self.app = self.app_of(first, proxy.url_for(second))
        self.sidejob = self.app.sidejob

    def app_of(self, first: str, second: str) -> Any:
        """An app with two stores."""
        app = make_app("pair", sidejob_database_url=first, sidejob_failover_urls=[second], sidejob_lost_after=0.05)
        return app

    def sql(self, place: int, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in one of the stores."""
        with psycopg.connect(self.urls[place], autocommit=True, options=f"-c search_path={SCHEMA}") as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def pair(databases: Databases) -> Iterator[Pair]:
    """Two empty databases."""
    with databases.fresh() as first, databases.fresh() as second:
        with TcpProxy.to(databases.url_of(second)) as proxy:
            made = Pair(databases.url_of(first), databases.url_of(second), proxy)
            yield made
            made.sidejob.close()


@pytest.fixture
def command(pair: Pair) -> Command:
    """Gives a command to the pair's app; the code it ends with must be `code`."""

    def command(*words: object, code: int = 0) -> Said:
        said = ask(pair.app, *words)
        assert said.code == code, said
        return said

    return command


def test_both_schemas_are_made_and_checked(pair: Pair, command: Command) -> None:
    assert len(command("db", "upgrade").lines) == 2
    assert command("db", "current", "--json").document == {
        "schema": SCHEMA, "revision": meta.REVISION, "head": meta.REVISION, "failover": [meta.REVISION],
    }  # fmt: skip
    assert "of store 1 of sidejob_failover_urls fits." in " ".join(command("db", "check").lines)

    pair.sql(1, "DROP TABLE alembic_version")
    said = command("db", "check", code=4)
    assert "Store 1 of sidejob_failover_urls" in said.err
    assert "is missing, or it has no tables of ours" in said.err
    pair.proxy.refuse()
    assert "sidejob_failover_urls right?" in command("db", "check", code=3).err
    for word in ("upgrade", "current", "reassign"):
        assert "sidejob_failover_urls right?" in command("db", word, code=1).err


def test_the_dead_set_is_that_of_both(pair: Pair, command: Command) -> None:
    command("db", "upgrade")
    for place in (0, 1):
        pair.sql(place, DIED, f"of {place}: ")
    dead = pair.sidejob.dead
    name = pair.sql(1, "SELECT left(value, 8) FROM meta WHERE key = 'identity'")[0][0]
    ids = [1, 2, f"{name}:1", f"{name}:2"]

    assert (len(dead), [entry.id for entry in dead], dead.groups()) == (4, ids, {"WorkerLostError": 4})
    assert [entry.store for entry in dead] == [None, None, name, name]
    assert [[entry.id for entry in dead.list(limit=limit)] for limit in (1, 3, 9)] == [ids[:1], ids[:3], ids]
    assert [[entry.id for entry in dead.list(after=after)] for after in ids] == [ids[1:], ids[2:], ids[3:], []]
    assert [dead.get(one).task_id for one in ids] == ["of 0: 1", "of 0: 2", "of 1: 1", "of 1: 2"]
    shown = command("dead", "list", "--json").document
    assert [entry["id"] for entry in shown] == ids
    assert command("dead", "show", f"{name}:2", "--json").document["task_id"] == "of 1: 2"

    command("dead", "retry", f"{name}:2")
    assert pair.sql(1, "SELECT task_id, generation FROM messages") == [("of 1: 2", 2)]
    command("dead", "delete", f"{name}:1", "--yes")
    assert [entry.id for entry in dead] == [1, 2]
    with pytest.raises(JobNotFoundError, match=f"no entry {name}:2"):
        dead.get(f"{name}:2")
    pair.sql(1, DIED, "again ")
    assert command("dead", "purge", "--keep", 1, "--yes").lines == ["2 entries purged."]
    assert [(entry.task_id) for entry in dead] == ["of 0: 2", "again 2"]
    assert (dead.retry_all(), len(dead)) == (2, 0)
    assert "no entry of the task id 'x:y'" in command("dead", "show", "x:y", code=1).err
    assert "a store's name:number" in command("dead", "show", ":1", code=2).err


def test_a_store_that_is_away_is_said_to_be(pair: Pair, command: Command, caplog: pytest.LogCaptureFixture) -> None:
    command("db", "upgrade")
    for place in (0, 1):
        pair.sql(place, DIED, f"of {place}: ")
    found = pair.sidejob.stats()
    assert (found["dead"]["entries"], [one["answers"] for one in found["stores"]]) == (4, [True])
    assert "mail (WorkerLostError)" in " ".join(command("doctor", code=1).lines)

    pair.proxy.refuse()
    pair.sidejob.close()

    assert len(pair.sidejob.dead) == 2
    assert "The dead set of this store is passed over" in caplog.text
    found = command("stats", "--json").document
    assert (found["dead"]["entries"], [one["answers"] for one in found["stores"]]) == (2, [False])
    assert 'sidejob_failover_stores{state="away"} 1.0' in command("stats", "--prometheus").lines
    findings = command("doctor", "--json", code=2).document["findings"]
    assert [one["check"] for one in findings if one["level"] == "error"] == ["store 1"]
    assert "Cannot connect" in command("drain", "--timeout", 0, code=1).err


def test_a_store_that_goes_away_while_its_entries_are_read_is_passed_over(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sidejob.upgrade_schema()
    for place in (0, 1):
        pair.sql(place, DIED, f"of {place}: ")
    monkeypatch.setattr(deadset, "PAGE", 1)
    entries = iter(pair.sidejob.dead)
    assert [next(entries).task_id for _ in range(3)] == ["of 0: 1", "of 0: 2", "of 1: 1"]

    pair.proxy.refuse()
    pair.sidejob.close()

    assert list(entries) == []
    assert "passed over. Store 1 of sidejob_failover_urls: " in caplog.text
    other_way_round = pair.app_of(pair.proxy.url_for(pair.urls[1]), pair.urls[0])
    pair.proxy.pass_through()
    entries = iter(other_way_round.sidejob.dead)
    assert next(entries).task_id == "of 1: 1"
    pair.proxy.refuse()
    other_way_round.sidejob.close()
    assert [entry.task_id for entry in entries] == ["of 0: 1", "of 0: 2"]
    other_way_round.sidejob.close()


def test_what_had_left_the_dead_set_when_a_store_fell_silent_counts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sidejob.upgrade_schema()
    for place in (0, 1):
        pair.sql(place, DIED, f"of {place}: ")
    monkeypatch.setattr(deadset, "PAGE", 1)
    monkeypatch.setattr(stores, "WAIT_S", 0.5)

    with psycopg.connect(pair.urls[1], options=f"-c search_path={SCHEMA}") as holder:
        holder.execute("SELECT 1 FROM dead WHERE id = 2 FOR UPDATE")

        assert pair.sidejob.dead.retry_all() == 3
        assert [entry.task_id for entry in pair.sidejob.dead.list()] == ["of 1: 2"]


@pytest.mark.parametrize("connected", [True, False])
def test_a_store_that_is_silent_is_not_waited_for_without_end(
    pair: Pair, command: Command, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    command("db", "upgrade")
    for place in (0, 1):
        pair.sql(place, DIED, f"of {place}: ")
    name = pair.sidejob.stats()["stores"][0]["name"]
    monkeypatch.setattr(stores, "WAIT_S", 0.5)

    def silently(ask: Callable[[], Any]) -> Any:
        """The answer of something that is asked when the second store says nothing any more."""
        pair.proxy.pass_through()
        if connected:
            pair.sidejob.runtime.stores[1].connections.read(dead.count)
        else:
            pair.sidejob.runtime.stores[1].connections.close()
        pair.proxy.black_hole()
        return ask()

    found = silently(pair.sidejob.stats)
    assert (found["dead"]["entries"], [one["answers"] for one in found["stores"]]) == (2, [False])
    assert silently(lambda: [entry.id for entry in pair.sidejob.dead]) == [1, 2]
    assert "passed over. Store 1 of sidejob_failover_urls: " in caplog.text
    with pytest.raises(StoreUnavailableError):
        silently(lambda: pair.sidejob.dead.retry(f"{name}:1"))
    findings = silently(lambda: command("doctor", "--json", code=2)).document["findings"]
    assert [one["check"] for one in findings if one["level"] == "error"] == ["store 1"]
    assert silently(lambda: command("drain", "--timeout", 0, code=1)).err
    assert silently(pair.sidejob.dead.retry_all) == 2


def test_a_first_store_that_is_silent_is_not_waited_for_without_end(
    pair: Pair, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("db", "upgrade")
    pair.sql(0, DIED, "of 0: ")
    monkeypatch.setattr(stores, "WAIT_S", 0.5)
    monkeypatch.setattr(stores, "LONGEST_WAIT_S", 0.5)
    other_way_round = pair.app_of(pair.proxy.url_for(pair.urls[1]), pair.urls[0])
    other_way_round.sidejob.stats()

    pair.proxy.black_hole()

    with pytest.raises(StoreUnavailableError):
        other_way_round.sidejob.stats()
    assert [entry.task_id for entry in other_way_round.sidejob.dead] == ["of 0: 1", "of 0: 2"]
    assert "sidejob_up 0.0" in ask(other_way_round, "stats", "--prometheus").lines
    findings = ask(other_way_round, "doctor", "--json").document["findings"]
    assert "store" in [one["check"] for one in findings if one["level"] == "error"]
    other_way_round.sidejob.close()


@pytest.mark.parametrize("place", [0, 1])
def test_tasks_and_queues_that_nobody_serves_are_found_in_each_store(pair: Pair, command: Command, place: int) -> None:
    command("db", "upgrade")
    pair.sql(place, WAITS, "one")
    pair.sql(place, "UPDATE messages SET due_at = now() - interval '2 min'")
    first = pair.sidejob.runtime.connections

    def found() -> dict[str, str]:
        findings = command("doctor", "--json", code=2).document["findings"]
        return {one["check"]: one["found"] for one in findings if one["level"] == "error"}

    of_store = f"store {place}: " if place else ""
    assert found()[f"{of_store}queues"] == "nobody serves q (1 due)"
    worker_id = workers.register(first, "somebody")
    registry.note_served(
        first, worker_id, queues=["q"], tasks=["letters"]
    )  # as a worker of all stores does: in the first one
    assert found()[f"{of_store}tasks"] == "no live worker of its queue knows mail in q (1 due)"
    registry.note_served(first, worker_id, queues=["q"], tasks=["letters", "mail"])
    assert not {f"{of_store}queues", f"{of_store}tasks"} & found().keys()


def test_a_task_is_shown_and_revoked_in_whichever_store_it_is(pair: Pair, command: Command) -> None:
    command("db", "upgrade")
    name = pair.sql(1, "SELECT left(value, 8) FROM meta WHERE key = 'identity'")[0][0]
    for place, task_id in enumerate(("one", "two")):
        pair.sql(place, WAITS, task_id)

    shown = [command("show", task_id, "--json").document for task_id in ("one", "two")]
    assert [(task["task_id"], task["store"], task["status"]) for task in shown] == [
        ("one", None, "queued"), ("two", name, "queued"),
    ]  # fmt: skip
    assert f"store {name}" in command("show", "two").lines

    assert command("revoke", "two", "one").lines == ["one does not run.", "two does not run."]
    assert [pair.sql(place, "SELECT task_id, doom FROM messages") for place in (0, 1)] == [
        [("one", "revoked")], [("two", "revoked")],
    ]  # fmt: skip


def test_who_revokes_learns_that_a_store_which_may_have_the_task_did_not_answer(pair: Pair, command: Command) -> None:
    command("db", "upgrade")
    for place in (0, 1):
        for which in ("one", "another"):
            pair.sql(place, WAITS, f"{which} of {place}")
    pair.proxy.refuse()
    pair.sidejob.close()

    pair.app.control.revoke("one of 0")  # nothing else can be of this id but a copy of it, which would give way
    with pytest.raises(StoreUnavailableError, match="The revocation was not kept"):
        pair.app.control.revoke(["another of 0", "one of 1"])
    assert pair.sql(0, "SELECT DISTINCT doom FROM messages") == [("revoked",)], "the others are kept all the same"
    assert "was not kept" in command("revoke", "one of 1", code=1).err
    assert "Cannot connect" in command("show", "one of 1", code=1).err
    assert command("show", "one of 0", "--json").document["status"] == "revoked"

    pair.proxy.pass_through()
    assert command("revoke", "one of 1").lines == ["one of 1 does not run."]
    assert sorted(pair.sql(1, "SELECT task_id FROM messages WHERE doom = 'revoked'")) == [("one of 1",)]


def test_a_copy_in_a_store_that_was_away_when_its_task_was_revoked_is_revoked_before_it_counts(
    pair: Pair, command: Command
) -> None:
    command("db", "upgrade")
    pair.app.conf.sidejob_durable_tasks = ["mail"]
    pair.app.send_task("mail", task_id="one")
    ((task, queue, publication, body),) = pair.sql(0, "SELECT task, queue, publication, body FROM messages")
    name = pair.sql(0, "SELECT left(value, 8) FROM meta WHERE key = 'identity'")[0][0]
    copy = "INSERT INTO messages (task_id, task, queue, publication, body, generation, check_interval) VALUES"
    pair.sql(1, f"{copy} ('one', %s, %s, %s, %s, 1, '1 s')", task, queue, publication, body)
    pair.sql(
        1,
        "INSERT INTO duplicates"
        " SELECT task_id, publication::json->>'call', ARRAY[%s], now() + interval '1 h' FROM messages",
        name,
    )
    pair.proxy.refuse()
    pair.sidejob.close()
    stores = pair.sidejob.runtime.stores

    pair.app.control.revoke("one")

    pair.sidejob.poll()
    assert pair.sql(0, "SELECT task_id, doom FROM messages") == [("one", "revoked")], "the other one may count"
    pair.proxy.pass_through()
    stores[1].answered()
    pair.sql(0, "UPDATE messages SET next_check_at = now()")
    pair.sidejob.poll()
    assert [pair.sql(place, "SELECT doom FROM messages WHERE doom IS NULL") for place in (0, 1)] == [[], []]
    pair.sidejob.poll()
    assert [(entry.task_id, entry.reason) for entry in pair.sidejob.dead] == [("one", "revoked")]
    assert [pair.sql(place, "SELECT 1 FROM messages") for place in (0, 1)] == [[], []]


def test_what_is_in_the_second_store_is_to_be_finished_too(pair: Pair, command: Command) -> None:
    command("db", "upgrade")
    pair.sql(1, WAITS, "one")
    assert command("drain", "--timeout", 0, "--json", code=1).document["queues"] == {"q": {"queued": 1, "running": 0}}
    assert pair.sidejob.stats()["queues"]["q"]["depth"] == 1


def test_a_sweep_is_of_all_stores_that_answer(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.sidejob.upgrade_schema()
    for place in (0, 1):
        pair.sql(place, HELD)
    assert pair.sidejob.poll().tasks_taken == 2

    pair.sql(0, HELD)
    pair.proxy.refuse()
    pair.sidejob.close()
    assert pair.sidejob.poll().tasks_taken == 1
    assert "Store 1 of sidejob_failover_urls cannot be swept" in caplog.text

    pair.sql(0, HELD)
    other_way_round = pair.app_of(pair.proxy.url_for(pair.urls[1]), pair.urls[0]).sidejob
    with pytest.raises(StoreUnavailableError):
        other_way_round.poll()
    assert pair.sql(0, "SELECT 1 FROM messages WHERE locked_by IS NOT NULL") == [], "it was swept all the same"
    other_way_round.close()


def test_notes_on_copies_are_kept_for_their_time(pair: Pair) -> None:
    pair.sidejob.upgrade_schema()
    pair.sql(
        1,
        "INSERT INTO duplicates (task_id, call, tried, kept_until) SELECT n, 'c', '{}', now() + n * interval '1 hour'"
        " FROM generate_series(-2, 2) n",
    )
    Prune(Sweep(pair.sidejob.runtime.in_each_store()[1])).run_once()
    assert pair.sql(1, "SELECT task_id FROM duplicates ORDER BY kept_until") == [("1",), ("2",)]
