"""Opens connections to a store that can tell a slow store from a silent one."""

from __future__ import annotations

import time

import psycopg
from psycopg import errors as pg

from ...model.errors import SettingsError, StoreUnavailableError
from ...model.settings import NO_STORE
from ..errors import LacksRights, StoreDown, first_line
from . import fork
from .bounded import BoundedConnection
from .own_executor import OwnExecutor
from .parameters import connection_parameters, refused

SHORTEST_CONNECT_S = 2
"""The shortest connect timeout that libpq accepts, in seconds."""

ANSWERS_S = 5.0
"""Seconds within which the store must answer when only asked whether it answers."""


class Opener:
    """Opens connections to one store."""

    def __init__(
        self,
        url: str | None,
        schema: str,
        *,
        prepare: bool = True,
        longest_pause_s: float | None = None,
        setting: str = "sidejob_database_url",
        application: str = "celery_sidejob",
        is_broker: bool = False,
    ) -> None:
        """`longest_pause_s`: how long our transactions may wait for this process before the server ends them.

        `setting` names the setting of the URL, for errors; `application` is the connections' name on the server.
        `is_broker`: the store is Celery's broker as well.
        """
        self._url = url
        self._schema = schema
        self._prepare = prepare
        self._longest_pause_s = longest_pause_s
        self._setting = setting
        self._application = application
        self._is_broker = is_broker

    def connect(self, deadline: float | None = None) -> OwnExecutor:
        """Open a connection for the caller alone; no other thread gets it."""
        if self._url is None:
            raise SettingsError(NO_STORE)
        executor: OwnExecutor | None = None
        parameters = connection_parameters(self._url, setting=self._setting, application=self._application)
        if deadline is not None:
            left_s = max(SHORTEST_CONNECT_S, round(deadline - time.monotonic()))
            parameters["connect_timeout"] = str(min(left_s, int(parameters["connect_timeout"])))
        try:
            connection = BoundedConnection.connect(**parameters, autocommit=True, prepare_threshold=None)
            fork.note_open(connection)
            connection.deadline = deadline if deadline is not None else time.monotonic() + ANSWERS_S
            executor = OwnExecutor(connection, self._schema, longest_pause_s=self._longest_pause_s)
            executor.is_broker = self._is_broker
            executor.set_up(prepare=self._prepare)
            connection.deadline, connection.answers_elsewhere = deadline, self._answers
        except pg.InsufficientPrivilege as error:
            assert executor is not None
            executor.close()
            raise LacksRights(
                f"The user in {self._setting} has a default that the package's statements cannot run with, and may not "
                f"change it ({first_line(error)}). Reset it: ALTER ROLE <user> RESET <parameter>, or ALTER DATABASE."
            ) from error
        except psycopg.OperationalError as error:
            if executor is not None:
                executor.close()
            raise refused(error, self._setting) or StoreDown(
                f"Cannot connect to the store: {first_line(error)}. Is Postgres up, and is {self._setting} right?"
            ) from error
        return executor

    def _answers(self) -> bool:
        """Tell within `ANSWERS_S` whether the store answers over a new connection."""
        executor = None
        try:
            executor = self.connect(time.monotonic() + ANSWERS_S)
        except (StoreUnavailableError, psycopg.Error) as error:
            if "FATAL" not in str(error):  # a server that refuses us, perhaps because it is full, answers
                return False
        finally:
            if executor is not None:
                executor.close()
        return True
