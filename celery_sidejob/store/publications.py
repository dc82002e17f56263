"""Rows of `publications`: messages for the subscribers of a channel that have not reached all of them yet.

The transaction that publishes keeps one row for each channel, however many ports subscribe to it. If they are few, it
also delivers the messages itself. Otherwise they are delivered after its commit in the order of the jobs' ids, a page
in each transaction, which also moves the row's cursor or removes the row. So every port gets them once, whatever
process delivers, and whatever dies in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..model.names import channel_ancestors
from .statement import Autocommit, Frequent, Reader, Statement, Transaction, first

Message = tuple[str, str | None, str | None]
"""(value, context, options), each text JSON."""


@dataclass(frozen=True, slots=True)
class Page:
    """The jobs to which the messages of a locked publication are delivered next, in ascending order of their ids."""

    id: int
    """The publication's number in its channel."""
    newest: int
    """The last subscription that counts: later subscriptions were made after the messages were published."""
    job_ids: Sequence[int]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The messages kept for a channel: how many ports receive them, and their only page, if it may be delivered now."""

    channel: str
    ports: int
    page: Page | None


_KEEP = Frequent("""
WITH r AS (
  SELECT * FROM json_to_recordset(%(rows)s::json) AS r(n int, channel text, levels text[], packets json)),
subscribed AS (
  SELECT r.n, r.channel, r.levels, r.packets, s.ports, s.newest FROM r CROSS JOIN LATERAL (
    SELECT count(DISTINCT port_id) AS ports, max(id) AS newest FROM {subscriptions} WHERE channel = ANY(r.levels)) s
  WHERE s.ports > 0),
kept AS (
  INSERT INTO {publications} (channel, packets, newest) SELECT channel, packets, newest FROM subscribed ORDER BY n
  RETURNING channel, id)
SELECT s.channel, s.ports, s.newest, kept.id,
  CASE WHEN s.ports <= %(few)s AND NOT EXISTS (SELECT FROM {publications} p WHERE p.channel = s.channel)
    THEN (SELECT array_agg(DISTINCT o.job_id) FROM {subscriptions} o WHERE o.channel = ANY(s.levels)) END AS job_ids
FROM subscribed s JOIN kept ON kept.channel = s.channel ORDER BY s.n""")


def keep(executor: Transaction, messages: Mapping[str, Sequence[Message]], *, few: int) -> list[Kept]:
    """Keep messages, {channel: messages in their order}, for the ports that subscribe to a channel or an ancestor.

    For a channel without subscribers nothing is kept or returned. A channel with a `few` ports has one page, which may
    be delivered in this transaction, unless older messages wait: these must come first.
    """
    rows = [
        {"n": n, "channel": channel, "levels": channel_ancestors(channel), "packets": _packets(those)}
        for n, (channel, those) in enumerate(messages.items())
    ]
    return [
        Kept(row.channel, row.ports, Page(row.id, row.newest, row.job_ids, True) if row.job_ids else None)
        for row in executor.run(_KEEP, rows=json.dumps(rows), few=few)
    ]


def _packets(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [
        {"n": n, "value": value, "context": context, "options": options}
        for n, (value, context, options) in enumerate(messages)
    ]


_COUNT = Statement("""
SELECT count(DISTINCT port_id) AS ports FROM {subscriptions} WHERE channel = ANY(%(levels)s::text[])""")


def count_subscribers(executor: Reader, channel: str) -> int:
    """Count the input ports that subscribe to a channel or to an ancestor."""
    return int(executor.run(_COUNT, levels=channel_ancestors(channel))[0].ports)


_LOCK_NEXT = Frequent("""
WITH f AS (
  SELECT p.id, p.newest, p.reached, greatest(1, %(packets)s / json_array_length(p.packets)) AS jobs
  FROM {publications} p WHERE p.channel = %(channel)s::text
    AND p.id = (SELECT min(o.id) FROM {publications} o WHERE o.channel = %(channel)s::text)
  FOR NO KEY UPDATE SKIP LOCKED)
SELECT f.id, f.newest, page.job_ids, page.ports <= f.jobs AS is_last
FROM f CROSS JOIN LATERAL (
  SELECT array_agg(DISTINCT few.job_id) FILTER (WHERE few.n <= f.jobs) AS job_ids, count(*) AS ports FROM (
    SELECT s.job_id, row_number() OVER (ORDER BY s.job_id) AS n
    FROM unnest(%(levels)s::text[]) AS a(channel) CROSS JOIN LATERAL (
      SELECT o.job_id FROM {subscriptions} o
      WHERE o.channel = a.channel AND o.job_id > f.reached AND o.id <= f.newest
      ORDER BY o.job_id LIMIT f.jobs + 1) s
    ORDER BY s.job_id LIMIT f.jobs + 1) few) page""")


def lock_next(executor: Transaction, channel: str, *, packets: int) -> Page | None:
    """Lock the oldest publication of a channel, and return its next page, of about so many packets.

    None if there is no publication, or if another process is delivering it. A younger publication is never taken:
    messages of one publisher would arrive in another order.
    """
    row = first(executor.run(_LOCK_NEXT, channel=channel, levels=channel_ancestors(channel), packets=packets))
    return None if row is None else Page(row.id, row.newest, row.job_ids or [], row.is_last)


_DELIVER = Frequent("""
WITH m AS MATERIALIZED (
  SELECT r.n, r.value, r.context, r.options FROM {publications} p CROSS JOIN LATERAL
    json_to_recordset(p.packets) AS r(n int, value text, context text, options text)
  WHERE p.channel = %(channel)s::text AND p.id = %(id)s),
subscribed AS (
  SELECT a.level, s.port_id FROM unnest(%(levels)s::text[]) WITH ORDINALITY AS a(channel, level)
  JOIN {subscriptions} s ON s.channel = a.channel AND s.job_id = ANY(%(job_ids)s::bigint[]) AND s.id <= %(newest)s),
locked AS (
  SELECT p.id, p.job_id, p.packet_limit, p.received FROM {ports} p WHERE p.id IN (SELECT port_id FROM subscribed)
  FOR KEY SHARE SKIP LOCKED),
free AS (
  SELECT (SELECT count(DISTINCT port_id) FROM subscribed) = (SELECT count(*) FROM locked) AS are_all),
written AS (
  INSERT INTO {packets} (port_id, value, context, options, limited)
  SELECT s.port_id, m.value::json, m.context::json, m.options::json, CASE WHEN locked.packet_limit > 0 THEN true END
  FROM subscribed s JOIN locked ON locked.id = s.port_id CROSS JOIN m WHERE (SELECT are_all FROM free)
  ORDER BY s.port_id, m.n, s.level),
moved AS (
  UPDATE {publications} SET reached = %(up_to)s
  WHERE channel = %(channel)s::text AND id = %(id)s AND NOT %(is_last)s AND (SELECT are_all FROM free)),
done AS (
  DELETE FROM {publications}
  WHERE channel = %(channel)s::text AND id = %(id)s AND %(is_last)s AND (SELECT are_all FROM free))
SELECT free.are_all, (SELECT array_agg(DISTINCT job_id) FROM locked) AS job_ids,
  (SELECT array_agg(DISTINCT job_id) FROM locked WHERE received IS NOT TRUE) AS to_wake FROM free""")


def deliver(executor: Transaction, channel: str, page: Page) -> dict[int, bool] | None:
    """Write a page's packets, and move the cursor of its publication, or remove it; return the jobs that got packets.

    Each with whether it got some on another port than those from which its steps receive.

    The publication is locked, or made by this transaction. A port that subscribes at several levels gets the messages
    once for each. Does nothing and returns None if an open transaction is about to remove one of the ports.
    """
    levels, up_to = channel_ancestors(channel), max(page.job_ids, default=0)
    found = executor.run(_DELIVER, channel=channel, levels=levels, up_to=up_to, **asdict(page))[0]
    to_wake = set(found.to_wake or ())
    return {job_id: job_id in to_wake for job_id in found.job_ids or ()} if found.are_all else None


_WAITING = Statement("""
SELECT DISTINCT channel FROM {publications} WHERE channel = ANY(%(channels)s::text[])""")


def waiting(executor: Autocommit, channels: Iterable[str]) -> set[str]:
    """Return the channels that have publications to be delivered."""
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
