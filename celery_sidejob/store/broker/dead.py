"""Rows of `broker_dead`: messages that were given up, in the order in which they were. No consumer is given one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statement import Reader, Statement, Transaction, first_value

PAGE = 100
_COLUMNS = "queue, priority, headers, properties, body"

_BURY = Statement(f"""
WITH gone AS (
  DELETE FROM {{broker_messages}} m WHERE m.id = ANY(%(ids)s::bigint[]) AND m.holder = %(holder)s
  RETURNING {_COLUMNS})
INSERT INTO {{broker_dead}} ({_COLUMNS}, reason) SELECT {_COLUMNS}, %(reason)s FROM gone RETURNING queue, headers""")


def bury(executor: Transaction, *, holder: int, ids: Sequence[int], reason: str) -> Sequence[Any]:
    """Give up messages that this consumer holds; return the queue and the headers of those that it did hold."""
    return executor.run(_BURY, holder=holder, ids=list(ids), reason=reason)


_PAGE = Statement(f"""
SELECT d.id, d.died_at, d.reason, {_COLUMNS} FROM {{broker_dead}} d
WHERE d.id > %(after)s ORDER BY d.id LIMIT %(few)s""")


def page(executor: Reader, after: int) -> Sequence[Any]:
    """Read the next messages after an id, those first that were given up first."""
    return executor.run(_PAGE, after=after, few=PAGE)


_COUNT = Statement("SELECT count(*) AS rows FROM {broker_dead} d WHERE d.id <= %(until)s")


def count(executor: Reader, *, until: int = 2**63 - 1) -> int:
    """Count the messages up to an id."""
    return int(executor.run(_COUNT, until=until)[0].rows)


_DELETE = Statement("DELETE FROM {broker_dead} d WHERE d.id = ANY(%(ids)s::bigint[]) RETURNING d.id")


def delete(executor: Transaction, ids: Sequence[int]) -> int:
    """Remove messages for good; return how many there were."""
    return len(executor.run(_DELETE, ids=list(ids)))


_SEND_AGAIN = Statement(f"""
WITH gone AS (DELETE FROM {{broker_dead}} d WHERE d.id = %(id)s RETURNING {_COLUMNS})
INSERT INTO {{broker_messages}} ({_COLUMNS}) SELECT {_COLUMNS} FROM gone RETURNING queue""")


def send_again(executor: Transaction, id: int) -> str | None:
    """Put a message at the end of its queue, as if it had never been delivered; None if it is not there any more."""
    return first_value(executor.run(_SEND_AGAIN, id=id), str)


_BOUND = Statement("""
DELETE FROM {broker_dead} d USING (
  SELECT o.id FROM {broker_dead} o
  WHERE o.died_at < now() - make_interval(secs => %(kept_s)s::double precision)
    OR %(most)s::bigint IS NOT NULL
      AND o.id <= (SELECT k.id FROM {broker_dead} k ORDER BY k.id DESC OFFSET %(most)s::bigint LIMIT 1)
  ORDER BY o.id LIMIT %(few)s) AS few
WHERE d.id = few.id RETURNING d.died_at, d.queue, d.headers""")


def bound(executor: Transaction, *, most: int | None, kept_s: float | None) -> Sequence[Any]:
    """Remove a page of the oldest messages beyond so many, and of those older than so long; return what went."""
    return executor.run(_BOUND, most=most, kept_s=kept_s, few=PAGE)
