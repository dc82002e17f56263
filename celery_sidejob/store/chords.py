"""Rows of `chords` and `chord_parts`: how many parts of a chord have ended, and how, until its body is sent.

A chord is *owed* from the moment when its last part is counted until its body is sent. The process that has counted the
last part has the claim to send it, for `CLAIM_S`; after that the sweeper may claim it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from .connection.connections import Connections
from .results import GIVEN, IS_GIVEN, LISTENED, Kept, given, kept
from .statement import Frequent, Reader, Statement, Transaction, first

PAGE = 100
"""The most chords that one statement removes, with all their parts."""
UNSIZED_S = 86_400
"""The seconds for which chords are kept whose number of parts is not known, if others are kept for ever."""
CLAIM_S = 10
"""The seconds after which another process may send a body, unless the claim is renewed; part of the statements."""


class Part(NamedTuple):
    """The end of one part: of the task, in its `place` of the chord's header. `call` is the signature of the body.

    The chord's rows live for so many seconds without a further part. None: after `UNSIZED_S` while the number of
    parts is not known, and then never.
    """

    chord: str
    task_id: str
    place: float
    part: bytes
    call: bytes
    lives_s: float | None


@dataclass(frozen=True, slots=True)
class Owed:
    """A chord whose body must be sent, by the process with this claim; `again` if another one may have sent it."""

    chord: str
    call: bytes
    claim: datetime
    again: bool


_CLAIM = f"now() + make_interval(secs => {CLAIM_S})"
_EXPIRY = "now() + make_interval(secs => %(lives_s)s::double precision)"
_LIVES_S = f"coalesce(%(lives_s)s::double precision, {UNSIZED_S}::double precision)"
# Its size may come, or it is forgotten and a part of it has ended again.
_EXPIRY_UNTIL_SIZE = f"now() + make_interval(secs => {_LIVES_S})"
_HALF = f"now() + make_interval(secs => {_LIVES_S} / 2::double precision)"
# While it does not change the index of expiries, the row can be updated in place.
_RENEWED = f"CASE WHEN c.expires_at < {_HALF} THEN {_EXPIRY_UNTIL_SIZE} ELSE c.expires_at END"
_IS_COMPLETE = "c.counted + excluded.counted >= c.size + c.more"
_COUNT = f"""
  part AS (
    INSERT INTO {{chord_parts}} (chord, task_id, place, body)
    VALUES (%(chord)s, %(task_id)s, %(place)s::double precision, %(part)s)
    ON CONFLICT DO NOTHING RETURNING 1 AS one),
  chord AS (
    INSERT INTO {{chords}} AS c (key, counted, expires_at) SELECT %(chord)s, count(*), {_EXPIRY_UNTIL_SIZE} FROM part
    ON CONFLICT (key) DO UPDATE SET counted = c.counted + excluded.counted, expires_at = {_RENEWED},
      call = CASE WHEN {_IS_COMPLETE} THEN coalesce(c.call, %(call)s) END,
      send_at = CASE WHEN {_IS_COMPLETE} THEN
        CASE WHEN c.send_at > now() THEN c.send_at ELSE {_CLAIM} END END
    RETURNING c.send_at = {_CLAIM} AS claimed, c.call, c.send_at)"""


_FOUND = "SELECT chord.claimed, chord.call, chord.send_at, NOT EXISTS (SELECT FROM part) AS again"
_COUNT_AND_KEEP = Frequent(f"WITH {kept(f'{GIVEN} WHERE {IS_GIVEN}')}, {_COUNT} {_FOUND}, {LISTENED} FROM chord")


def count(executor: Transaction, part: Part, result: Kept | None) -> tuple[Owed | None, bool]:
    """Count a part, unless it is counted, and keep its task's result, if any.

    Returns the chord if this was the last part and its body must be sent by this process, and whether a process listens
    for the result.
    """
    row = executor.run(_COUNT_AND_KEEP, **part._asdict(), **given(result))[0]
    return (Owed(part.chord, row.call, row.send_at, row.again) if row.claimed else None), bool(row.listened)


_SET_SIZE = Statement(f"""
INSERT INTO {{chords}} AS c (key, size, expires_at) VALUES (%(chord)s, %(size)s::integer, {_EXPIRY})
ON CONFLICT (key) DO UPDATE SET size = excluded.size,
  expires_at = CASE WHEN excluded.expires_at IS NOT NULL THEN {_RENEWED} END""")


def set_size(executor: Transaction, chord: str, size: int, *, expires_s: float | None) -> None:
    """Set the number of a chord's parts, of which some may be counted; it is set before the last part is sent."""
    executor.run(_SET_SIZE, chord=chord, size=size, lives_s=expires_s)


_ADD = Statement(f"""
INSERT INTO {{chords}} AS c (key, more, expires_at) VALUES (%(chord)s, 1, {_EXPIRY_UNTIL_SIZE})
ON CONFLICT (key) DO UPDATE SET more = c.more + 1, expires_at = {_RENEWED}""")


def add(executor: Transaction, chord: str, *, expires_s: float | None) -> None:
    """Add one to the number of a chord's parts."""
    executor.run(_ADD, chord=chord, lives_s=expires_s)


_PARTS = Statement("SELECT p.body FROM {chord_parts} p WHERE p.chord = %(chord)s ORDER BY p.place, p.task_id")


def parts(executor: Reader, chord: str) -> Sequence[bytes]:
    """Read how the parts have ended, in the order of the chord's header."""
    return [row.body for row in executor.run(_PARTS, chord=chord)]


_RENEW = Statement("""
UPDATE {chords} SET send_at = now() + make_interval(secs => %(for_s)s::double precision)
WHERE key = %(chord)s AND send_at = %(claim)s::timestamptz RETURNING send_at""")


def renew(executor: Transaction, owed: Owed, *, for_s: float) -> Owed | None:
    """Renew a claim for so many seconds; None if another process has claimed the chord, or has sent its body."""
    row = first(executor.run(_RENEW, chord=owed.chord, claim=owed.claim, for_s=for_s))
    return None if row is None else Owed(owed.chord, owed.call, row.send_at, owed.again)


_REMOVE = Statement("DELETE FROM {chords} WHERE key = %(chord)s AND send_at = %(claim)s::timestamptz RETURNING key")


def remove(executor: Transaction, owed: Owed) -> bool:
    """Forget a chord, whose body is sent by this transaction or before it; False if this claim is no longer valid."""
    return bool(executor.run(_REMOVE, chord=owed.chord, claim=owed.claim))


_CLAIM_LATE = Statement(f"""
UPDATE {{chords}} c SET send_at = {_CLAIM} WHERE c.key = ANY(ARRAY(
  SELECT l.key FROM {{chords}} l WHERE l.send_at <= now() ORDER BY l.send_at LIMIT %(limit)s::integer
  FOR UPDATE SKIP LOCKED)) RETURNING c.key, c.call, c.send_at""")


def claim_late(executor: Transaction, *, limit: int) -> Sequence[Owed]:
    """Claim chords whose bodies were not sent in time: the process with the claim has probably died."""
    return [Owed(row.key, row.call, row.send_at, again=True) for row in executor.run(_CLAIM_LATE, limit=limit)]


_PRUNE = Statement(f"""
DELETE FROM {{chords}} WHERE key = ANY(ARRAY(
  SELECT c.key FROM {{chords}} c WHERE c.expires_at <= now() AND c.send_at IS NULL ORDER BY c.expires_at
  LIMIT {PAGE} FOR UPDATE SKIP LOCKED)) RETURNING key""")


def prune(connections: Connections) -> bool:
    """Remove a page of chords whose parts have not come for long; tell whether there may be more."""
    return len(connections.transact("prune", lambda executor: executor.run(_PRUNE), single=True)) == PAGE
