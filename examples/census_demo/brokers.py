"""The demo's broker: its own Postgres, a Valkey of its own, or the broker that the environment names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

import redis
from psycopg import sql

from census_demo.store import connect

KINDS = ("postgres", "redis")


@dataclass(frozen=True)
class Emptied:
    """How many messages waited in a broker, and which runs they were for, {job id: run number}."""

    messages: int
    announced: dict[int, int]


class Broker(Protocol):
    """A broker, and how it loses everything."""

    @property
    def url(self) -> str:
        """The URL that Celery is given."""
        ...

    def empty(self, queue: str) -> Emptied | None:
        """Remove all messages at once, also those that workers have fetched; None if that is not ours to do."""
        ...


@dataclass(frozen=True)
class InStore:
    """The tables of the broker in the census' own schema, beside its jobs."""

    database_url: str
    schema: str
    url: str = "sidejobpg://"

    def empty(self, queue: str) -> Emptied:
        """Remove all rows of the queues. Those with a holder had been fetched, and did not wait.

        The broker is the store, so a job's message is a reference to its row there.
        """
        with connect(self.database_url) as connection:
            connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(self.schema)))
            gone = connection.execute(
                "WITH gone AS (DELETE FROM broker_messages RETURNING task_id, generation, holder)"
                " SELECT m.job_id, g.generation FROM gone g LEFT JOIN messages m USING (task_id) WHERE g.holder IS NULL"
            ).fetchall()
        return Emptied(len(gone), {job_id: for_run for job_id, for_run in gone if job_id is not None})


@dataclass(frozen=True)
class OwnRedis:
    """A Redis or Valkey that nobody else uses."""

    url: str

    def empty(self, queue: str) -> Emptied:
        """Flush it. What waited was in lists, one for each priority."""
        with redis.Redis.from_url(self.url) as client:
            names = [name for name in client.keys(f"{queue}*") if client.type(name) == b"list"]
            with client.pipeline(transaction=True) as together:
                for name in names:
                    together.lrange(name, 0, -1)
                *lists, _ = together.flushall().execute()
        messages = [message for found in lists for message in found]
        bells = [json.loads(message)["headers"].get("sidejob") for message in messages]
        return Emptied(len(messages), {bell["job"]: bell["for_run"] for bell in bells if bell})


@dataclass(frozen=True)
class Given:
    """The broker of CELERY_BROKER_URL, which others may use."""

    url: str

    def empty(self, queue: str) -> None:
        """Leave it as it is."""
