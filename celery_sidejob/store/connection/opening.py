"""Opens connections to a store that can tell a slow store from a silent one; reads the URLs of stores."""

from __future__ import annotations

import re
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from ...model.errors import SettingsError, StoreUnavailableError
from ...model.settings import NO_STORE
from ..errors import LacksRights, StoreDown, first_line
from .bounded import BoundedConnection
from .own_executor import OwnExecutor

SHORTEST_CONNECT_S = 2
"""The shortest connect timeout that libpq accepts, in seconds."""

ANSWERS_S = 5.0
"""Seconds within which the store must answer when only asked whether it answers."""


@dataclass(frozen=True, slots=True, repr=False)
class Opener:
    """Opens connections to one store. Has no text of its own, because the URL may contain a password."""

    url: str | None
    schema: str
    _: KW_ONLY
    prepare: bool = True
    longest_pause_s: float | None = None
    """How long our transactions may wait for this process before the server ends them."""
    setting: str = "sidejob_database_url"
    """The setting of the URL, for errors."""
    application: str = "celery_sidejob"
    """The connections' name on the server."""
    is_broker: bool = False
    """Whether the store is Celery's broker as well."""

    def connect(self, deadline: float | None = None) -> OwnExecutor:
        """Open a connection for the caller alone; no other thread gets it."""
        if self.url is None:
            raise SettingsError(NO_STORE)
        executor: OwnExecutor | None = None
        parameters = connection_parameters(self.url, setting=self.setting, application=self.application)
        if deadline is not None:
            left_s = max(SHORTEST_CONNECT_S, round(deadline - time.monotonic()))
            parameters["connect_timeout"] = str(min(left_s, int(parameters["connect_timeout"])))
        try:
            connection = BoundedConnection.connect(**parameters, autocommit=True, prepare_threshold=None)
            connection.deadline = deadline if deadline is not None else time.monotonic() + ANSWERS_S
            executor = OwnExecutor(connection, self.schema, longest_pause_s=self.longest_pause_s)
            executor.is_broker = self.is_broker
            executor.set_up(prepare=self.prepare)
            connection.deadline, connection.answers_elsewhere = deadline, self._answers
        except pg.InsufficientPrivilege as error:
            assert executor is not None
            executor.close()
            raise LacksRights(
                f"The user in {self.setting} has a default that the package's statements cannot run with, and may not "
                f"change it ({first_line(error)}). Reset it: ALTER ROLE <user> RESET <parameter>, or ALTER DATABASE."
            ) from error
        except psycopg.OperationalError as error:
            if executor is not None:
                executor.close()
            raise refused(error, self.setting) or StoreDown(
                f"Cannot connect to the store: {first_line(error)}. Is Postgres up, and is {self.setting} right?"
            ) from error
        return executor

    def _answers(self) -> bool:
        """Tell within `ANSWERS_S` whether the store answers over a new connection."""
        try:
            self.connect(time.monotonic() + ANSWERS_S).close()
        except (StoreUnavailableError, psycopg.Error) as error:
            return "FATAL" in str(error)  # a server that refuses us, perhaps because it is full, answers
        return True


_REFUSED = re.compile(r'invalid (port number|"?\w+"? value)\b.*|could not match \d+ port numbers.*')
_SCHEME = re.compile(r"^postgres(ql)?(\+\w+)?://")


def connection_parameters(
    url: str, *, setting: str = "sidejob_database_url", application: str = "celery_sidejob"
) -> dict[str, Any]:
    """Return libpq's parameters for a `postgresql://` URL, also for one in SQLAlchemy's spelling.

    `application` is the name under which the server lists the connection, unless the URL has another.

    Keep-alives and `tcp_user_timeout` detect half-open connections within about ten seconds, not hours.
    """
    plain = _SCHEME.sub("postgresql://", url)
    try:
        given = conninfo_to_dict(plain)
    except psycopg.ProgrammingError as error:
        reason = first_line(error).replace(plain, "…")
        raise SettingsError(f"{setting} cannot be read: {reason}") from None
    if not str(given.get("connect_timeout", "5")).lstrip("-").isdecimal():
        raise SettingsError(f'{setting} cannot be read: invalid connect_timeout value: "{given["connect_timeout"]}"')
    return {
        "application_name": application,
        "connect_timeout": "5",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": "10000",
        **given,
        "client_encoding": "UTF8",
    }


def refused(error: psycopg.OperationalError, setting: str) -> SettingsError | None:
    """Return the error for a URL that libpq refuses before it asks any server; None for other errors."""
    found = _REFUSED.search(first_line(error))
    return None if found is None else SettingsError(f"{setting} cannot be read: {found[0]}")


def lead_to_same_database(url: str, other: str, *, settings: tuple[str, str]) -> bool:
    """Tell whether two URLs name one database on the same hosts and ports, as libpq reads them; asks no server.

    Another name of a host, or a proxy before it, counts as another host. `settings` names the URLs, for errors.
    """
    return _place(url, settings[0]) == _place(other, settings[1])


def database_name(url: str, *, setting: str) -> str:
    """Return the name of the database that a URL leads to, as libpq reads it."""
    known = _with_defaults(url, setting)
    return str(known.get("dbname") or known.get("user") or "")


def _place(url: str, setting: str) -> tuple[Any, ...]:
    known = _with_defaults(url, setting)
    hosts = str(known.get("hostaddr") or known.get("host") or "").lower().split(",")
    ports = str(known["port"]).split(",")
    nodes = zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False)
    return frozenset(nodes), known.get("service"), database_name(url, setting=setting)


def _with_defaults(url: str, setting: str) -> dict[str, Any]:
    """Return libpq's parameters for a URL, including its defaults from the environment and from its build."""
    defaults = {one.keyword.decode(): one.val.decode() for one in Conninfo.get_defaults() if one.val}
    return {**defaults, **connection_parameters(url, setting=setting)}
