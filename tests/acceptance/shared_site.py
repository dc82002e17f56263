"""A store, a broker and one worker that all tests of a module share; each looks at jobs of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.workers import Processes


@dataclass(frozen=True)
class Place:
    """Where a module's tests meet: what the fixture `shared_place` gives."""

    database_url: str
    broker: Broker
    record: Record
    processes: Processes


class SharedSite:
    """A client of a place, and what its workers need to know; the module's tests add their own words."""

    def __init__(self, place: Place, name: str) -> None:
        self.url, self.broker, self.record = place.database_url, place.broker, place.record
        self.env = {"SIDEJOB_DATABASE_URL": self.url, **self.broker.env, **self.record.env}
        self.app = make_app(name, broker=None, **self.broker.configuration, sidejob_database_url=self.url)
        self.sidejob = self.app.sidejob
        self.outside: psycopg.Connection[Any] = psycopg.connect(direct(self.url), autocommit=True)

    def close(self) -> None:
        """Close what the client has open."""
        self.outside.close()
        self.sidejob.close()
        self.app.close()
