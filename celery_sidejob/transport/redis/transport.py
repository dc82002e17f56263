"""The transports behind the URLs `sidejob://`, `sidejobs://` (with TLS) and `sidejob-sentinel://`.

URLs of the last lead to sentinels, which name the master server, also after a failover. The transport option
`master_name` names the master that is the broker.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from kombu.log import get_logger
from kombu.transport import redis
from kombu.utils.url import url_to_parts
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ...model import urls
from ...model.errors import SettingsError
from ..options import SHARED, check_options, require_kombu
from ..pulse import Pulse
from .broker_channel import Channel as BrokerChannel
from .consumer import BEATS, Heart
from .dead import DeadList
from .records import Records
from .scripts import BEAT, FETCH, GIVE_BACK, PUT

logger = get_logger(__name__)

require_kombu("sidejob")

OLDEST_REDIS = (6, 2)
"""The oldest Redis version that kombu 5.7 accepts; Valkey reports 7.2."""
SENTINEL_SCHEME = "sidejob-sentinel"
RIGHTS = (
    "It needs ~* &* +@read +@write +@connection +@pubsub +@scripting +@transaction +info +time; "
    "where there are no scripts there is redis://."
)
"""The rights that a user of the server needs, as ACL rules."""
PROBE = "_sidejob.probe"
"""A channel without subscribers, and a key that does not exist: for checking rights."""


class UnsuitableServerError(Exception):
    """The server at the broker's URL cannot support this transport's promises."""


class Transport(redis.Transport):
    """kombu's Redis transport with reliable fetch; Celery and kombu take it for a Redis broker, as it is one."""

    Channel = BrokerChannel
    # A bell is rung when a message arrives, so there is no need to check every second.
    brpop_timeout = 10
    has_loop = False
    """Whether Celery's event loop returns to the channels, so that answers can be read later."""
    _heart: Heart | None = None

    def __init__(self, client: Any, **options: Any) -> None:
        """Adds to kombu's: `broker_use_ssl=True`, which kombu ignores, means TLS."""
        split = "://" in (client.hostname or "")  # by kombu, which takes the URL apart; see _check_urls
        if not split and "@" in f"{client.virtual_host}{client.hostname}":  # a part of a password
            raise SettingsError(f"broker_url cannot be read: {urls.NOT_CLEAR}")
        client.ssl = _tls(client.ssl)
        super().__init__(client, **options)

    @cached_property
    def pulse(self) -> Pulse:
        """Whether the consuming thread makes progress."""
        return Pulse(self.client.transport_options.get("loop_timeout", BrokerChannel.loop_timeout))

    def establish_connection(self) -> Any:
        """Adds to kombu's: refuses a server that cannot keep the promises, and warns of a doubtful one."""
        _check_urls(self.client)
        check_options(self.client.transport_options, SHARED)
        try:
            connection = super().establish_connection()
        except NoPermissionError as error:
            raise UnsuitableServerError(
                f"{self.client.as_uri()} does not give its user enough rights ({error}). {RIGHTS}"
            ) from error
        channel = connection._avail_channels[-1]
        try:
            self._check(channel._client_of_scripts, f"{channel.global_keyprefix}{channel.keyprefix_fanout}{PROBE}")
            with suppress(NoPermissionError):  # breaks if the server accepts no writes; a full server is no reason
                channel._client_of_scripts.delete(f"{channel.global_keyprefix}{PROBE}")
        except (UnsuitableServerError, RedisConnectionError):
            self.close_connection(connection)
            raise
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Adds to kombu's: answers to acknowledgements are read later, and the loop must come round."""
        super().register_with_event_loop(connection, loop)
        self.has_loop = True
        self.pulse.tick()
        options = connection.client.transport_options
        timeouts = [options.get(name) for name in ("consumer_timeout", "loop_timeout")]
        loop.call_repeatedly(min([1.0, *(timeout / BEATS for timeout in timeouts if timeout)]), self._come_round)

    def heart_for(self, channel: BrokerChannel) -> Heart:
        """Return the heart of this connection's channels."""
        if self._heart is None:
            timeout_s = float(channel.consumer_timeout)
            pool = channel._get_pool()
            options = pool.connection_kwargs
            for name in ("socket_timeout", "socket_connect_timeout"):
                if name in options:  # a silent server must not block the heart too
                    options[name] = min(options[name] or timeout_s / 2, timeout_s / 2)
            client = Redis(connection_pool=pool)
            records = Records(client, channel.keys, delivery_limit=channel.delivery_limit)
            dead = DeadList(client, channel.keys)
            bound = partial(dead.bound, limit=channel.dead_list_limit, days=channel.dead_list_days)
            self._heart = Heart(records, timeout_s=timeout_s, pulse=self.pulse, bound_dead_list=bound)
        return self._heart

    def _come_round(self) -> None:
        """Note that the loop came round; after a long absence check at once whether messages were taken away.

        Raises a connection's error if any were: otherwise Celery's worker would begin them in this round of the loop.
        """
        away_s = self.pulse.tick()
        if self._heart is None or away_s < self._heart.timeout_s:
            return
        self._heart.beat()
        for channel in self.channels:
            channel.consumer.check_silence()

    def _check(self, client: Any, fanout: str) -> None:
        scripts = (PUT, FETCH, GIVE_BACK, BEAT)
        with client.pipeline(transaction=False) as asked:
            for script in scripts:
                asked.execute_command("SCRIPT LOAD", script.text)
            asked.info("server").info("cluster").info("memory").info("replication").publish(fanout, "")
            *loaded, server, cluster, memory, replication, published = asked.execute(raise_on_error=False)
        refused = [answer for answer in loaded if isinstance(answer, ResponseError)]
        if refused:
            raise UnsuitableServerError(
                f"{self.client.as_uri()} runs no scripts ({refused[0]}), and sidejob:// needs them to fetch. {RIGHTS}"
            )
        version = (
            server.get("redis_version") if isinstance(server, dict) else None
        )  # the user may not be allowed to read it
        if version and tuple(int(part) for part in str(version).split(".")[:2]) < OLDEST_REDIS:
            oldest = ".".join(map(str, OLDEST_REDIS))
            raise UnsuitableServerError(
                f"{self.client.as_uri()} is Redis {version}; sidejob:// needs {oldest} or newer, or Valkey."
            )
        if isinstance(cluster, dict) and cluster.get("cluster_enabled"):
            raise UnsuitableServerError(
                f"{self.client.as_uri()} is a node of a Redis Cluster, where the keys of one script would be on "
                "several nodes. Use a single Redis or Valkey with replicas."
            )
        if isinstance(replication, dict) and replication.get("role") == "slave":  # the next URL may be the master's
            raise RedisConnectionError(f"{self.client.as_uri()} is a replica, which accepts no messages.")
        policy = memory.get("maxmemory_policy") if isinstance(memory, dict) else None
        if policy not in (None, "noeviction"):
            logger.warning(
                "%s has the maxmemory-policy %s: it drops messages when it is full. Set it to noeviction.",
                self.client.as_uri(),
                policy,
            )
        if isinstance(published, NoPermissionError):
            logger.warning(
                "%s does not let its user publish (%s): no remote control, no events. %s",
                self.client.as_uri(),
                published,
                RIGHTS,
            )


INSTEAD = {"redis": "sidejob", "rediss": "sidejobs", "sentinel": "sidejob-sentinel"}
"""The intended scheme, by the part after a `+`."""


def _check_urls(client: Any) -> None:
    """Refuse a scheme with a `+`: kombu splits it, and then connects to this machine, whichever host the URL names.

    The exception is ``sidejob+socket://``, which kombu turns into a Unix socket.
    """
    first = f"{client.uri_prefix}+{client.hostname}" if "://" in (client.hostname or "") else ""
    for url in (first, *client.alt):
        scheme = url.partition("://")[0]
        ours, plus, rest = scheme.partition("+")
        if plus and ours.startswith("sidejob") and rest != "socket":
            raise ValueError(
                f"{scheme}:// is not a broker of this package, because kombu splits it. Did you mean {INSTEAD.get(rest, ours)}://?"
            )


class TLSTransport(Transport):
    """The same with TLS; unless told otherwise, it verifies the server's certificate."""

    def __init__(self, client: Any, **options: Any) -> None:
        """Adds to kombu's: there is no connection without TLS."""
        client.ssl = client.ssl or True
        super().__init__(client, **options)


def _tls(wanted: Any) -> dict[str, Any] | None:
    """Return the TLS options from `broker_use_ssl` or the URL; None without TLS.

    kombu accepts only a mapping of options, and connects without TLS for any other value.
    """
    if wanted is True:
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    if wanted and not isinstance(wanted, Mapping):
        raise ValueError(f"broker_use_ssl is True or options such as {{'ssl_ca_certs': '...'}}, not {wanted!r}.")
    return dict(wanted) if wanted else None


# -- sentinels ---------------------------------------------------------------------------------------------------------


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
                f"{SENTINEL_SCHEME}:// needs the name of the master: "
                'broker_transport_options = {"master_name": "..."}'
            )
        parameters = self._connparams(asynchronous)
        host, port = parameters.pop("host"), parameters.pop("port")
        urls = [url_to_parts(url) for url in self.connection.client.alt if url.startswith(f"{SENTINEL_SCHEME}:")]
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
