"""Rows of `publications`: messages for the subscribers of a channel that have not reached all of them yet.

The transaction that publishes keeps one row for each channel, however many ports subscribe to it. After its commit the
messages are delivered in the order of the jobs' ids, a page in each transaction, which also moves the row's place or
removes the row. So every port gets them once, whoever delivers, and whoever dies in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.channel import ancestors
from .statement import Autocommit, Reader, Statement, Transaction, first

Message = tuple[str, str | None, str | None]
"""(value, context, options), each text JSON."""

_KEEP = Statement(
    """
WITH r AS (
  SELECT * FROM json_to_recordset(%(rows)s::json) AS r(n int, channel text, levels text[], packets json)),
subscribed AS (
  SELECT r.n, r.channel, r.packets, s.ports, s.newest FROM r CROSS JOIN LATERAL (
    SELECT count(DISTINCT port_id) AS ports, max(id) AS newest FROM {subscriptions} WHERE channel = ANY(r.levels)) s
  WHERE s.ports > 0),
kept AS (
  INSERT INTO {publications} (channel, packets, newest) SELECT channel, packets, newest FROM subscribed ORDER BY n)
SELECT channel, ports FROM subscribed""",
    frequent=True,
)


def keep(executor: Transaction, messages: Mapping[str, Sequence[Message]]) -> dict[str, int]:
    """Keep messages, {channel: messages in their order}, for the ports that subscribe to a channel or an ancestor.

    Returns {channel: how many ports} for the channels that have subscribers; for the others nothing is kept.
    """
    rows = [
        {"n": n, "channel": channel, "levels": ancestors(channel), "packets": _packets(those)}
        for n, (channel, those) in enumerate(messages.items())
    ]
    return {row.channel: row.ports for row in executor.run(_KEEP, rows=json.dumps(rows))}


def _packets(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [
        {"n": n, "value": value, "context": context, "options": options}
        for n, (value, context, options) in enumerate(messages)
    ]


_COUNT = Statement("""
SELECT count(DISTINCT port_id) AS ports FROM {subscriptions} WHERE channel = ANY(%(levels)s::text[])""")


def count_subscribers(executor: Reader, channel: str) -> int:
    """Count the input ports that subscribe to a channel or to an ancestor."""
    return int(executor.run(_COUNT, levels=ancestors(channel))[0].ports)


_LOCK_NEXT = Statement(
    """
WITH f AS (
  SELECT p.id, p.reached, p.newest, greatest(1, %(packets)s / json_array_length(p.packets)) AS jobs
  FROM {publications} p WHERE p.channel = %(channel)s::text
    AND p.id = (SELECT min(o.id) FROM {publications} o WHERE o.channel = %(channel)s::text)
  FOR NO KEY UPDATE SKIP LOCKED)
SELECT f.id, f.reached, f.newest, page.job_ids, page.ports < f.jobs AS is_last
FROM f CROSS JOIN LATERAL (
  SELECT array_agg(DISTINCT few.job_id) AS job_ids, count(*) AS ports FROM (
    SELECT s.job_id FROM unnest(%(levels)s::text[]) AS a(channel) CROSS JOIN LATERAL (
      SELECT o.job_id FROM {subscriptions} o
      WHERE o.channel = a.channel AND o.job_id > f.reached AND o.id <= f.newest
      ORDER BY o.job_id LIMIT f.jobs) s
    ORDER BY s.job_id LIMIT f.jobs) few) page""",
    frequent=True,
)


def lock_next(executor: Transaction, channel: str, *, packets: int) -> Any | None:
    """Lock the oldest publication of a channel, and return its next page: of jobs, in ascending order of their ids.

    A page has about so many packets. None if there is no publication, or if somebody else is delivering it. A younger
    one is never taken: messages of one publisher would arrive in another order.

    Returns (id, reached, newest, job_ids, is_last). Only subscriptions up to the id `newest` count: those that were
    there when the message was published.
    """
    return first(executor.run(_LOCK_NEXT, channel=channel, levels=ancestors(channel), packets=packets))


_DELIVER = Statement(
    """
WITH m AS MATERIALIZED (
  SELECT r.n, r.value, r.context, r.options FROM {publications} p CROSS JOIN LATERAL
    json_to_recordset(p.packets) AS r(n int, value text, context text, options text)
  WHERE p.channel = %(channel)s::text AND p.id = %(id)s),
subscribed AS (
  SELECT a.level, s.port_id FROM unnest(%(levels)s::text[]) WITH ORDINALITY AS a(channel, level)
  JOIN {subscriptions} s ON s.channel = a.channel AND s.job_id > %(reached)s AND s.job_id <= %(up_to)s
    AND s.id <= %(newest)s),
locked AS (
  SELECT p.id, p.job_id FROM {ports} p WHERE p.id IN (SELECT port_id FROM subscribed) FOR KEY SHARE SKIP LOCKED),
written AS (
  INSERT INTO {packets} (port_id, value, context, options)
  SELECT s.port_id, m.value::json, m.context::json, m.options::json
  FROM subscribed s JOIN locked ON locked.id = s.port_id CROSS JOIN m ORDER BY s.port_id, m.n, s.level),
moved AS (
  UPDATE {publications} SET reached = %(up_to)s
  WHERE channel = %(channel)s::text AND id = %(id)s AND NOT %(is_last)s),
done AS (
  DELETE FROM {publications} WHERE channel = %(channel)s::text AND id = %(id)s AND %(is_last)s)
SELECT (SELECT count(DISTINCT port_id) FROM subscribed) = (SELECT count(*) FROM locked) AS complete,
  (SELECT array_agg(DISTINCT job_id) FROM locked) AS job_ids""",
    frequent=True,
)


def deliver(executor: Transaction, channel: str, page: Any) -> Any:
    """Write a page's packets, and move the place of its publication, which `lock_next` has locked, or remove it.

    A port that subscribes at several levels gets the messages once for each. Returns (complete, job_ids): the jobs
    whose ports have new packets. Not `complete`: an open transaction is about to remove a port, so roll back.
    """
    up_to = max(page.job_ids or [page.reached])
    found = executor.run(
        _DELIVER, channel=channel, levels=ancestors(channel), id=page.id, reached=page.reached, newest=page.newest,
        up_to=up_to, is_last=page.is_last,
    )  # fmt: skip
    return found[0]


_WAITING = Statement("""
SELECT DISTINCT channel FROM {publications} WHERE channel = ANY(%(channels)s::text[])""")


def waiting(executor: Autocommit, channels: Iterable[str]) -> set[str]:
    """Return those of the channels that have publications to be delivered."""
    return {row.channel for row in executor.run(_WAITING, channels=list(channels))}


_CHANNELS = Statement("""
WITH RECURSIVE found AS (
  (SELECT p.channel FROM {publications} p WHERE p.channel > %(after)s::text ORDER BY p.channel LIMIT 1)
  UNION ALL
  SELECT (SELECT p.channel FROM {publications} p WHERE p.channel > f.channel ORDER BY p.channel LIMIT 1) FROM found f
  WHERE f.channel IS NOT NULL)
SELECT channel FROM found WHERE channel IS NOT NULL LIMIT %(limit)s""")


def channels(executor: Reader, *, after: str, limit: int) -> list[str]:
    """Read the names, from `after` on, of channels that have publications to be delivered."""
    return [row.channel for row in executor.run(_CHANNELS, after=after, limit=limit)]
