"""The transports behind the URLs `sidejob://` and `sidejobs://`; the one of `sidejob-sentinel://` adds to them."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import kombu
from kombu.log import get_logger
from kombu.transport import redis
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from ..model.checks import SLIP, nearest
from .broker_channel import Channel as BrokerChannel
from .dead import DeadList
from .heart import BEATS, Heart
from .pulse import Pulse
from .records import Records
from .scripts import BEAT, FETCH, GIVE_BACK, PUT

logger = get_logger(__name__)

if tuple(kombu.VERSION[:2]) < (5, 7):
    raise ImportError(f"sidejob:// needs kombu 5.7 or newer; this is {kombu.__version__}")


OLDEST_REDIS = (6, 2)
"""What kombu 5.7 asks for; Valkey says 7.2 of itself."""
RIGHTS = (
    "It needs ~* &* +@read +@write +@connection +@pubsub +@scripting +@transaction +info +time; "
    "where there are no scripts there is redis://."
)
"""What a user of the server must be allowed, in words of its ACL."""
PROBE = "_sidejob.probe"
"""Where something is published to see whether that is allowed; nobody listens. And a key that there is not."""

OPTIONS: Mapping[str, tuple[type[int] | type[float], str]] = {
    "consumer_timeout": (float, "seconds"),
    "loop_timeout": (float, "seconds"),
    "delivery_limit": (int, "deaths"),
    "dead_list_limit": (int, "messages"),
    "dead_list_days": (float, "days"),
}
"""Ours, each with what it is a number of."""


class UnsuitableServerError(Exception):
    """The server at the broker's URL cannot keep what this transport promises."""


class Transport(redis.Transport):
    """kombu's Redis transport with reliable fetch; Celery and kombu take it for a Redis broker, as it is one."""

    Channel = BrokerChannel
    # What is waited for is a bell, which is rung when something comes: there is no need to look every second.
    brpop_timeout = 10
    has_loop = False
    """Whether a loop of Celery's comes back to the channels, so that answers can be read later."""
    _heart: Heart | None = None

    def __init__(self, client: Any, **options: Any) -> None:
        """Adds to kombu's: `broker_use_ssl=True`, which kombu passes over, is TLS."""
        client.ssl = _tls(client.ssl)
        super().__init__(client, **options)

    @cached_property
    def pulse(self) -> Pulse:
        """Whether the thread that consumes goes on."""
        return Pulse(self.client.transport_options.get("loop_timeout", BrokerChannel.loop_timeout))

    def establish_connection(self) -> Any:
        """Adds to kombu's: a server that could not keep the promises is refused, a doubtful one warned of."""
        _check_urls(self.client)
        _check_options(self.client.transport_options)
        try:
            connection = super().establish_connection()
        except NoPermissionError as error:
            raise UnsuitableServerError(
                f"{self.client.as_uri()} forbids its user too much ({error}). {RIGHTS}"
            ) from error
        channel = connection._avail_channels[-1]
        try:
            self._check(channel._client_of_scripts, f"{channel.global_keyprefix}{channel.keyprefix_fanout}{PROBE}")
            with suppress(NoPermissionError):  # breaks if nothing may be written for now; a full server is no reason
                channel._client_of_scripts.delete(f"{channel.global_keyprefix}{PROBE}")
        except (UnsuitableServerError, RedisConnectionError):
            self.close_connection(connection)
            raise
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Adds to kombu's: what is acknowledged is answered later, and the loop has to come round."""
        super().register_with_event_loop(connection, loop)
        self.has_loop = True
        self.pulse.tick()
        options = connection.client.transport_options
        timeouts = [options.get(name) for name in ("consumer_timeout", "loop_timeout")]
        loop.call_repeatedly(min([1.0, *(timeout / BEATS for timeout in timeouts if timeout)]), self._come_round)

    def heart_for(self, channel: BrokerChannel) -> Heart:
        """Return what beats for the channels of this connection."""
        if self._heart is None:
            timeout_s = float(channel.consumer_timeout)
            pool = channel._get_pool()
            options = pool.connection_kwargs
            for name in ("socket_timeout", "socket_connect_timeout"):
                if name in options:  # a silent server must not silence the heart as well
                    options[name] = min(options[name] or timeout_s / 2, timeout_s / 2)
            client = Redis(connection_pool=pool)
            records = Records(client, channel._keys, delivery_limit=channel.delivery_limit)
            dead = DeadList(client, channel._keys)
            bound = partial(dead.bound, limit=channel.dead_list_limit, days=channel.dead_list_days)
            self._heart = Heart(
                client, channel._keys, records, timeout_s=timeout_s, pulse=self.pulse, bound_dead_list=bound
            )
        return self._heart

    def _come_round(self) -> None:
        """Note that the loop goes on; after a long absence find out at once whether messages were taken away meanwhile.

        Raises a connection's error if any were: in this same round of the loop Celery's worker would begin them.
        """
        away_s = self.pulse.tick()
        if self._heart is None or away_s < self._heart.timeout_s:
            return
        self._heart.beat()
        for channel in self.channels:
            channel.mind_silence()

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
                f"{self.client.as_uri()} does not run scripts ({refused[0]}), by which sidejob:// fetches. {RIGHTS}"
            )
        version = server.get("redis_version") if isinstance(server, dict) else None  # it may be hidden from us
        if version and tuple(int(part) for part in str(version).split(".")[:2]) < OLDEST_REDIS:
            oldest = ".".join(map(str, OLDEST_REDIS))
            raise UnsuitableServerError(
                f"{self.client.as_uri()} is Redis {version}; sidejob:// needs {oldest} or newer, or Valkey."
            )
        if isinstance(cluster, dict) and cluster.get("cluster_enabled"):
            raise UnsuitableServerError(
                f"{self.client.as_uri()} is a node of a Redis Cluster, where the keys of one script would lie on "
                "several nodes. Use a single Redis or Valkey with replicas."
            )
        if isinstance(replication, dict) and replication.get("role") == "slave":  # the next URL may be the master's
            raise RedisConnectionError(f"{self.client.as_uri()} is a replica, which takes no messages.")
        policy = memory.get("maxmemory_policy") if isinstance(memory, dict) else None
        if policy not in (None, "noeviction"):
            logger.warning(
                "%s has the maxmemory-policy %s: when it is full it throws messages away. Set it to noeviction.",
                self.client.as_uri(), policy,
            )  # fmt: skip
        if isinstance(published, NoPermissionError):
            logger.warning(
                "%s lets its user publish nothing (%s): no remote control, no events. %s",
                self.client.as_uri(), published, RIGHTS,
            )  # fmt: skip


INSTEAD = {"redis": "sidejob", "rediss": "sidejobs", "sentinel": "sidejob-sentinel"}
"""What is meant by a scheme with a `+`, by what is after it."""


def _check_urls(client: Any) -> None:
    """Refuse a scheme with a `+`: kombu takes it apart, and then connects to this machine, whichever the URL names.

    But for ``sidejob+socket://``, of which kombu makes a Unix socket.
    """
    first = f"{client.uri_prefix}+{client.hostname}" if "://" in (client.hostname or "") else ""
    for url in (first, *client.alt):
        scheme = url.partition("://")[0]
        ours, plus, rest = scheme.partition("+")
        if plus and ours.startswith("sidejob") and rest != "socket":
            raise ValueError(
                f"{scheme}:// is no broker of ours, for kombu takes it apart. Did you mean {INSTEAD.get(rest, ours)}://?"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant, before anybody is taken for dead by it."""
    _check_names(options.keys() - OPTIONS.keys())
    for name, (kind, meaning) in OPTIONS.items():
        value = options.get(name, 1)
        if value is None and name != "consumer_timeout":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
            or_none = "" if name == "consumer_timeout" else " or None"
            raise ValueError(f"The transport option {name} is a number of {meaning} above 0{or_none}, not {value!r}.")


def _check_names(options: Iterable[str]) -> None:
    """Refuse what is nearly an option of ours; others are kombu's, or of a transport that is used beside this one."""
    for name in options:
        meant = nearest(name, OPTIONS, like=SLIP)  # `connect_timeout` and `consumer_timeout` are alike by 0.77
        if meant is not None:
            raise ValueError(f"{name} is no transport option. Did you mean {meant}?")


class TLSTransport(Transport):
    """The same with TLS; unless something else is said, the server's certificate is verified."""

    def __init__(self, client: Any, **options: Any) -> None:
        """Adds to kombu's: there is no connection without TLS."""
        client.ssl = client.ssl or True
        super().__init__(client, **options)


def _tls(wanted: Any) -> dict[str, Any] | None:
    """Return the options of TLS for what `broker_use_ssl` or the URL says; None for none.

    kombu takes options alone, and connects without TLS where there is anything else.
    """
    if wanted is True:
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    if wanted and not isinstance(wanted, Mapping):
        raise ValueError(f"broker_use_ssl is True or options such as {{'ssl_ca_certs': '...'}}, not {wanted!r}.")
    return dict(wanted) if wanted else None
