"""The servers that benchmarks start, and the pools that they try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade

POOLS = {"prefork -c 2": ("prefork", 2), "solo": ("solo", 1)}


@contextmanager
def servers(*, appendonly: bool = True) -> Iterator[tuple[embedded.Postgres, str]]:
    """A Postgres with its default, durable settings and our schema, and the URL of a Valkey."""
    with embedded.Postgres(durable=True) as postgres, embedded.Valkey(appendonly=appendonly) as valkey:
        upgrade(postgres.url)
        yield postgres, valkey.url
