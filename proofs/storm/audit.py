"""What became of every durable task, noted by the store itself: by triggers, in the transactions that did it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

TRIGGERS = """
CREATE SCHEMA storm;
CREATE TABLE storm.moves (
  id bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
  xact xid8 NOT NULL DEFAULT pg_current_xact_id(), move text NOT NULL, task_id text NOT NULL, task text,
  generation int, worker bigint, pid int, worker_is_dead boolean, reason text);
CREATE FUNCTION storm.note_message() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO storm.moves (move, task_id, task, generation) VALUES ('kept', new.task_id, new.task, new.generation);
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO storm.moves (move, task_id, task, generation, worker, pid)
      VALUES ('gone', old.task_id, old.task, old.generation, old.locked_by, old.locked_pid);
    RETURN NULL;
  END IF;
  IF TG_OP = 'UPDATE' AND old.locked_by IS NOT NULL AND new.locked_by IS DISTINCT FROM old.locked_by THEN
    INSERT INTO storm.moves (move, task_id, task, generation, worker, pid, worker_is_dead)
      SELECT CASE WHEN new.generation > old.generation THEN 'went on' ELSE 'released' END, old.task_id, old.task,
        old.generation, old.locked_by, old.locked_pid,
        NOT EXISTS (SELECT FROM sidejob.workers w WHERE w.id = old.locked_by AND w.dead_at IS NULL);
  ELSIF TG_OP = 'UPDATE' AND new.generation > old.generation THEN
    INSERT INTO storm.moves (move, task_id, task, generation)
      VALUES ('went on', old.task_id, old.task, old.generation);
  END IF;
  IF new.locked_by IS NOT NULL AND (TG_OP = 'INSERT' OR old.locked_by IS DISTINCT FROM new.locked_by) THEN
    INSERT INTO storm.moves (move, task_id, task, generation, worker, pid)
      VALUES ('locked', new.task_id, new.task, new.generation, new.locked_by, new.locked_pid);
  END IF;
  IF TG_OP = 'UPDATE' AND new.doom IS NOT NULL AND old.doom IS NULL THEN
    INSERT INTO storm.moves (move, task_id, task, generation, reason)
      VALUES ('doomed', new.task_id, new.task, new.generation, new.doom);
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION storm.note_dead() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO storm.moves (move, task_id, task, reason) VALUES ('buried', new.task_id, new.task, new.reason);
  ELSE
    INSERT INTO storm.moves (move, task_id, task, reason) VALUES ('dug out', old.task_id, old.task, old.reason);
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER storm_inserted AFTER INSERT ON sidejob.messages FOR EACH ROW
  WHEN (new.body IS NOT NULL) EXECUTE FUNCTION storm.note_message();
CREATE TRIGGER storm_deleted AFTER DELETE ON sidejob.messages FOR EACH ROW
  WHEN (old.body IS NOT NULL) EXECUTE FUNCTION storm.note_message();
CREATE TRIGGER storm_updated AFTER UPDATE ON sidejob.messages FOR EACH ROW
  WHEN (old.body IS NOT NULL AND (old.locked_by, old.generation, old.doom)
    IS DISTINCT FROM (new.locked_by, new.generation, new.doom)) EXECUTE FUNCTION storm.note_message();
CREATE TRIGGER storm_dead AFTER INSERT OR DELETE ON sidejob.dead FOR EACH ROW EXECUTE FUNCTION storm.note_dead()"""


@dataclass
class Story:
    """One task id, from its first row to its end."""

    task: str = ""
    moves: list[Any] = field(default_factory=list)
    begins: list[Mapping[str, Any]] = field(default_factory=list)
    """What bodies noted, in order."""
    ends: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def lives(self) -> int:
        """How often a row was made for it."""
        return len(self.of("kept"))

    @property
    def outcomes(self) -> list[str]:
        """How it ended, each time: ``success``, or why it was put into the dead set and stayed there."""
        burials = self.of("buried")
        xacts = {move.xact for move in burials}
        ended = ["success" for move in self.of("gone") if move.xact not in xacts]
        for dug_out in self.of("dug out"):
            burials.remove(next(move for move in burials if move.reason == dug_out.reason))
            ended.append("success")
        return ended + [move.reason for move in burials]

    @property
    def succeeded(self) -> bool:
        """Whether it ended well, once."""
        return self.outcomes == ["success"]

    @property
    def ended_after_it_was_called_lost(self) -> bool:
        """Whether a body went on, of which the backend was told before that it was lost."""
        lost = [move.at.timestamp() for move in self.of("doomed") if move.reason == "lost"]
        return bool(lost) and any(line["at"] > min(lost) for line in self.ends)

    def of(self, *moves: str) -> list[Any]:
        """The moves of these kinds."""
        return [move for move in self.moves if move.move in moves]

    def __str__(self) -> str:
        what = [
            f"{move.move}{f' {move.reason}' if move.reason else ''}"
            f"{f' by {move.worker}/{move.pid}' if move.worker else ''} at {move.at:%H:%M:%S.%f}"
            for move in self.moves
        ]
        notes = [f"{line['event']} in {line['pid']} at {line['at']:.2f}" for line in (*self.begins, *self.ends)]
        return f"{self.task.rpartition('.')[2]}: {', '.join(what)}; {', '.join(notes)}"


def read(url: str, lines: Iterable[Mapping[str, Any]]) -> dict[str, Story]:
    """Read every story, by task id: what the store noted, and what bodies did."""
    stories: dict[str, Story] = defaultdict(Story)
    with psycopg.connect(url, autocommit=True, row_factory=namedtuple_row) as connection:
        for move in connection.execute("SELECT * FROM storm.moves ORDER BY id"):
            story = stories[move.task_id]
            story.task = story.task or move.task
            story.moves.append(move)
    for line in lines:
        if line["event"] in ("begins", "ends"):
            getattr(stories[line["id"]], line["event"]).append(line)
    return dict(stories)
