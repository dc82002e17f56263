"""A PgBouncer in transaction mode of the tests' own, made to show at once whatever relies on a session.

Its transactions take turns on several server connections (`server_round_robin`), so that of two statements of one
client hardly any two meet the same session. Debian and others package it as `pgbouncer`.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from celery_sidejob.embedded.account import own, unprivileged_account
from celery_sidejob.embedded.server import HOST, Server, write_private

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
MISSING = "there is no PgBouncer on this machine (Debian's package `pgbouncer`): nothing was tested through one"

SETTINGS = {
    "listen_addr": HOST,
    "unix_socket_dir": "",
    "auth_type": "any",  # everybody becomes the user of the [databases] line
    "admin_users": "anybody",
    "pool_mode": "transaction",
    "server_round_robin": "1",
    "min_pool_size": "3",
    "default_pool_size": "30",
    "max_client_conn": "500",
    "autodb_idle_timeout": "5",  # a test's database is dropped at its end
    "server_login_retry": "1",
    "log_connections": "0",
    "log_disconnections": "0",
}


class PgBouncer(Server):
    """A PgBouncer before the Postgres of `url`; `url_of` names a database there, reached through it."""

    name = "PgBouncer"
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGTERM

    def __init__(self, url: str, **settings: str) -> None:
        super().__init__()
        self._target = conninfo_to_dict(url)
        self._settings = {**SETTINGS, **settings}
        self._account = unprivileged_account()  # as root it does not start

    @property
    def url(self) -> str:
        """The console, where `SHOW CLIENTS` and the like can be asked."""
        return f"postgresql://anybody@{HOST}:{self.port}/pgbouncer"

    def url_of(self, url: str) -> str:
        """Return the URL by which the database that `url` names is reached through this."""
        pooled = urlsplit(url)._replace(netloc=f"{self._target['user']}@{HOST}:{self.port}", query="").geturl()
        _behind[self.port] = self
        return pooled

    def url_past(self, url: str) -> str:
        """Return the URL by which the database that `url` names is reached past this."""
        target = self._target
        password = f":{target['password']}" if "password" in target else ""
        server = f"{target.get('host', HOST)}:{target.get('port', '5432')}"
        return urlsplit(url)._replace(netloc=f"{target['user']}{password}@{server}").geturl()

    def show(self, what: str) -> list[dict[str, Any]]:
        """Ask the console."""
        with psycopg.connect(self.url, autocommit=True, row_factory=psycopg.rows.dict_row) as console:
            # The console takes simple queries alone.
            return psycopg.ClientCursor(console, row_factory=psycopg.rows.dict_row).execute(f"SHOW {what}").fetchall()

    def reconnect(self, database: str) -> None:
        """Have it open new connections to a database and close those it has; returns when they are closed.

        So does an operator after a failover: what its clients close are their own connections to it, and not these.
        """
        with psycopg.connect(self.url, autocommit=True, cursor_factory=psycopg.ClientCursor) as console:
            console.execute(f"RECONNECT {database}")
            console.execute(f"WAIT_CLOSE {database}")

    def _prepare(self, home: Path) -> None:
        """Nothing is made before its port is known."""

    def _command(self, home: Path, port: int) -> list[str]:
        target = " ".join(
            f"{name}='{self._target[name]}'" for name in ("host", "port", "user", "password") if name in self._target
        )
        settings = {**self._settings, "listen_port": str(port)}
        lines = ["[databases]", f"* = {target}", "[pgbouncer]", *(f"{name} = {is_}" for name, is_ in settings.items())]
        write_private(home / "pgbouncer.ini", "\n".join(lines) + "\n")
        own(home / "pgbouncer.ini", self._account)
        assert PROGRAM is not None, MISSING
        return [PROGRAM, "pgbouncer.ini"]

    def _answers(self) -> bool:
        try:
            return bool(self.show("VERSION"))
        except psycopg.OperationalError:
            return False


_behind: dict[int, PgBouncer] = {}


def pooling(url: str) -> PgBouncer | None:
    """Return the PgBouncer of ours that the URL leads through, if any."""
    return _behind.get(urlsplit(url).port or 0)


def direct(url: str) -> str:
    """Return the URL past the PgBouncer, if it leads through one of ours: for whoever looks on from outside."""
    proxy = pooling(url)
    return url if proxy is None else proxy.url_past(url)


def client_ports(url: str) -> list[int]:
    """From which ports this package is connected to the database of `url`, through a PgBouncer of ours or past it."""
    proxy, name = pooling(url), urlsplit(url).path[1:]
    with psycopg.connect(direct(url)) as connection:
        ports = [port for (port,) in connection.execute(_OURS)]
    if proxy is None:
        return ports
    its_own = {server["local_port"] for server in proxy.show("SERVERS") if server["database"] == name}
    through = [
        client["port"]
        for client in proxy.show("CLIENTS")
        if client["database"] == name and client["application_name"] == APPLICATION
    ]
    return through + [port for port in ports if port not in its_own]


APPLICATION = "celery_sidejob"
_OURS = f"""
    SELECT client_port FROM pg_stat_activity
    WHERE application_name = '{APPLICATION}' AND datname = current_database()"""
