"""The transport behind `sidejob-sentinel://`: sentinels name the master server, also after a failover.

The URLs lead to sentinels; the transport option `master_name` names the master that is the broker.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis
from kombu.utils.url import url_to_parts
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from .broker_channel import Channel as BrokerChannel
from .transport import Transport

SCHEME = "sidejob-sentinel"


class Pool(SentinelConnectionPool):
    """Connections to the current master; connections to its sentinels are closed with them."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Adds to redis-py's: closes the sentinels' connections too (a new master disconnects only idle ones)."""
        super().disconnect(inuse_connections)
        if inuse_connections:
            for client in self.sentinel_manager.sentinels:
                client.close()


class SentinelChannel(BrokerChannel, redis.SentinelChannel):
    """A channel that fetches reliably from the current master."""

    from_transport_options = (*redis.SentinelChannel.from_transport_options, *BrokerChannel.from_transport_options)
    master_name: str | None = None
    min_other_sentinels = 0
    sentinel_kwargs: dict[str, Any] | None = None

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Pool:
        """Replaces kombu's, which finds sentinels only in URLs of its own scheme."""
        if self.master_name is None:
            raise ValueError(
                f'{SCHEME}:// needs the name of the master: broker_transport_options = {{"master_name": "..."}}'
            )
        parameters = self._connparams(asynchronous)
        host, port = parameters.pop("host"), parameters.pop("port")
        urls = [url_to_parts(url) for url in self.connection.client.alt if url.startswith(f"{SCHEME}:")]
        sentinels = [(url.hostname, url.port or port) for url in urls] or [(host, port)]
        # If a sentinel is unreachable or silent, the next is asked at once, so that the heart beats in time.
        asked_for_s = self.consumer_timeout / 2
        asked = {name: value for name, value in parameters.items() if name.startswith("socket_") and value is not None}
        asked = {"socket_timeout": asked_for_s, "socket_connect_timeout": asked_for_s, **asked}
        kind: Any = Sentinel  # redis-py's, which has no types
        manager = kind(
            sentinels,
            min_other_sentinels=self.min_other_sentinels,
            sentinel_kwargs={**asked, "retry": Retry(NoBackoff(), 0), **(self.sentinel_kwargs or {})},
            **parameters,
        )
        pool: Pool = manager.master_for(self.master_name, Redis, Pool).connection_pool
        return pool


class SentinelTransport(Transport):
    """The same transport, with URLs of sentinels."""

    Channel = SentinelChannel
    default_port = redis.SentinelTransport.default_port
