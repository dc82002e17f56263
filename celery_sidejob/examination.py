"""Everything that `doctor` finds: about the stores, the broker, the announcements and the app's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from .diagnosis import database, work, workers
from .diagnosis.database import Check, findings_of, look
from .hooks import announcing, task_options
from .hooks.broker import broker_check
from .model.errors import SchemaError, SettingsError, StoreUnavailableError
from .model.finding import Finding, error
from .operations.runtime import Runtime
from .store import health
from .store.statement import Transaction

OF_FIRST_STORE: tuple[Check, ...] = (
    database.rights, work.queues, work.tasks, work.paused, work.schedules, work.timers,
    work.full_ports, workers.workers, workers.sweeping, work.results, work.dead,
    database.retention, database.references, database.vacuum, database.horizon, database.locks,
)  # fmt: skip
OF_JOBS = {work.schedules, work.timers, work.full_ports, work.results, database.retention, database.references}
OF_FURTHER_STORE = tuple(check for check in OF_FIRST_STORE if check not in OF_JOBS)
"""The checks of a failover store, which has durable tasks only."""


def examine(sidejob: Any, *, thorough: bool) -> Iterator[Finding]:
    """Yield all findings, good and bad; the app's modules must be imported. `thorough` reads all jobs."""
    primary, *others = (Diagnosis(there, sidejob.owner) for there in sidejob.runtime.in_each_store())
    yield from primary.findings(thorough=thorough)
    for other in others:
        yield from other.of_further_store()
    yield from broker_check.findings(sidejob.app)
    yield from announcing.findings(sidejob.app)
    yield from task_options.findings(sidejob.app)


class Diagnosis:
    """Checks one store."""

    def __init__(self, runtime: Runtime, owner: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._owner = owner
        self._role = "<user>"
        self._patience_s = runtime.look_s

    def findings(self, *, thorough: bool = False) -> Iterator[Finding]:
        """Yield all findings, good and bad; `thorough` reads all jobs."""
        try:
            self._runtime.settings.require_database_url()
            yield from self._server()
        except (StoreUnavailableError, SettingsError) as failure:
            yield error(
                str(failure),
                meaning=database.NOTHING_RUNS,
                remedy="Start Postgres, or correct sidejob_database_url.",
                check="store",
            )
            return
        yield from self._schema()
        try:
            yield from look(self._runtime, *OF_FIRST_STORE, within_s=self._patience_s)
            rules = partial(database.rules, thorough=thorough)
            yield from look(self._runtime, rules, within_s=None if thorough else self._patience_s)
        except SchemaError:
            return  # without tables there is nothing more to check; `_schema` has reported this
        yield from workers.liveness(self._runtime, within_s=self._patience_s)

    def of_further_store(self) -> Iterator[Finding]:
        """Yield the findings about a failover store; each names the store."""
        settings = self._runtime.connections.setting
        whose = f"store {self._runtime.store.place}"
        try:
            found = self._server()
            with health.looking(self._runtime.connections):
                _ = self._runtime.name
        except (StoreUnavailableError, SettingsError, SchemaError) as failure:
            yield error(
                str(failure),
                meaning="Its tasks wait, and no call goes to it when the first store is away.",
                remedy=f"Start that Postgres, or correct {settings}.",
                check=whose,
            )
            return
        looks = look(self._runtime, *OF_FURTHER_STORE, within_s=self._patience_s)
        try:
            for finding in chain(found, self._schema(), looks):
                yield replace(finding, check=f"{whose}: {finding.check}")
        except SchemaError:
            return  # `_schema` has reported this

    def _server(self) -> list[Finding]:
        def check(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
            self._role = health.server(executor).role
            yield from database.server(executor, runtime)

        return findings_of(check, self._runtime, within_s=self._patience_s)

    def _schema(self) -> Iterator[Finding]:
        return database.schema(self._runtime, self._owner, role=self._role, within_s=self._patience_s)
