"""Rows of `ports` and `subscriptions`: a job's mailboxes, their defaults and their channels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..model.port import WILDCARD
from .statement import Frequent, Reader, Statement, Transaction, first

_ROW = "id, job_id, direction, name, default_value::text AS default_value, channels, packet_limit, received"
"""The columns of a port's row that operations read."""

_SUBSCRIBED = f"""
  RETURNING id, job_id, direction, name, default_value, channels, packet_limit, received),
gone AS (
  DELETE FROM {{subscriptions}} s USING p WHERE s.port_id = p.id AND NOT s.channel = ANY(p.channels)),
s AS (
  INSERT INTO {{subscriptions}} (channel, job_id, port_id)
  SELECT DISTINCT unnest(channels), job_id, id FROM p
  WHERE direction = 'in' AND name <> '{WILDCARD}' AND NOT EXISTS (
    SELECT FROM {{jobs}} j WHERE j.id = p.job_id AND j.status = 'terminated')
  ON CONFLICT DO NOTHING)
SELECT {_ROW} FROM p"""
"""The end of a statement whose CTE `p` writes the channels of ports: input ports subscribe to exactly these.

Ports of a terminated job subscribe when the job is revived (`subscribe`).

The pattern `"*"` subscribes to none; it passes its channels on to the ports that are made from it.
"""

_INSERT = Statement(f"""
WITH r AS (
  SELECT * FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, direction text, name text, "default" text,
    channels text[], "limit" int)),
p AS (
  INSERT INTO {{ports}} (job_id, direction, name, default_value, channels, packet_limit)
  SELECT job_id, direction, name, "default"::json, channels, "limit" FROM r
  ON CONFLICT (job_id, direction, name) DO UPDATE
    SET default_value = excluded.default_value, channels = excluded.channels, packet_limit = excluded.packet_limit
    {_SUBSCRIBED}""")


def put(executor: Transaction, rows: Iterable[dict[str, Any]]) -> Sequence[Any]:
    """Create ports, or replace the options of those that exist; queued packets stay. Input channels subscribe."""
    return executor.run(_INSERT, rows=json.dumps(list(rows)))


_OF_JOBS = Frequent("""
SELECT p.id, p.job_id, p.direction, p.name, p.default_value::text AS default_value, p.channels, p.packet_limit,
  p.received,
  (SELECT j.parent_id FROM {jobs} j WHERE j.id = p.job_id) AS parent_id
FROM {ports} p WHERE p.job_id = ANY(%(job_ids)s::bigint[]) ORDER BY p.job_id, p.direction, p.name""")


def of_jobs(executor: Reader, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read all ports of jobs, each with the parent of its job."""
    return executor.run(_OF_JOBS, job_ids=sorted(set(job_ids)))


def of_job(executor: Reader, job_id: int) -> dict[tuple[str, str], Any]:
    """Read all ports of a job, {(direction, name): row}."""
    return {(row.direction, row.name): row for row in of_jobs(executor, [job_id])}


_KEEP_ONLY = Statement("""
DELETE FROM {ports}
WHERE job_id = %(job_id)s AND direction = ANY(%(directions)s::text[]) AND NOT id = ANY(%(ids)s::bigint[])""")


def keep_only(executor: Transaction, job_id: int, ids: Iterable[int], *, directions: Iterable[str]) -> None:
    """Remove the job's ports of these directions, except these ids, with their packets."""
    executor.run(_KEEP_ONLY, job_id=job_id, ids=list(ids), directions=list(directions))


_BY_ID = Statement(f"SELECT {_ROW} FROM {{ports}} WHERE id = ANY(%(ids)s::bigint[])")


def by_id(executor: Reader, ids: Iterable[int]) -> dict[int, Any]:
    """Read ports, {id: row}; a port that is gone is missing."""
    return {row.id: row for row in executor.run(_BY_ID, ids=list(ids))}


_SET_DEFAULT = Statement(f"""
UPDATE {{ports}} SET default_value = %(value)s::json
FROM (SELECT b.default_value::text AS text FROM {{ports}} b WHERE b.id = %(id)s) before
WHERE id = %(id)s RETURNING {_ROW}, before.text IS DISTINCT FROM %(value)s::text AS changed""")


def set_default(executor: Transaction, port_id: int, value: str | None) -> Any | None:
    """Set the value that a read of the empty port returns; None clears it, the text `null` is a value.

    Returns the port as it now is, and whether its default has `changed`; None if the port is gone.
    """
    return first(executor.run(_SET_DEFAULT, id=port_id, value=value))


_SET_CHANNELS = Statement(
    "WITH p AS (UPDATE {ports} SET channels = %(channels)s::text[] WHERE id = %(id)s" + _SUBSCRIBED
)


def set_channels(executor: Transaction, port_id: int, channels: Iterable[str]) -> Any | None:
    """Set a port's channels, and with them the subscriptions of an input port.

    Returns the port as it now is; None if the port is gone.
    """
    return first(executor.run(_SET_CHANNELS, id=port_id, channels=list(channels)))


_MARK_RECEIVED = Statement("WITH p AS (UPDATE {ports} SET received = true WHERE id = %(id)s" + _SUBSCRIBED)


def mark_received(executor: Transaction, port_id: int) -> Any | None:
    """Note that a step receives from a port; returns the port as it now is, None if it is gone."""
    return first(executor.run(_MARK_RECEIVED, id=port_id))


_UNSUBSCRIBE = Statement("""
DELETE FROM {subscriptions} s USING {ports} p WHERE p.job_id = %(job_id)s AND s.port_id = p.id""")


def unsubscribe(executor: Transaction, job_id: int) -> None:
    """End all subscriptions of a job; its ports keep their channels."""
    executor.run(_UNSUBSCRIBE, job_id=job_id)


_SUBSCRIBE = Statement(f"""
INSERT INTO {{subscriptions}} (channel, job_id, port_id)
SELECT DISTINCT unnest(channels), job_id, id FROM {{ports}}
WHERE job_id = %(job_id)s AND direction = 'in' AND name <> '{WILDCARD}'
ON CONFLICT DO NOTHING""")


def subscribe(executor: Transaction, job_id: int) -> None:
    """Let a job's input ports subscribe to their channels again."""
    executor.run(_SUBSCRIBE, job_id=job_id)


_MAKE = Statement(f"""
WITH p AS (
  INSERT INTO {{ports}} (job_id, direction, name, default_value, channels, packet_limit)
  SELECT job_id, direction, %(name)s, default_value, channels, packet_limit FROM {{ports}} WHERE id = %(pattern_id)s
  ON CONFLICT (job_id, direction, name) DO NOTHING{_SUBSCRIBED}""")


def make(executor: Transaction, pattern_id: int, name: str) -> Any | None:
    """Make a port from the pattern that allows it, and return it; None if it exists already, or the pattern is gone."""
    return first(executor.run(_MAKE, pattern_id=pattern_id, name=name))


_CONNECTED = Statement("""
SELECT p.job_id, p.direction, c.channel FROM unnest(%(job_ids)s::bigint[]) AS i(id) CROSS JOIN LATERAL (
    SELECT o.job_id, o.direction, o.channels FROM {ports} o WHERE o.job_id = i.id OFFSET 0) p
  CROSS JOIN LATERAL unnest(p.channels) AS c(channel)
LIMIT %(limit)s""")


def connected(executor: Reader, job_ids: Iterable[int], *, limit: int) -> Sequence[Any]:
    """Read (job_id, direction, channel) of each channel of each port of these jobs, at most `limit`."""
    return executor.run(_CONNECTED, job_ids=list(job_ids), limit=limit)


_SUBSCRIBERS = Statement("""
SELECT s.channel, s.job_id FROM unnest(%(channels)s::text[]) AS c(channel) CROSS JOIN LATERAL (
  SELECT o.channel, o.job_id FROM {subscriptions} o WHERE o.channel = c.channel
  ORDER BY o.channel, o.job_id LIMIT %(limit)s) s""")


def subscribers(executor: Reader, channels: Iterable[str], *, limit: int) -> Sequence[Any]:
    """Read (channel, job_id) of the jobs that subscribe to exactly these channels, at most `limit` for each."""
    return executor.run(_SUBSCRIBERS, channels=list(channels), limit=limit)
