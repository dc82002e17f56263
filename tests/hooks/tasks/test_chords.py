"""Who has the body of a chord in hand for longer than a moment looks whether it is still its own to publish."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery
from celery.app.task import Context

from celery_sidejob import StoreUnavailableError
from celery_sidejob.hooks.tasks.results import ChordClaim
from celery_sidejob.model.durable import Message
from celery_sidejob.operations import stores
from tests.tools.apps import make_app
from tests.tools.databases import SCHEMA, Databases
from tests.tools.proxy import TcpProxy
from tests.tools.versions import CELERY_5_7

pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),  # Celery's backend with redis-py 8
    CELERY_5_7,  # before, there was no claim
]

OURS, THEIRS = "ours", "theirs"


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    made = make_app(
        "chords",
        broker=redis_url,
        result_backend=redis_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["chords.*"],
    )
    yield made
    made.sidejob.close()
    made.close()


@pytest.fixture
def claim(app: Celery) -> ChordClaim:
    """One that was not looked at for long, of a chord whose parts are counted."""
    request = Context(id="part", group="group", chord={"options": {"task_id": "body"}})
    app.backend.set_chord_size("group", 1)
    return ChordClaim(app.sidejob.runtime, app.backend, request, [], OURS, lambda: None, held_at=-math.inf)


def claimed_by(app: Celery, who: str | None) -> None:
    """Have somebody hold the claim."""
    key = app.backend.get_key_for_group("group", ".c")
    if who is None:
        app.backend.client.delete(key)
    else:
        app.backend.client.set(key, who, ex=60)


@pytest.mark.parametrize("who", [OURS, None])
def test_a_claim_that_nobody_else_has_is_held(app: Celery, claim: ChordClaim, who: str | None) -> None:
    claimed_by(app, who)
    assert claim.hold()
    assert app.backend.client.get(app.backend.get_key_for_group("group", ".c")) == OURS.encode()


def test_a_claim_is_held_though_the_backend_was_emptied(app: Celery, claim: ChordClaim) -> None:
    app.backend.client.flushdb()
    assert claim.hold()


def test_a_body_that_somebody_else_has_published_is_left_to_it(app: Celery, claim: ChordClaim) -> None:
    claimed_by(app, THEIRS)
    assert claim.hold() is None

    app.send_task("chords.body", task_id="body")
    assert claim.hold() is False


def test_a_chord_that_was_forgotten_has_its_body(app: Celery, claim: ChordClaim) -> None:
    claimed_by(app, "done")
    assert claim.hold() is False


def test_a_backend_that_is_away_says_nothing(app: Celery, claim: ChordClaim) -> None:
    claimed_by(app, THEIRS)
    app.backend.client = redis.Redis(port=1, retry=None)
    assert claim.hold() is None


# -- with several stores ---------------------------------------------------------------------------------------------


class Pair:
    """An app with two stores, the first behind a proxy, and a chord whose only part has ended well in the second."""

    def __init__(self, first: str, second: str, redis_url: str, proxy: TcpProxy) -> None:
        self.urls, self.proxy = (first, second), proxy
        self.app = make_app(
            "chords",
            broker=redis_url,
            result_backend=redis_url,
            sidejob_database_url=proxy.url_for(first),
            sidejob_failover_urls=[second],
            sidejob_durable_tasks=["chords.*"],
        )
        self.runtime = self.app.sidejob.runtime
        body = self.app.signature("chords.body", task_id="body")
        self.send(1, "chords.part", task_id="part", chord=body, group_id="group")
        self.app.backend.set_chord_size("group", 1)
        self.app.backend.store_result("part", 7, "SUCCESS")

    def send(self, place: int, *args: Any, **options: Any) -> None:
        """Call a task that one of the stores takes."""
        if place:
            self.proxy.refuse()
        self.app.send_task(*args, **options)
        self.back()

    def back(self) -> None:
        """Have the first store answer, and be asked."""
        self.proxy.pass_through()
        self.runtime.store.answered()

    def kept(self, place: int) -> list[str]:
        """The ids of the tasks that a store has."""
        with psycopg.connect(self.urls[place]) as connection:
            found = connection.execute(f"SELECT task_id FROM {SCHEMA}.messages ORDER BY 1").fetchall()
        return [task_id for (task_id,) in found]

    def doom(self) -> str:
        """Tell of the doom of the part, as the sweeper of its store does: its worker has died before its end."""
        with psycopg.connect(self.urls[1], row_factory=psycopg.rows.namedtuple_row) as connection:
            (row,) = connection.execute(f"SELECT * FROM {SCHEMA}.messages WHERE task_id = 'part'").fetchall()
        told = self.runtime.results.tell_of_doom(Message.of_row(row), "lost", "WorkerLostError: lost", place=1)
        return str(told[0])


@pytest.fixture
def pair(
    database_url: str, databases: Databases, database_template: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    monkeypatch.setattr(stores, "WAIT_S", 2.0)  # less is too little for a store that is there, on a busy machine
    with databases.fresh(template=database_template) as name, TcpProxy.to(database_url) as proxy:
        second = databases.url_of(name)
        with psycopg.connect(second, autocommit=True) as connection:
            connection.execute(f"UPDATE {SCHEMA}.meta SET value = gen_random_uuid()::text WHERE key = 'identity'")
        made = Pair(database_url, second, redis_url, proxy)
        yield made
        made.app.sidejob.close()
        made.app.close()


def of_second(pair: Pair) -> ChordClaim:
    """A claim, which somebody else has now, of a part in the second store."""
    claimed_by(pair.app, THEIRS)
    request = Context(id="part", group="group", chord={"options": {"task_id": "body"}})
    return ChordClaim(
        pair.runtime.in_each_store()[1], pair.app.backend, request, [], OURS, lambda: None, held_at=-math.inf
    )  # fmt: skip


def test_a_body_that_another_store_has_is_left_to_it(pair: Pair) -> None:
    claim = of_second(pair)
    pair.send(0, "chords.body", task_id="body")
    assert not claim.hold()


def test_a_store_that_is_silent_may_have_the_body(pair: Pair) -> None:
    claim = of_second(pair)
    pair.send(0, "chords.body", task_id="body")
    pair.proxy.black_hole()
    with pytest.raises(StoreUnavailableError):
        claim.hold()


@pytest.mark.parametrize("place", [0, 1])
def test_a_doomed_part_publishes_no_body_that_some_store_has(pair: Pair, place: int) -> None:
    """Whoever has kept it died before the backend had forgotten the chord, and its claim is over."""
    pair.send(place, "chords.body", task_id="body")
    before = [pair.kept(0), pair.kept(1)]

    assert pair.doom() == "remove"

    assert [pair.kept(0), pair.kept(1)] == before


def test_a_doomed_part_waits_for_a_store_that_is_silent(pair: Pair) -> None:
    pair.proxy.black_hole()
    assert pair.doom() == "wait"
    assert pair.kept(1) == ["part"]

    pair.back()
    assert pair.doom() == "remove"
    assert [pair.kept(0), pair.kept(1)] == [["body"], ["part"]]


def test_a_doomed_part_asks_its_own_store_first(pair: Pair) -> None:
    pair.send(1, "chords.body", task_id="body")
    pair.proxy.black_hole()
    assert pair.doom() == "remove"
