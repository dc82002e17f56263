"""Rows of `packets`: the data on ports, in the order of their identity column.

A packet of another job's port is *taken* for a run. A packet of the job's own input ports is taken only if another
reader has been faster before. A taken packet is free again when its run is no longer current: no UPDATE gives it back,
because its taker may be dead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..model.changes import PortKey
from .statement import Frequent, Reader, Statement, Transaction

_INSERT = Frequent("""
WITH r AS (
  SELECT * FROM json_to_recordset(%(rows)s::json)
    AS r(n int, port_id bigint, value text, context text, options text)),
written AS (
  INSERT INTO {packets} (port_id, value, context, options, limited)
  SELECT r.port_id, r.value::json, r.context::json, r.options::json, CASE WHEN p.packet_limit > 0 THEN true END
  FROM r JOIN {ports} p ON p.id = r.port_id
  ORDER BY r.n)
SELECT p.id, p.channels, p.packet_limit FROM {ports} p WHERE p.id IN (SELECT port_id FROM r)""")


def write(executor: Transaction, rows: Iterable[tuple[int, str, str | None, str | None]]) -> dict[int, Any]:
    """Append packets (port id, value, context, options), in this order; a port that is gone is skipped.

    Returns each remaining port's channels and limit, {port id: row}. Either the port's job is locked, and identity
    order is commit order per port; or a borrowed transaction writes, and it is so per writer.
    """
    records = [
        {"n": n, "port_id": port_id, "value": value, "context": context, "options": options}
        for n, (port_id, value, context, options) in enumerate(rows)
    ]
    return {row.id: row for row in executor.run(_INSERT, rows=json.dumps(records))}


_FREE = """(p.taken_by IS NULL OR NOT EXISTS (
    SELECT FROM {jobs} t WHERE t.id = p.taken_by AND t.run_no = p.taken_run AND t.unit_no IS NOT NULL))"""

_MINE = "(p.taken_by = %(job_id)s::bigint AND p.taken_run = %(run_no)s::bigint)"

_UNSEEN = "p.id NOT IN (SELECT unnest(%(seen)s::bigint[]))"
"""Whether a packet is none of those `seen`: Postgres hashes them, and would compare `<> ALL` with each of them."""

_PORT = "o.job_id = %(owner_id)s::bigint AND o.direction = %(direction)s::text AND o.name = %(name)s::text"
"""The one row `o` of `ports` that a `PortKey` names."""

_COLUMNS = "id, {0}.value::text AS value, {0}.context::text AS context, {0}.options::text AS options, {0}.written_at"

_IF_EMPTY = """
CASE WHEN {0}.id IS NULL THEN o.default_value::text END AS default_value,
CASE WHEN {0}.id IS NULL THEN o.channels END AS channels"""
"""Turns an empty port into a row without a packet: its `id` is None, and it has the port's default and channels."""

_READ_AHEAD = Frequent(f"""
SELECT o.id AS port_id, p.{_COLUMNS.format("p")}, {_IF_EMPTY.format("p")}
FROM {{ports}} o LEFT JOIN LATERAL (
  SELECT p.* FROM {{packets}} p
  WHERE p.port_id = o.id AND {_UNSEEN} AND ({_FREE} OR {_MINE})
  ORDER BY p.id LIMIT %(limit)s) p ON true
WHERE {_PORT} ORDER BY p.id""")


def read_ahead(
    executor: Reader,
    port: PortKey,
    *,
    limit: int | None,
    seen: Sequence[int] = (),
    job_id: int | None = None,
    run_no: int | None = None,
) -> list[Any]:
    """Read the next packets of a port without removing or locking them, including those taken for the asking run.

    With `limit=None` that is all of them. Packets read before are excluded by id, not by position: a lower id may be
    committed after a higher one. For an empty port returns one row without a packet (`_IF_EMPTY`); no row means that
    there is no such port.
    """
    return list(executor.run(_READ_AHEAD, **_named(port), seen=list(seen), limit=limit, job_id=job_id, run_no=run_no))


def peek(executor: Reader, port: PortKey, **options: Any) -> list[Any]:
    """Read the next packets of a port as `read_ahead` does, without any effect."""
    return [row for row in read_ahead(executor, port, **options) if row.id is not None]


_LOCKED = "{0}.ctid = ANY(ARRAY(SELECT place FROM free))"
"""Whether a row of `packets` is one of those which the CTE `free` has found and locked.

They are found again by their ctid, so that no plan reads the table once for each: Postgres may take a full table for
empty (`outbox/kinds.py`). A row that was changed between the statement's start and its lock has another ctid by then.
It is not found, and is treated as if it were still locked.
"""


def _passed_over(read: str) -> str:
    """Return SQL for whether a packet older than those `read` remains: it may be one that is just being marked.

    Only on a port with a limit (a row of `o`), and only if the packet was written before: see `room.mark`.
    """
    return f"""(
  SELECT o.packet_limit IS NOT NULL AND EXISTS (
    SELECT FROM {{packets}} p WHERE p.port_id = o.id AND p.limited IS NULL AND {_FREE}
      AND p.id < coalesce((SELECT min(id) FROM {read}), {2**63 - 1}))
  FROM o) AS passed_over"""


_TAKE = Statement(f"""
WITH o AS (SELECT o.id, o.packet_limit FROM {{ports}} o WHERE {_PORT}),
free AS (
  SELECT p.ctid AS place FROM {{packets}} p
  WHERE p.port_id = (SELECT id FROM o) AND (
    {_FREE} AND NOT (p.taken_by IS NOT DISTINCT FROM %(job_id)s AND p.taken_run IS NOT DISTINCT FROM %(run_no)s)
    OR %(again)s AND {_MINE} AND {_UNSEEN})
  ORDER BY p.id LIMIT %(limit)s FOR UPDATE OF p SKIP LOCKED),
taken AS (
  UPDATE {{packets}} q SET taken_by = %(job_id)s, taken_run = %(run_no)s
  WHERE {_LOCKED.format("q")}
  RETURNING q.port_id, q.{_COLUMNS.format("q")})
SELECT taken.*, {_passed_over("taken")} FROM taken""")


def take(
    executor: Transaction,
    port: PortKey,
    *,
    job_id: int,
    run_no: int,
    limit: int | None,
    again: bool = False,
    seen: Sequence[int] = (),
) -> list[Any]:
    """Take free packets of a port for a run, oldest first, except those that another open transaction is reading.

    With `limit=None` all of them are taken. `again`: the answer to an earlier take of this run was lost, so packets
    that the run has taken, and has not `seen`, are taken too. `passed_over`: see `pop`.
    """
    found = executor.run(
        _TAKE, **_named(port), job_id=job_id, run_no=run_no, limit=limit, again=again, seen=list(seen) if again else []
    )
    return sorted(found, key=lambda row: row.id)


CONSUME = f"""
WITH r AS MATERIALIZED (
  SELECT o.port_id, o.first, o.last, o.ids::bigint[] AS ids
  FROM unnest(%(port_ids)s::bigint[], %(firsts)s::bigint[], %(lasts)s::bigint[], %(packet_ids)s::text[])
    AS o(port_id, first, last, ids))
DELETE FROM {{packets}} p USING r
WHERE p.port_id = r.port_id AND p.id BETWEEN r.first AND r.last AND p.id = ANY(r.ids) AND (
  (p.taken_by = %(id)s::bigint AND p.taken_run = %(run_no)s::bigint)
  OR {_FREE}
    AND EXISTS (SELECT FROM {{ports}} o WHERE o.id = p.port_id AND o.job_id = %(id)s::bigint))
RETURNING p.port_id, p.limited"""
"""Removes the packets that a unit has read, if they still belong to the run; returns a row for each."""

_CONSUME = Frequent(CONSUME)


def consume(executor: Transaction, read: Sequence[tuple[int, int]], *, job_id: int, run_no: int) -> Sequence[Any]:
    """Remove the packets that a unit has read, (port id, packet id), if they still belong to the run.

    Returns a row for each: the port, and whether it has a limit.
    """
    return executor.run(_CONSUME, **those(read), id=job_id, run_no=run_no)


STRETCH = 500
"""The most packets of a port that `CONSUME` compares with each other."""


def those(read: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
    """Return packets, (port id, packet id), as parameters of `CONSUME`: stretches of a port, each with its packets.

    A stretch is one range of the index, in which nearly all packets were read. And if Postgres takes a full table for
    empty (`outbox/kinds.py`), and reads it as a whole for each row of `r`, the rows of `r` are few.
    """
    of_ports: dict[int, list[int]] = {}
    for port, packet in read:
        of_ports.setdefault(port, []).append(packet)
    stretches = [
        (port, ids[start : start + STRETCH])
        for port, ids in ((port, sorted(ids)) for port, ids in of_ports.items())
        for start in range(0, len(ids), STRETCH)
    ]
    return {
        "port_ids": [port for port, _ in stretches],
        "firsts": [ids[0] for _, ids in stretches],
        "lasts": [ids[-1] for _, ids in stretches],
        "packet_ids": ["{" + ",".join(map(str, ids)) + "}" for _, ids in stretches],
    }


_RELEASE = Statement("""
UPDATE {packets} p SET taken_by = NULL, taken_run = NULL
FROM {ports} o LEFT JOIN {jobs} j ON j.id = o.job_id
WHERE p.taken_by = %(job_id)s AND p.taken_run = %(run_no)s AND o.id = p.port_id
RETURNING CASE o.direction WHEN 'in' THEN o.job_id ELSE j.parent_id END AS reader""")


def release(executor: Transaction, job_id: int, run_no: int) -> set[int]:
    """Free the packets that a run took and did not consume; return their usual readers, which may have found none."""
    return {row.reader for row in executor.run(_RELEASE, job_id=job_id, run_no=run_no)} - {None, job_id}


_POP = f"""
WITH o AS (SELECT o.id, o.default_value, o.channels, o.packet_limit FROM {{ports}} o WHERE {_PORT}),
free AS (
  SELECT p.ctid AS place FROM {{packets}} p WHERE p.port_id = (SELECT id FROM o) AND {_FREE}
  ORDER BY p.id LIMIT %s FOR UPDATE OF p SKIP LOCKED),
gone AS (
  DELETE FROM {{packets}} q WHERE {_LOCKED.format("q")}
  RETURNING q.{_COLUMNS.format("q")}, q.limited)
SELECT o.id AS port_id, gone.*, {_IF_EMPTY.format("gone")}, {_passed_over("gone")}
FROM o LEFT JOIN gone ON true"""

_POP_ONE = Statement(_POP.replace("%s", "1"))

_POP_MANY = Statement(_POP.replace("%s", "%(limit)s") + " ORDER BY gone.id")


def pop(executor: Transaction, port: PortKey, *, limit: int) -> Sequence[Any]:
    """Read and remove the oldest free packets, as a client does: in a transaction of ours, or in the caller's.

    For an empty port returns a row without a packet (`_IF_EMPTY`); no row means that there is no such port. Packets
    that another transaction has locked are passed over. `passed_over`: the lock may belong to no reader, but to a run
    that waits for room on the port. So the packets are read again once that run has unlocked the port (`room.lock`).
    """
    if limit == 1:
        return executor.run(_POP_ONE, **_named(port))
    return executor.run(_POP_MANY, **_named(port), limit=limit)


_MOVE = Statement(f"""
WITH free AS (
  SELECT p.ctid AS place FROM {{packets}} p WHERE p.port_id = %(source)s AND {_FREE}
  ORDER BY p.id FOR UPDATE OF p SKIP LOCKED),
gone AS (
  DELETE FROM {{packets}} q WHERE {_LOCKED.format("q")} RETURNING q.*),
moved AS (
  INSERT INTO {{packets}} (port_id, value, context, options, limited)
  SELECT t.id, gone.value, gone.context, gone.options, CASE WHEN t.packet_limit > 0 THEN true END
  FROM gone CROSS JOIN {{ports}} t WHERE t.id = ANY(%(targets)s::bigint[]) ORDER BY gone.id)
SELECT gone.{_COLUMNS.format("gone")}, gone.port_id, gone.limited FROM gone ORDER BY gone.id""")


def move(executor: Transaction, source: int, targets: Sequence[int]) -> Sequence[Any]:
    """Remove all free packets of a port, and append each to every target, in order; return them as they were.

    A packet that another open transaction is reading stays, as for other readers. The jobs of the targets are locked,
    or a borrowed transaction writes (see `write`).
    """
    return executor.run(_MOVE, source=source, targets=list(targets))


_COUNT = Statement(f"""
SELECT (SELECT count(*) FROM {{packets}} p
  WHERE p.port_id = o.id AND {_UNSEEN} AND ({_FREE} OR {_MINE})) AS packets
FROM {{ports}} o WHERE {_PORT}""")


def count(
    executor: Reader, port: PortKey, *, seen: Sequence[int] = (), job_id: int | None = None, run_no: int | None = None
) -> int:
    """Count the packets that wait on a port, with those taken for the run that asks; 0 if there is no such port."""
    found = executor.run(_COUNT, **_named(port), seen=list(seen), job_id=job_id, run_no=run_no)
    return int(found[0].packets) if found else 0


def _named(port: PortKey) -> dict[str, Any]:
    return dict(zip(("owner_id", "direction", "name"), port, strict=True))


COUNTED = 10_000
"""The most packets of a port that are counted when a job is shown; one more stands for any larger number."""

_COUNT_FEW = Statement(f"""
SELECT count(*) AS packets FROM (
  SELECT FROM {{packets}} p JOIN {{ports}} o ON o.id = p.port_id WHERE {_PORT} AND {_FREE} LIMIT {COUNTED + 1}) few""")


def count_few(executor: Reader, port: PortKey) -> int:
    """Count the packets that wait on a port, up to `COUNTED` and one."""
    return int(executor.run(_COUNT_FEW, **_named(port))[0].packets)


_COUNT_BY_PORT = Statement(f"""
SELECT o.id AS port_id, (SELECT count(*) FROM (
    SELECT FROM {{packets}} p WHERE p.port_id = o.id AND {_FREE} ORDER BY p.id LIMIT {COUNTED + 1}) few) AS packets
FROM {{ports}} o WHERE o.job_id = %(job_id)s""")


def count_by_port(executor: Reader, job_id: int) -> dict[int, int]:
    """Count the packets that wait on each port of a job, {port id: packets}, for a port up to `COUNTED` and one."""
    return {row.port_id: row.packets for row in executor.run(_COUNT_BY_PORT, job_id=job_id)}
