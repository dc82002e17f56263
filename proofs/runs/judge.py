"""What must have come of each job and task of a storm, and of the losses that the store has counted."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.tools.databases import Eye

TURNS, CHILDREN, SHOWN = 3, 3, 8
UNSEEN = 50
"""How many kills in a thousand may meet a process between the begin of a run in the store and the body's first line."""
TRIGGERS = """
CREATE TABLE public.freed (id bigint GENERATED ALWAYS AS IDENTITY, job bigint, run bigint, units int, before int,
  after int, ended boolean, undone boolean);
CREATE FUNCTION public.note_freed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.freed (job, run, units, before, after, ended, undone)
    VALUES (old.id, old.run_no, old.unit_no, old.losses, new.losses, new.ended_run = old.run_no,
      new.run_no < old.run_no);
  RETURN NULL;
END $$;
CREATE TRIGGER runs_freed AFTER UPDATE ON sidejob.jobs FOR EACH ROW
  WHEN (old.unit_no IS NOT NULL AND new.unit_no IS NULL) EXECUTE FUNCTION public.note_freed();
CREATE TABLE public.gone (task_id text, losses int);
CREATE FUNCTION public.note_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.gone VALUES (old.task_id, old.losses);
  RETURN NULL;
END $$;
CREATE TRIGGER runs_gone AFTER DELETE ON sidejob.messages FOR EACH ROW
  WHEN (old.body IS NOT NULL) EXECUTE FUNCTION public.note_gone()"""
OPEN = """
SELECT id::text AS id, task, status FROM jobs
WHERE parent_id IS NULL AND status NOT IN ('completed', 'failed', 'terminated')
UNION ALL SELECT task_id, task, 'kept' FROM messages WHERE body IS NOT NULL"""


def packets_of(key: int) -> list[int]:
    """Return what a job with packets reads."""
    return [key * 10 + number for number in range(TURNS)]


@dataclass
class Outcome:
    """What a storm has left."""

    kills: Counter[Any] = field(default_factory=Counter)
    took_s: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    """How many of each kind were asked for, and had an end."""
    rows: int = 0
    deaths: int = 0
    """Runs of jobs that were taken from the dead."""
    begun: int = 0
    """Those whose body had begun."""
    counted: int = 0
    unseen: int = 0
    """Losses and burials of runs whose body has noted nothing."""
    repeated: int = 0
    """Bodies of durable tasks that ran again."""
    buried: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, what: str, cases: Iterable[Any]) -> None:
        """Add a complaint, if there is any case of it."""
        found = [str(case) for case in cases]
        if found:
            self.wrong.append("\n    ".join([f"{what} ({len(found)}):", *found[:SHOWN]]))

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {kill}" for kill, count in sorted(self.kills.items()))
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.done.items()))
        return "\n  ".join([
            f"{self.kills.total()} kills ({kills}) in {self.took_s:.0f} s",
            f"asked for: {done}; {self.rows} own rows",
            f"{self.deaths} runs of jobs taken from the dead, {self.begun} had begun, {self.counted} counted as lost",
            f"durable tasks: {self.repeated} bodies repeated, {self.buried} tasks buried as lost",
            f"lost between the begin in the store and the body's first line: {self.unseen}",
            *(f"WRONG: {one}" for one in self.wrong or ["nothing"]),
        ])  # fmt: skip


def judge(
    eye: Eye, noted: str, jobs: Mapping[str, Mapping[int, int]], tasks: Mapping[str, str], broken: Sequence[str]
) -> Outcome:
    """Judge a store at rest: `jobs` by kind and key, the kinds of durable `tasks` by id, and broken rules of it."""
    outcome = Outcome(wrong=list(broken))
    notes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for line in noted.splitlines():
        what, key, number, _ = line.split()
        notes[key].append((what, int(number)))
    _judge_jobs(outcome, eye, jobs)
    _judge_rows(outcome, eye, jobs)
    _judge_losses(outcome, eye, notes)
    _judge_tasks(outcome, eye, notes, tasks)
    return outcome


def _judge_jobs(outcome: Outcome, eye: Eye, jobs: Mapping[str, Mapping[int, int]]) -> None:
    """Each job has completed with its value, and its ports hold what they must."""
    statuses = {row.id: row.status for row in eye.rows("SELECT id, status FROM jobs")}
    ends = eye.rows("SELECT job_id, outcome, result::text AS result FROM askings WHERE closed_at IS NOT NULL")
    values = {row.job_id: json.loads(row.result) for row in ends if row.result is not None}
    packets: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for row in eye.rows(
        "SELECT p.job_id, p.name, k.value::text AS value FROM packets k JOIN ports p ON p.id = k.port_id ORDER BY k.id"
    ):
        packets[row.job_id, row.name].append(json.loads(row.value))
    for kind, made in jobs.items():
        for key, job_id in made.items():
            outcome.done[kind] += 1
            if statuses.get(job_id) != "completed":
                outcome.complain(f"{kind} {key} has not completed", [statuses.get(job_id)])
            if kind in ("order", "quiet") and values.get(job_id) != _value(kind, key):
                outcome.complain(f"{kind} {key} has another value", [values.get(job_id)])
            wanted = {("order", "done"): [key], ("order", "inside"): [key], ("turns", "seen"): packets_of(key),
                      ("units", "seen"): packets_of(key)}  # fmt: skip
            found = {name: values for (of, name), values in packets.items() if of == job_id}
            if found != {name: values for (of, name), values in wanted.items() if of == kind}:
                outcome.complain(f"{kind} {key} has other packets", [found])
    rows = eye.rows("SELECT task, reason, count(*) AS count FROM dead WHERE job_id IS NOT NULL GROUP BY 1, 2")
    failed = {(row.task, row.reason): row.count for row in rows}
    rejected = {("runs.reject", "failed"): len(jobs["order"])} if jobs.get("order") else {}
    outcome.complain("other jobs in the dead set", [] if failed == rejected else [failed])


def _value(kind: str, key: int) -> Any:
    return key if kind == "quiet" else [key, key, key, [key * 10 + one for one in range(CHILDREN)], key, True, key]


def _judge_rows(outcome: Outcome, eye: Eye, jobs: Mapping[str, Mapping[int, int]]) -> None:
    """Each row is there once."""
    found = Counter((row.what, row.value) for row in eye.rows("SELECT what, value FROM public.ledger"))
    orders = [(what, key) for key in jobs.get("order", ()) for what in ("row", "packed", "undo", "give back")]
    pages = {"turns": "turn", "units": "unit"}
    wanted = Counter([
        *orders, *((what, one) for kind, what in pages.items() for key in jobs.get(kind, ()) for one in packets_of(key))
    ])  # fmt: skip
    outcome.rows = found.total()
    outcome.complain("rows that are missing", (wanted - found).items())
    outcome.complain("rows that are there too often", (found - wanted).items())


def _judge_losses(outcome: Outcome, eye: Eye, notes: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    """The death of a run that had begun is counted, but for the first in a row; no other death is."""
    freed: dict[int, list[Any]] = defaultdict(list)
    for row in eye.rows("SELECT job, run, units, before, after, ended, undone FROM public.freed ORDER BY id"):
        freed[row.job].append(row)
    for job, rows in freed.items():
        is_spared = False
        for row in rows:
            has_begun, is_counted = ("began", row.run) in notes.get(str(job), ()), row.after == row.before + 1
            told = (f"{row} of {rows} {notes.get(str(job))}",)
            if row.ended or row.undone:
                is_spared = is_spared and not row.ended
                outcome.complain("losses after the end of a run", told if row.ended and row.after else ())
                continue
            outcome.deaths += 1
            outcome.begun += has_begun
            outcome.counted += is_counted
            outcome.unseen += is_counted and not has_begun
            outcome.complain("a death counted twice", told if row.after not in (row.before, row.before + 1) else ())
            must_count = has_begun and (row.units or row.before or is_spared)
            outcome.complain("a death that was not counted", told if must_count and not is_counted else ())
            is_spared = (is_spared or not is_counted) and not row.units


def _judge_tasks(
    outcome: Outcome, eye: Eye, notes: Mapping[str, Sequence[tuple[str, int]]], tasks: Mapping[str, str]
) -> None:
    """A task that may be repeated has ended well, another has begun at most once; its losses are its begins but one."""
    dead = {row.task_id: row.reason for row in eye.rows("SELECT task_id, reason FROM dead WHERE job_id IS NULL")}
    losses = {row.task_id: row.losses for row in eye.rows("SELECT task_id, losses FROM public.gone")}
    for task_id, kind in tasks.items():
        whats = Counter(what for what, _ in notes.get(task_id, ()))
        outcome.done[kind] += 1
        told = f"{kind} {task_id} {dict(whats)} losses {losses.get(task_id)} {dead.get(task_id)}"
        if kind == "again":
            outcome.repeated += max(whats["began"] - 1, 0)
            lost = losses.get(task_id, 0)
            if not whats["ended"] or task_id in dead:
                outcome.complain("has not ended well", [told])
            outcome.unseen += max(lost - (whats["began"] - 1), 0)
            if lost < whats["began"] - 2:
                outcome.complain("deaths that were not counted", [told])
            continue
        outcome.buried += task_id in dead
        if whats["began"] > 1:
            outcome.complain("was repeated", [told])
        if (task_id in dead) == bool(whats["ended"]) and not (task_id in dead and dead[task_id] == "lost"):
            outcome.complain("has not ended once", [told])
        outcome.unseen += not whats["began"]
