"""Rows of `steps`: the finished parts of a job's runs, until it completes.

`jobs.has_steps` is true while a job has rows, and false once a completion has removed them: a late event, such as the
end of a child, then asks for no further run, which would do the steps again. It is NULL if the asking that completed
last had none, and late events ask again. A run of a job that never had steps asks nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from ..model.changes import BeginAnew, CopySteps, FinishSteps, ForgetSteps, KeepStep, LeaveTurns, StepChange
from .statement import Frequent, Reader, Statement, Transaction

MOST_TOLD = 100
"""The most steps in the history of a completed job."""

_COLUMNS = "job_id, turn, name, number, kind, run_no, done, tries, due_at, value, error, began_at, took_s, worker"


def _kept(source: str) -> str:
    """Return the SQL that makes or replaces the record of a step, for each row of `source`."""
    return f"""
INSERT INTO {{steps}} AS s ({_COLUMNS})
SELECT %(job_id)s::bigint, %(turn)s::text, %(name)s::text, %(number)s::int, %(kind)s::text, %(run_no)s::bigint,
  %(done)s::boolean, %(tries)s::int,
  coalesce(%(due_at)s::timestamptz, now() + make_interval(secs => %(wait_s)s::double precision)),
  %(value)s::text::json, %(error)s::text::json,
  now() - make_interval(secs => %(took_s)s::double precision), %(took_s)s::double precision,
  (SELECT w.ident FROM {{workers}} w WHERE w.id = %(worker_id)s::bigint)
FROM {source}
ON CONFLICT (job_id, turn, name, number) DO UPDATE SET kind = excluded.kind, run_no = excluded.run_no,
  done = excluded.done, tries = excluded.tries, due_at = excluded.due_at, value = excluded.value,
  error = excluded.error, took_s = excluded.took_s, worker = excluded.worker,
  began_at = CASE WHEN excluded.kind = 'step' OR s.done THEN excluded.began_at ELSE s.began_at END"""


_KEEP = Statement(f"""
WITH marked AS (
  UPDATE {{jobs}} SET has_steps = true WHERE id = %(job_id)s::bigint AND has_steps IS NOT TRUE)
{_kept("(SELECT) one")}""")

_KEEP_ALONE = Frequent(f"""
WITH fenced AS (
  UPDATE {{jobs}} SET unit_no = unit_no + 1, losses = 0, started = true, has_steps = true
  WHERE id = %(job_id)s::bigint AND run_no = %(run_no)s::bigint AND unit_no = %(unit_no)s
    AND worker_id = %(worker_id)s::bigint
  RETURNING id)
{_kept("fenced")}
RETURNING s.job_id""")


_FIELDS = tuple(field.name for field in fields(KeepStep))


def _given(record: KeepStep) -> dict[str, Any]:
    """Return a record as parameters; `asdict` would copy each value, which takes a fifth of a step."""
    return {name: getattr(record, name) for name in _FIELDS}


def keep_alone(executor: Transaction, record: KeepStep, *, unit_no: int) -> bool:
    """Pass the fence of the run that has made a record, and keep the record: a unit of its own, in one statement.

    Returns False, and does nothing, if the run is not the job's current run, or this unit was applied already.
    """
    return bool(executor.run(_KEEP_ALONE, unit_no=unit_no, **_given(record)))


_FORGET = Statement("""
DELETE FROM {steps} s USING json_to_recordset(%(names)s::json) AS r(name text, number int)
WHERE s.job_id = %(job_id)s AND s.name = r.name AND (r.number IS NULL OR s.number = r.number)
  AND (%(turn)s::text IS NULL OR s.turn = %(turn)s::text)
RETURNING s.name""")

_LEAVE_TURNS = Statement("DELETE FROM {steps} WHERE job_id = %(job_id)s AND turn <> ''")

_DONE = "s.done AND (s.kind <> 'sleep' OR s.due_at <= now())"
"""Whether a step is over, as SQL; a sleep is over without a statement that would say so."""

_TOOK = """CASE WHEN {0}.kind <> 'sleep' THEN {0}.took_s
    ELSE greatest(extract(epoch FROM least({0}.due_at, now()) - {0}.began_at), 0)::double precision END"""
"""How long a step took, as SQL, or how long a sleep has lasted by now."""

_FINISH = Statement(f"""
WITH marked AS (
  UPDATE {{jobs}} SET has_steps = CASE WHEN %(of_body)s THEN false END WHERE id = %(job_id)s),
unmarked AS (
  UPDATE {{ports}} SET received = NULL
  WHERE job_id = %(job_id)s AND direction = 'in' AND name = ANY(%(reads)s::text[]) AND received),
gone AS (
  DELETE FROM {{steps}} WHERE job_id = %(job_id)s RETURNING id, name, number, kind, tries, took_s, began_at, due_at),
told AS (
  INSERT INTO {{job_log}} (job_id, at, what, run_no, worker, detail)
  SELECT %(job_id)s, now(), 'steps', %(run_no)s, (SELECT w.ident FROM {{workers}} w WHERE w.id = %(worker_id)s),
    json_build_object('count', (SELECT count(*) FROM gone WHERE number > 0), 'steps', json_agg(json_build_object(
      'name', g.name, 'number', g.number, 'kind', g.kind, 'tries', g.tries,
      'took_s', {_TOOK.format("g")}) ORDER BY g.id))
  FROM (SELECT * FROM gone WHERE number > 0 ORDER BY id LIMIT %(most)s) g
  HAVING count(*) > 0 AND %(keep)s::bigint > 0
  RETURNING id)
DELETE FROM {{job_log}} WHERE job_id = %(job_id)s AND id = ANY(ARRAY(
  SELECT l.id FROM {{job_log}} l WHERE l.job_id = %(job_id)s ORDER BY l.job_id, l.id DESC
  OFFSET %(keep)s::bigint - (SELECT count(*) FROM told)))""")

_BEGIN_ANEW = Statement("""
WITH asked AS (
  SELECT j.id, j.run_no, j.has_steps, j.unit_no FROM {jobs} j
  WHERE j.id = %(job_id)s AND (%(force)s OR j.status NOT IN ('failed', 'terminating', 'terminated'))),
gone AS (
  DELETE FROM {steps} s USING asked WHERE s.job_id = asked.id AND s.number > 0)
INSERT INTO {steps} (job_id, turn, name, number, kind, run_no, done, tries)
SELECT id, '', '', 0, 'fresh', run_no, true, 0 FROM asked WHERE has_steps OR unit_no IS NOT NULL
ON CONFLICT (job_id, turn, name, number) DO UPDATE SET run_no = excluded.run_no""")
"""Removes the records, and leaves a row of the kind `fresh`, with the number 0.

A run in progress may yet keep records. They have its number, which is not above that of this row, so no later run reads
them (`_CURRENT`). Without records and without a run in progress it is not needed.
"""

_CURRENT = """s.number > 0 AND s.run_no > coalesce((
    SELECT f.run_no FROM {steps} f WHERE f.job_id = s.job_id AND f.turn = '' AND f.name = '' AND f.number = 0), -1)"""
"""Whether a record is newer than the job's last fresh beginning, as SQL."""

_COPY = Statement(f"""
WITH copied AS (
  INSERT INTO {{steps}} ({_COLUMNS})
  SELECT %(job_id)s, s.turn, s.name, s.number, s.kind, 0, s.done, s.tries, s.due_at, s.value, s.error, s.began_at,
    s.took_s, s.worker
  FROM {{steps}} s
  WHERE s.job_id = %(source)s AND s.turn = '' AND {_DONE} AND {_CURRENT}
    AND s.id < coalesce((
      SELECT b.id FROM {{steps}} b
      WHERE b.job_id = s.job_id AND b.turn = '' AND b.name = %(name)s AND b.number = %(number)s), 9223372036854775807)
  ORDER BY s.id
  RETURNING id)
UPDATE {{jobs}} SET has_steps = true WHERE id = %(job_id)s AND EXISTS (SELECT FROM copied)""")


def apply(executor: Transaction, change: StepChange, *, keep: int) -> None:
    """Apply a change of a job that is locked; `keep`: how many entries its history keeps."""
    match change:
        case KeepStep():
            executor.run(_KEEP, **_given(change))
        case ForgetSteps(job_id, names, turn):
            rows = [{"name": name, "number": number} for name, number in names]
            executor.run(_FORGET, job_id=job_id, names=json.dumps(rows), turn=turn)
        case LeaveTurns(job_id):
            executor.run(_LEAVE_TURNS, job_id=job_id)
        case FinishSteps():
            given = asdict(change) | {"reads": list(change.reads)}
            executor.run(_FINISH, most=MOST_TOLD, keep=keep, **given)
        case BeginAnew(job_id, force):
            executor.run(_BEGIN_ANEW, job_id=job_id, force=force)
        case CopySteps(job_id, source, before):
            name, number = before or ("", -1)
            executor.run(_COPY, job_id=job_id, source=source, name=name, number=number)


_READ = Frequent(f"""
SELECT s.id, s.turn, s.name, s.number, s.kind, s.run_no, {_DONE} AS done, s.tries, s.due_at,
  s.value::text AS value, s.error::text AS error, s.began_at, s.worker,
  extract(epoch FROM s.due_at - now())::double precision AS left_s,
  extract(epoch FROM now() - s.began_at)::double precision AS waited_s, {_TOOK.format("s")} AS took_s
FROM {{steps}} s WHERE s.job_id = %(job_id)s AND {_CURRENT}
ORDER BY s.id""")


def read(executor: Reader, job_id: int) -> Sequence[Any]:
    """Read the records of a job in the order in which its steps began; `left_s`: how long a step still waits."""
    return executor.run(_READ, job_id=job_id)


_ENDS = Statement("""
SELECT j.id, j.parent_id, j.status, a.outcome, a.result::text AS result,
  EXISTS (SELECT FROM {askings} o WHERE o.job_id = j.id AND o.closed_at IS NULL) AS is_open
FROM unnest(%(ids)s::bigint[]) AS i(id) CROSS JOIN LATERAL (
    SELECT x.id, x.parent_id, x.status FROM {jobs} x WHERE x.id = i.id OFFSET 0) j
  LEFT JOIN LATERAL (
    SELECT c.outcome, c.result FROM {askings} c WHERE c.job_id = j.id AND c.closed_at IS NOT NULL
    ORDER BY c.closed_at DESC LIMIT 1) a ON true""")


def ends(executor: Reader, job_ids: Iterable[int]) -> dict[int, Any]:
    """Read jobs' parents, how their last closed askings have ended, and whether one is open; without deleted jobs."""
    return {row.id: row for row in executor.run(_ENDS, ids=list(job_ids))}


_TAKEN = Statement("""
SELECT c.name FROM {jobs} c WHERE c.parent_id = %(job_id)s AND c.name = ANY(%(names)s::text[])""")


def taken(executor: Reader, job_id: int, names: Iterable[str]) -> set[str]:
    """Return the names among these that children of the job have."""
    return {row.name for row in executor.run(_TAKEN, job_id=job_id, names=list(names))}
