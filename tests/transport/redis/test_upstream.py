"""What of kombu is replaced, by the hash of its source: when kombu changes one of these, ours must be read again."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from kombu.transport import redis as stock

from celery_sidejob.transport.redis.acknowledgements import QoS
from celery_sidejob.transport.redis.broker_channel import Channel
from celery_sidejob.transport.redis.transport import SentinelChannel, Transport

PAIRS = (
    (Channel, stock.Channel), (QoS, stock.QoS), (Transport, stock.Transport), (SentinelChannel, stock.SentinelChannel),
)  # fmt: skip
READ = {
    "Channel.__init__": "f189bdebe2436ccd",
    "Channel._brpop_read": "c42518699709f2df",
    "Channel._brpop_start": "06723d707ddf2240",
    "Channel._connparams": "e9a4295085a8fb90",
    "Channel._create_client": "dae92bc4075dafb9",
    "Channel._put": "1c0cf9749576614c",
    "Channel._queue_bind": "29b73e023af67e47",
    "Channel._receive": "b215b6226f2f285c",
    "Channel.basic_consume": "34e0da85e689ff98",
    "Channel.basic_get": "ba4884c15b6bed6d",
    "Channel.close": "101e9b9cdad44b88",
    "Channel.get_table": "a4ba78a2265370f2",
    "QoS.ack": "1bc15a4ddf541af6",
    "QoS.append": "35c655f6ecc62fe6",
    "QoS.can_consume": "787f80092f8d7e51",
    "QoS.reject": "747a02434344d1a6",
    "QoS.restore_unacked": "8954efef014d546e",
    "QoS.restore_visible": "d4a4a40a3eaf9f23",
    "SentinelChannel._sentinel_managed_pool": "bde54a2d6e93ac13",
    "Transport.__init__": "4fc30e8fa54df374",
    "Transport.establish_connection": "b9aeb4ed88b4f817",
    "Transport.register_with_event_loop": "4b835642e4a99425",
}
"""Each method, with the hash of the source that was read when it was replaced or added to (kombu 5.7.0)."""


def replaced() -> dict[str, Any]:
    """Every function of kombu's that one of our classes has under the same name, also from kombu's own base classes."""
    return {
        f"{theirs.__name__}.{name}": getattr(theirs, name)
        for mine, theirs in PAIRS
        for name, member in vars(mine).items()
        if inspect.isfunction(member) and hasattr(theirs, name)
    }


def digest(function: Any) -> str:
    """A hash of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def test_what_is_replaced_is_what_was_read() -> None:
    assert {name: digest(function) for name, function in replaced().items()} == READ


def test_each_replacement_says_what_it_replaces() -> None:
    for mine, theirs in PAIRS:
        for name, member in vars(mine).items():
            if inspect.isfunction(member) and hasattr(theirs, name):
                assert (member.__doc__ or "").startswith(("Replaces ", "Adds to kombu's")), f"{mine.__name__}.{name}"
