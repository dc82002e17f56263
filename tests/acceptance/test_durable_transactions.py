"""Durable tasks that are called in the caller's own transaction, of each kind that may be lent to us."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group, signals

from celery_sidejob import InvalidValueError
from tests.acceptance.borrowing_shop import Rolled, Shop
from tests.acceptance.lenders import LENDERS, django_database
from tests.tools.waiting import wait_until

TIMEOUT_S = 10.0


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    """A client with a store and a broker of its own."""
    made = Shop(database_url, redis_url)
    yield made
    made.close()


def durable(shop: Shop) -> Any:
    """A durable task of a shop."""

    @shop.app.task(name="shop.mail", durable=True, shared=False)
    def mail(to: str) -> None:
        pass

    shop.app.finalize()
    return shop.app.tasks["shop.mail"]


@pytest.mark.parametrize("name", LENDERS)
def test_a_task_shares_the_fate_of_its_transaction(shop: Shop, name: str) -> None:
    mail = durable(shop)
    with LENDERS[name](shop.url) as lender:
        mail.apply_async(("gone",), transaction=lender.transaction)
        lender.sql("INSERT INTO orders VALUES (1)")
        lender.rollback()
        assert (shop.count("messages"), shop.orders()) == (0, [])

        with suppress(Rolled), lender.savepoint():
            mail.apply_async(("inner",), task_id="inner", transaction=lender.transaction)
            raise Rolled
        result = mail.apply_async(("kept",), transaction=lender.transaction)
        lender.sql("INSERT INTO orders VALUES (2)")
        assert (shop.count("messages"), shop.rung()) == (0, 0)
        lender.commit()

        assert shop.outside.execute("SELECT task_id FROM sidejob.messages").fetchall() == [(result.id,)]
        assert shop.orders() == [2]
        if lender.tells_of_commits:
            wait_until(lambda: shop.rung() == 1, timeout=TIMEOUT_S, message="the message to be published")
        else:
            shop.outside.execute("UPDATE sidejob.messages SET next_check_at = now()")
            shop.sidejob.poll()
        assert shop.rung() == 1


CHORDS = {
    "chord": lambda task: chord([task.s("a"), task.s("b")], task.si("body")),
    "list of a generator": lambda task: chord((task.s(to) for to in "ab"), task.si("body")),
    "group and more": lambda task: group(task.s("a"), task.s("b")) | task.si("body"),
    "chain of a chord": lambda task: chain(
        chord([task.s("a"), task.s("b")], task.si("body")),
        task.si("rest"),
        app=task.app,  # which Celery 5.5 does not find in a chord
    ),
    "chord of a chord": lambda task: chord([chord([task.s("a")], task.si("inner")), task.s("b")], task.si("body")),
}


def parts_in(shop: Shop, count: int) -> list[str]:
    """Of what chord bodies the parts are that wait in the broker, once there are so many; else nothing."""
    embedded = [
        json.loads(base64.b64decode(json.loads(text)["body"]))[2] for text in shop.broker.lrange("celery", 0, -1)
    ]
    bodies = [one["chord"]["options"]["task_id"] for one in embedded if one["chord"]]
    return bodies if len(bodies) == count else []


@pytest.mark.few(12)
@pytest.mark.parametrize("name", LENDERS)
@pytest.mark.parametrize("form", CHORDS)
def test_a_chord_shares_the_fate_of_its_transaction(shop: Shop, name: str, form: str) -> None:
    mail = durable(shop)
    with LENDERS[name](shop.url) as lender:
        CHORDS[form](mail).apply_async(transaction=lender.transaction)
        lender.rollback()
        assert (shop.count("messages"), shop.rung()) == (0, 0)

        result = CHORDS[form](mail).apply_async(transaction=lender.transaction)
        mail.apply_async(("after it",), task_id="after it")
        assert (shop.count("messages"), shop.rung()) == (1, 1), "which has no transaction"
        lender.commit()

        assert shop.count("messages") == 3
        if not lender.tells_of_commits:
            shop.outside.execute("UPDATE sidejob.messages SET next_check_at = now() WHERE published_at IS NULL")
            shop.sidejob.poll()
        parts = wait_until(lambda: parts_in(shop, 2), timeout=TIMEOUT_S, message="the messages to be published")
    assert (result.parent if form == "chain of a chord" else result).id in parts


def test_what_a_receiver_calls_while_a_chord_is_called_has_no_part_in_its_transaction(shop: Shop) -> None:
    mail = durable(shop)

    @shop.app.task(name="shop.audit", shared=False)
    def audit(what: str) -> None:
        pass

    def publishing(sender: Any = None, **_: Any) -> None:
        if sender == "shop.mail":
            audit.delay("mail")

    signals.before_task_publish.connect(publishing)
    try:
        with LENDERS["connection-psycopg"](shop.url) as lender:
            CHORDS["chord"](mail).apply_async(transaction=lender.transaction)
            lender.rollback()
    finally:
        signals.before_task_publish.disconnect(publishing)
    assert (shop.count("messages"), shop.rung()) == (0, 2), "an audit of each part"


def test_a_chord_whose_backend_has_it_unlocked_by_a_task_names_that_task_durable_too(
    shop: Shop, tmp_path: Path
) -> None:
    """It waits for the parts, so it must not be sent if those are rolled back."""
    shop.app.conf.result_backend = f"file://{tmp_path}"
    mail = durable(shop)
    with LENDERS["connection-psycopg"](shop.url) as lender:
        with pytest.raises(InvalidValueError, match=r"celery\.chord_unlock is not durable"):
            chord([mail.s("a")], mail.si("body")).apply_async(transaction=lender.transaction)
        lender.rollback()
    assert (shop.count("messages"), shop.rung()) == (0, 0)


def test_a_taken_task_id_leaves_the_transaction_as_it_was(shop: Shop) -> None:
    mail = durable(shop)
    mail.apply_async(("one",), task_id="one")
    with LENDERS["connection-psycopg"](shop.url) as lender:
        lender.sql("INSERT INTO orders VALUES (1)")
        with pytest.raises(ValueError, match="is taken"):
            mail.apply_async(("two",), task_id="one", transaction=lender.transaction)
        lender.commit()
    assert shop.orders() == [1]


def test_on_commit_of_celerys_task_for_django(database_url: str, redis_url: str) -> None:
    from django.db import transaction

    made = Shop(database_url, redis_url, task_cls="celery.contrib.django.task:DjangoTask")
    mail = durable(made)
    with django_database(database_url):
        with suppress(Rolled), transaction.atomic():
            mail.delay_on_commit("gone")
            raise Rolled
        with transaction.atomic():
            result = mail.apply_async_on_commit(("kept",), task_id="kept")
            assert (made.count("messages"), made.rung(), result.id) == (0, 0, "kept")
        assert (made.count("messages"), made.rung()) == (1, 1)
    made.close()


@pytest.mark.parametrize("how", ["option", "setting", "not"])
def test_the_first_call_of_a_process_is_on_commit(database_url: str, redis_url: str, how: str) -> None:
    """Its app is not finalized, and so nobody knows yet which of its tasks are durable."""
    from django.db import transaction

    made = Shop(database_url, redis_url, task_cls="celery.contrib.django.task:DjangoTask")
    made.app.conf.sidejob_durable_tasks = ["shop.*"] if how == "setting" else []
    options = {"durable": True} if how == "option" else {}

    @made.app.task(name="shop.mail", shared=False, **options)
    def mail(to: str) -> None:
        pass

    assert not made.app.finalized
    with django_database(database_url) as connection:
        with transaction.atomic():
            result = mail.delay_on_commit("kept")
            rows = connection.cursor().execute("SELECT task_id FROM sidejob.messages").fetchall()
            assert rows == ([] if how == "not" else [(result.id,)])
        assert (made.count("messages"), made.rung()) == (len(rows), 1)
    made.close()


def test_on_commit_where_djangos_database_is_not_the_store(
    database_url: str, empty_database_url: str, redis_url: str
) -> None:
    from django.db import transaction

    made = Shop(database_url, redis_url, task_cls="celery.contrib.django.task:DjangoTask")
    mail = durable(made)
    with django_database(empty_database_url):
        with transaction.atomic():
            mail.delay_on_commit("me")
            assert made.count("messages") == 0
        assert (made.count("messages"), made.rung()) == (1, 1)
    made.close()


def test_on_commit_is_for_tasks_of_django(shop: Shop) -> None:
    with pytest.raises(AttributeError, match="Django"):
        durable(shop).delay_on_commit("me")
