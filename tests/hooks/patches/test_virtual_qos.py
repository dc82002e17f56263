"""kombu's Redis channel asks its QoS before it fetches, and tells it of each message that is over."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from kombu.transport import virtual
from kombu.transport.redis import QoS

from celery_sidejob import embedded
from celery_sidejob.hooks.patches import connections
from celery_sidejob.hooks.worker import delivered
from celery_sidejob.hooks.worker.delivered import Delivered
from celery_sidejob.hooks.worker.fetching import Fetcher, FromRedis


def test_nothing_is_fetched_without_room_and_each_end_is_told(own_valkey: embedded.Valkey) -> None:
    for name in ("can_consume", "can_consume_max_estimate"):
        assert list(inspect.signature(getattr(QoS, name)).parameters) == ["self"]
    got: list[Any] = []
    ends: list[int] = []
    room, beyond = [0], [0]
    with Connection(own_valkey.url) as connection:
        channel = connection.default_channel
        queue = Queue("limited", channel=channel)
        for number in range(3):
            connection.Producer().publish(number, routing_key=queue.name, declare=[queue])
        connections.limit_fetching(
            channel.qos, may=lambda: bool(room[0]), room=lambda: room[0], beyond=lambda: beyond[0]
        )
        connections.tell_of_ends(channel.qos, lambda: ends.append(len(got)))
        with Consumer(channel, [queue], callbacks=[lambda _, message: got.append(message)]):
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.2)
            assert not got

            room[0] = 2
            assert channel.qos.can_consume_max_estimate() == 2
            while len(got) < 3:
                connection.drain_events(timeout=5)
            channel.qos.prefetch_count = 3
            assert (channel.qos.can_consume(), channel.qos.can_consume_max_estimate()) == (False, 0)
            beyond[0] = 1
            assert (channel.qos.can_consume(), channel.qos.can_consume_max_estimate()) == (True, 1)
            assert channel.qos.prefetch_count == 3
        got[0].ack()
        got[1].reject()
        got[2].requeue()
    assert len(ends) == 3


def test_our_redis_channel_fetches_several_again_when_fewer_wait_than_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu's fetches one message at a time: there nothing is gained, and the pool would run out of messages."""
    monkeypatch.setattr(Delivered, "concurrency", lambda: 2)
    appetite: Any = SimpleNamespace(room=4, beyond=0)
    for is_ours in (True, False):
        qos = virtual.QoS(SimpleNamespace(do_restore=False), prefetch_count=8)
        channel = SimpleNamespace(qos=qos, _in_poll=None, **({"give_back": None} if is_ours else {}))
        c = SimpleNamespace(
            app=SimpleNamespace(conf={}), task_consumer=SimpleNamespace(channel=channel), connection_errors=()
        )
        FromRedis(c, appetite)
        for reserved, may_fetch in ((0, True), (3, True), (4, not is_ours)):
            monkeypatch.setattr(delivered, "reserved_requests", range(reserved))
            assert qos.can_consume() == may_fetch
        channel._in_poll = "an answer is on its way"
        assert qos.can_consume()


def test_beyond_celerys_limit_is_what_celery_counts() -> None:
    """What was acknowledged early runs on, and counts no more; what nobody acknowledges never did."""
    qos = virtual.QoS(SimpleNamespace(do_restore=False), prefetch_count=2)
    c = SimpleNamespace(
        app=SimpleNamespace(conf={}), task_consumer=SimpleNamespace(channel=SimpleNamespace(qos=qos)),
        connection_errors=(),
    )  # fmt: skip
    appetite: Any = SimpleNamespace(room=4, beyond=4)
    fetcher = FromRedis(c, appetite)
    requests = {tag: SimpleNamespace(message=SimpleNamespace(delivery_tag=tag)) for tag in range(5)}
    for tag in range(3):
        qos._delivered[tag] = requests[tag].message
    qos._dirty.add(0)
    assert [fetcher.is_beyond_limit(requests[tag]) for tag in (1, 2, 4)] == [False, False, False]
    qos._delivered[3] = requests[3].message
    assert [fetcher.is_beyond_limit(requests[tag]) for tag in (3, 4)] == [True, False]
    assert not Fetcher().is_beyond_limit(SimpleNamespace(message=SimpleNamespace(channel=None)))
