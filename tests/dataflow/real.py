"""The same world on a real Postgres: jobs whose runs follow a script, and crashes at named instants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_sidejob import NO_DATA, Job, RunningJob
from celery_sidejob.model.crash_points import Died
from celery_sidejob.operations.changes.follow_up import apply_due, deliver_page
from celery_sidejob.store import publications
from tests.dataflow.model import NONE, Key, Options
from tests.tools.in_process import Stage
from tests.twins.real import RealTwin, Refused, crash

LOOK = """
SELECT j.status, (SELECT json_agg(json_build_array(p.direction, p.name,
    CASE WHEN p.default_value IS NULL THEN '[]'::json ELSE json_build_array(p.default_value) END, p.channels,
    (SELECT json_agg(json_build_array(k.value, k.context) ORDER BY k.id) FROM packets k WHERE k.port_id = p.id),
    (SELECT json_agg(s.channel) FROM subscriptions s WHERE s.port_id = p.id)))
  FROM ports p WHERE p.job_id = j.id)
FROM jobs j WHERE j.id = ANY(%s) ORDER BY j.id"""


class Real(RealTwin):
    """Does with jobs what `World` does with its own."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.task = stage.task(self._body, name="dataflow.node", inports=["a", "b"], outports=["o"])
        stage.sql("CREATE TABLE IF NOT EXISTS public.effects (id bigint GENERATED ALWAYS AS IDENTITY, value json)")
        self.jobs: list[Job] = []
        self._script: Any = None

    def begin(self, parents: Sequence[int | None]) -> None:
        """Make a new world."""
        self.empty()
        self.stage.sql("DELETE FROM public.effects")
        self.worker = self.stage.new_worker()
        self.jobs = []
        for number, parent in enumerate(parents):
            above = {} if parent is None else {"parent": self.jobs[parent], "child_name": str(number)}
            self.jobs.append(self.task.enqueue(**above))

    def look(self) -> tuple[list[Any], list[Any]]:
        """The whole world: jobs, and effects."""
        self.sweep()
        number_of = {job.id: number for number, job in enumerate(self.jobs)}
        found = []
        for status, ports in self.stage.sql(LOOK, [job.id for job in self.jobs]):
            seen = {}
            for direction, name, default, channels, packets, subscribed in ports:
                assert sorted(subscribed or []) == (sorted(channels) if direction == "in" else [])
                told = [[value, _renumbered(context, number_of)] for value, context in packets or []]
                seen[direction, name] = (default, channels, told)
            found.append((status, seen))
        return found, [value for (value,) in self.stage.sql("SELECT value FROM public.effects ORDER BY id")]

    def sweep(self) -> None:
        """Do what a process that died, or a transaction that nobody watched, has left to the sweeper."""
        runtime = self.stage.runtime
        for channel in publications.channels(runtime.connections, after="", limit=100):
            while deliver_page(runtime, channel):
                pass
        apply_due(runtime, 100)

    # -- what clients do -----------------------------------------------------------------------------------------

    def port(self, key: Key) -> Any:
        job, direction, name = key
        handle = Job(self.jobs[job].id, runtime=self.stage.runtime)
        return handle.input(name) if direction == "in" else handle.output(name)

    def write(self, key: Key, values: Sequence[Any], how: str = "plain") -> None:
        options = {"notify": how != "quiet", "set_default": how == "default"}
        with self.stage.sidejob.port_options(**options):
            self.port(key).write_many(values)

    def write_in_transaction(self, key: Key, values: Sequence[Any], commits: bool) -> None:
        with self.transaction(commits) as connection:
            self.port(key).write_many(values, transaction=connection)

    def read(self, key: Key) -> Any:
        return _shown(self.port(key).read())

    def read_in_transaction(self, key: Key, commits: bool) -> Any:
        with self.transaction(commits) as connection:
            return _shown(self.port(key).read(transaction=connection))

    def read_many(self, key: Key, most: int) -> list[Any]:
        return self.port(key).read_many(most)  # type: ignore[no-any-return]

    def drain(self, key: Key) -> list[Any]:
        return list(self.port(key))

    def measure(self, key: Key) -> tuple[int, bool]:
        port = self.port(key)
        return len(port), port.has_data

    def publish(self, channel: str, value: Any) -> int:
        return self.stage.sidejob.publish(channel, value)  # type: ignore[no-any-return]

    def connect(self, source: Key, targets: Sequence[Key]) -> Any:
        return self.port(source).connect_to(*map(self.port, targets))

    def set_default(self, key: Key, value: Any) -> None:
        self.port(key).default = NO_DATA if value is NONE else value

    def set_channels(self, key: Key, names: Sequence[str]) -> None:
        self.port(key).channels = names

    def configure(self, job: int, inports: Options | None, outports: Options | None) -> None:
        Job(self.jobs[job].id, runtime=self.stage.runtime).configure_ports(inports, outports)

    def ask(self, job: int, force: bool) -> None:
        self.jobs[job].run(force=force)

    # -- what runs do --------------------------------------------------------------------------------------------

    def run(self, job: int, script: Any) -> tuple[list[Any], str]:
        """Do a run by a script; return what its body saw, and how it ended."""
        self._script, self._seen = script, []
        hold = self.stage.claim(self.jobs[job], worker_id=self.worker, in_page=True)
        assert hold is not None, "a job that is queued has a run to begin"
        script.arm_end(self.at, crash)
        try:
            self.stage.perform(hold)
        except Died:
            self.lose(hold)
            self.worker = self.stage.new_worker()
            return self._seen, "crashed"
        error = self.stage.raised.pop(hold.job_id, None)
        return self._seen, type(error).__name__ if error is not None else "ended"

    def _body(self, job: RunningJob) -> None:
        self._script.play(RealRun(self, job), self._seen)


class RealRun:
    """What a script does in a run."""

    def __init__(self, real: Real, job: RunningJob) -> None:
        self._real = real
        self._job = job

    def turns(self, names: Sequence[str], commit_every: int) -> Iterator[Any]:
        for values in self._job.for_inputs(*names, commit_every=commit_every):
            yield list(values) if len(names) > 1 else [values]

    def write(self, key: Key, values: Sequence[Any]) -> None:
        self._real.port(key).write_many(values)

    def publish(self, channel: str, value: Any) -> None:
        self._real.publish(channel, value)

    def set_default(self, key: Key, value: Any) -> None:
        self._real.set_default(key, value)

    def read(self, key: Key) -> Any:
        return _shown(self._real.port(key).read())

    def checkpoint(self) -> None:
        self._job.checkpoint()

    def crash(self, when: str) -> None:
        self._real.at(f"checkpoint:{when}-commit", crash)
        self._job.checkpoint()

    def fail(self) -> None:
        raise ZeroDivisionError

    def meanwhile(self, *call: Any) -> None:
        """Have a client do something during the run."""
        with suppress(Refused):
            self._real.stage.outside(lambda: self._real.do(*call))

    def block(self, effect: Any, key: Key | None, how: str) -> None:
        """Enter an effect, and perhaps write a packet, with the unit; then commit, roll back, or crash."""
        with self._real.stage.connect(autocommit=False) as connection:
            with self._job.unit(transaction=connection):
                connection.execute("INSERT INTO public.effects (value) VALUES (%s)", [json.dumps(effect)])
                if key is not None:
                    self.write(key, [effect])
                if how == "crash in it":
                    raise Died
            if how == "crash before":
                raise Died
            if how == "roll back":
                connection.rollback()
            else:
                connection.commit()
            if how == "crash after":
                raise Died
        self._real.sweep()


def _shown(value: Any) -> Any:
    return NONE if value is NO_DATA else value


def _renumbered(context: Any, number_of: dict[int, int]) -> dict[str, Any]:
    return {key: number_of[value] if key == "job" else value for key, value in (context or {}).items()}
