"""Of two copies of a message in two stores one counts: what is noted of it, and how long that may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_sidejob import StoreUnavailableError
from celery_sidejob.model.durable import Address
from celery_sidejob.operations import deduplication
from tests.tools.apps import make_app
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy

NOWHERE = "postgresql://127.0.0.1:1/nowhere"
LEASE_S = 2.0


@pytest.fixture
def proxy(stage: Stage) -> Iterator[TcpProxy]:
    """What stands between the app and its first store."""
    with TcpProxy.to(stage.database_url) as made:
        yield made


@pytest.fixture
def sidejob(stage: Stage, proxy: TcpProxy) -> Iterator[Any]:
    """An app whose second store is away."""
    app = make_app(
        "copies",
        sidejob_database_url=proxy.url_for(stage.database_url),
        sidejob_failover_urls=[NOWHERE],
        sidejob_lease=LEASE_S,
        sidejob_heartbeat_interval=0.5,
    )
    made = app.sidejob
    yield made
    made.close()


def noted(stage: Stage) -> list[tuple[str, str]]:
    """Of which copies it is noted that they are those that count."""
    found = stage.sql("DELETE FROM duplicates RETURNING task_id, call")
    return [(task_id, call) for task_id, call in found]


@pytest.mark.parametrize(
    ("away", "address", "expected"),
    [
        (True, Address(call="call", unconfirmed=True), [("task", "call")]),
        (True, Address(call="call"), []),
        (True, Address(unconfirmed=True), []),
        (False, Address(call="call", unconfirmed=True), []),
    ],
)
def test_a_copy_that_nobody_confirmed_is_noted_while_another_store_is_left_alone(
    stage: Stage, sidejob: Any, away: bool, address: Address, expected: list[tuple[str, str]]
) -> None:
    runtime = sidejob.runtime
    if away:
        runtime.stores.failed(runtime.stores[1], StoreUnavailableError("gone"))
    assert not runtime.store.is_left_alone

    deduplication.note(runtime, ("task", 1), address)
    assert noted(stage) == expected


def test_a_store_that_falls_silent_holds_up_what_is_noted_for_a_lease(
    stage: Stage, sidejob: Any, proxy: TcpProxy
) -> None:
    runtime = sidejob.runtime
    runtime.stores.failed(runtime.stores[1], StoreUnavailableError("gone"))
    deduplication.note(runtime, ("task", 1), Address(call="call", unconfirmed=True))
    assert noted(stage) == [("task", "call")]

    proxy.black_hole()
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        deduplication.note(runtime, ("task", 2), Address(call="call", unconfirmed=True))
    assert LEASE_S <= time.monotonic() - began < LEASE_S + 2.0
