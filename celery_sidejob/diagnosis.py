"""The checks of `doctor` in the store. They only read; the running side never imports this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from .model.errors import SchemaError, SettingsError, SideJobError, StoreUnavailableError
from .model.finding import Finding, error, warning, well
from .model.plural import counted
from .operations.runtime import Runtime
from .store import depths, health, parked, piles, revisions, served, statistics, workers
from .store.broker.messages import COUNTED
from .store.connection.connections import Connections
from .store.errors import LacksRights
from .store.outbox import references
from .store.schema import schema_check, tables
from .store.statement import Transaction

T = TypeVar("T")

OLDEST_SERVER = 130000
UNPUBLISHED_S = (10.0, 60.0)
"""For how long a message may wait for the broker: longer is a warning, an error."""
SWEEP_LAG_S = (10.0, 60.0)
UNSWEPT_S = 5.0
"""For how long the sweeper's lease may have ended: another worker takes it over within two seconds."""
UNSENT_S = 60.0
UNSERVED_S = 60.0
"""For how long runs may be due whose task no worker knows: such a worker may be restarting."""
SKEW_S = 2.0
"""By how much clocks may differ: `expires` of tasks depends on them, and the times in logs do."""
DEAD_ROWS = 20_000
"""Autovacuum usually leaves fewer dead rows than this, or fewer than live ones."""
FINISHED = 100_000
"""Finished jobs that nothing will remove: from this number on, a warning."""
IN_POSTGRES = "postgres "
"""How the broker of a worker begins whose broker is `sidejobpg://`."""
CHILDREN = 10_000
"""Children of one job, which stay as long as it does: from this number on, a warning."""
PINNED_S = (300.0, 3600.0)
"""For how long a transaction may hold back vacuum: longer is a warning, an error."""
UPGRADE = "run `celery -A <app> sidejob db upgrade`"
GRANT = "As the schema's owner: celery -A <app> sidejob db grants <user> | psql -v ON_ERROR_STOP=1 <database>"
GIVE_UP = (
    "Or give the work up: a durable task with celery -A <app> sidejob revoke <task id>, a job with celery -A <app> "
    "sidejob terminate --without-shutdown <job id>."
)
NOTHING_RUNS = "Nothing can be asked, and no run begins."
LATE = "Timers, retries and messages that the broker did not accept are late; lost runs are not rescued."

UNFIT: tuple[tuple[type[SideJobError], str, str], ...] = (
    (
        schema_check.NotUpgraded, "Workers refuse to start, and calls fail.", f"{UPGRADE[0].upper()}{UPGRADE[1:]}.",
    ),
    (
        LacksRights, "Workers refuse to start, and calls that need the right fail.", GRANT,
    ),
    (
        schema_check.NotOurs,
        ("Workers refuse to start. A client is not checked: it puts jobs into a store whose workers do not know "
         "the tasks, or use another broker."),
        ("Set sidejob_schema to a name of its own and upgrade, or correct the app's name or broker_url. Only if the "
         "app or broker has moved: stop all workers, then celery -A <app> sidejob db reassign."),
    ),
    (
        schema_check.Damaged, "Workers refuse to start, and calls that need the missing parts fail.",
        ("Stop workers and clients and restore the whole schema from a backup, all of its tables from the same moment. "
         "If you need nothing in it: drop the schema, then celery -A <app> sidejob db upgrade."),
    ),
    (
        schema_check.TooNew, "Workers refuse to start. A client is not checked: its calls may fail.",
        "Upgrade the package celery-sidejob here.",
    ),
    (
        StoreUnavailableError, "The schema could not be checked.",
        "Check whether Postgres is up, and run doctor again.",
    ),
    (SideJobError, "Workers refuse to start.", "See what the message says."),
)  # fmt: skip
"""The meaning and the remedy of each error of the schema; the first match counts."""

Check = Callable[[Transaction], Iterable[Finding]]


class Diagnosis:
    """Checks one store."""

    def __init__(self, runtime: Runtime, owner: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._owner = owner
        self._role = "<user>"
        self._patience_s = runtime.stores.look_s(runtime.store)

    def findings(self, *, thorough: bool = False) -> Iterator[Finding]:
        """Yield all findings, good and bad; `thorough` reads all jobs."""
        try:
            self._settings.require_database_url()
            yield from self._of(self._server, self._patience_s)
        except (StoreUnavailableError, SettingsError) as failure:
            yield error(
                "store", str(failure), meaning=NOTHING_RUNS,
                remedy="Start Postgres, or correct sidejob_database_url.",
            )  # fmt: skip
            return
        yield from self._schema()
        try:
            yield from self._look(
                self._rights, self._queues, self._publishing, self._tasks, self._workers, self._sweeping,
                self._results, self._dead, self._retention, self._references, self._vacuum, self._horizon,
                within_s=self._patience_s,
            )  # fmt: skip
            yield from self._look(
                lambda executor: self._rules(executor, thorough), within_s=None if thorough else self._patience_s
            )
        except SchemaError:
            return  # without tables there is nothing more to check; `_schema` has reported that
        yield from self._liveness()

    def of_further_store(self) -> Iterator[Finding]:
        """Yield the findings about a failover store; each names the store."""
        settings = self._runtime.connections.setting
        whose = f"store {self._runtime.store.place}"
        try:
            found = self._of(self._server, self._patience_s)
            with health.looking(self._runtime.connections):
                self._runtime.stores.name_of(self._runtime.store)
        except (StoreUnavailableError, SettingsError, SchemaError) as failure:
            yield error(
                whose, str(failure), meaning="Its tasks wait, and no call goes to it when the first store is away.",
                remedy=f"Start that Postgres, or correct {settings}.",
            )  # fmt: skip
            return
        looks = self._look(
            self._rights, self._queues, self._publishing, self._tasks, self._workers, self._sweeping, self._dead,
            self._vacuum, self._horizon, within_s=self._patience_s,
        )  # fmt: skip
        try:
            for finding in chain(found, self._schema(), looks):
                yield replace(finding, check=f"{whose}: {finding.check}")
        except SchemaError:
            return  # `_schema` has reported that

    def _look(self, *checks: Check, within_s: float | None) -> Iterator[Finding]:
        """Yield the findings of each check, or that it failed; raises SchemaError if tables are missing."""
        for check in checks:
            try:
                yield from self._of(check, within_s)
            except SchemaError:
                raise
            except SideJobError as failure:
                yield error("store", str(failure), meaning="This check failed.", remedy="See what the message says.")

    def _of(self, check: Check, within_s: float | None) -> list[Finding]:
        connections = self._runtime.connections
        with health.looking(connections), connections.talking(within_s=within_s):
            return connections.transact("doctor", lambda executor: list(check(executor)))

    def _of_first_store(self, executor: Transaction, ask: Callable[[Transaction], T]) -> T | None:
        """Ask the first store, where workers record the queues of all stores; None if it cannot be asked."""
        if self._runtime.store.place == 0:
            return ask(executor)
        stores = self._runtime.stores
        try:
            with health.looking(stores[0].connections):
                return stores[0].connections.read(ask, within_s=stores.wait_s)
        except (StoreUnavailableError, SchemaError):  # its own findings say so
            return None

    # -- the server ----------------------------------------------------------------------------------------------

    def _server(self, executor: Transaction) -> Iterator[Finding]:
        before = time.time()
        row = health.server(executor)
        here = (before + time.time()) / 2
        self._role = row.role
        if row.number < OLDEST_SERVER:
            yield error(
                "store", f"Postgres {row.version}", meaning="This package needs Postgres 13 or newer.",
                remedy="Upgrade the server.",
            )  # fmt: skip
        elif row.standby:
            yield error(
                "store", f"Postgres {row.version} is a standby: it cannot be written to.", meaning=NOTHING_RUNS,
                remedy="Point sidejob_database_url at the primary.",
            )  # fmt: skip
        else:
            yield well("store", f"Postgres {row.version}, as {row.role}")
        yield from self._durability(row)
        yield from self._clock("this machine", row.clock - here)

    def _durability(self, row: Any) -> Iterator[Finding]:
        if row.fsync == "off" or row.synchronous_commit == "off":
            setting = "fsync" if row.fsync == "off" else "synchronous_commit"
            yield warning(
                "durability", f"{setting} is off", remedy=f"Set {setting} to on.",
                meaning="A crash of the database server loses confirmed commits: jobs, packets and wakes.",
            )  # fmt: skip
        else:
            yield well("durability", f"fsync is on, synchronous_commit is {row.synchronous_commit}")

    def _clock(self, whose: str, skew_s: float) -> Iterator[Finding]:
        if abs(skew_s) > SKEW_S:
            side = "behind" if skew_s > 0 else "ahead of"
            yield warning(
                "clock", f"the clock of {whose} is {abs(skew_s):.1f} s {side} the database's",
                meaning="Each eta= or expires= that is computed there is off by that much, and so are the times in its "
                "logs. Leases and timers are not: they use only the database's clock.",
                remedy="Let NTP or chrony set both clocks.",
            )  # fmt: skip
        else:
            yield well("clock", f"the clock of {whose} differs from the database's by {abs(skew_s):.2f} s")

    def _schema(self) -> Iterator[Finding]:
        name, connections = self._settings.schema, self._runtime.connections
        try:
            with health.looking(connections), connections.talking(within_s=self._patience_s):
                schema_check.check(connections, name, owner=self._owner)  # as workers do
                revision, head = schema_check.current(connections, name), revisions.KNOWN
        except SideJobError as failure:
            _, meaning, remedy = next(entry for entry in UNFIT if isinstance(failure, entry[0]))
            yield error("schema", str(failure), meaning=meaning, remedy=remedy.replace("<user>", self._role))
            return
        if revision == head:
            yield well("schema", f"{name!r} is at revision {revision}")
        else:
            yield warning(
                "schema", f"{name!r} is at revision {revision}, this version's own is {head}",
                meaning="It works, but newer features are missing, and the next version may refuse it.",
                remedy=f"When all workers have this version, {UPGRADE}; if the schema is the newer one, upgrade here.",
            )  # fmt: skip

    def _rights(self, executor: Transaction) -> Iterator[Finding]:
        workers.list_all(executor, self._settings)  # raises SchemaError where there are no tables to have rights on
        missing = tables.lacking_rights(executor, self._settings.schema)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            role = health.server(executor).role
            yield error(
                "rights", f"{role} lacks {', '.join(missing[:5])}{more}",
                meaning="Calls, claims or commits that need these rights fail.", remedy=GRANT.replace("<user>", role),
            )  # fmt: skip
        else:
            yield well("rights", "all that is needed on tables and sequences")

    # -- work and workers ----------------------------------------------------------------------------------------

    def _queues(self, executor: Transaction) -> Iterator[Finding]:
        found = self._of_first_store(executor, self._served)
        if found is None:
            return
        served, unannounced = found
        rows = [row for row in depths.read(executor) if row.depth and row.queue not in served]
        shown = ", ".join(f"{row.queue} ({row.depth} due)" for row in rows)
        if not rows:
            yield well("queues", "every queue in which something is due has a worker")
        elif unannounced:
            ids = ", ".join(str(row.id) for row in unannounced)
            yield warning(
                "queues", f"no worker has said that it serves {shown}", remedy="Run doctor again in a moment.",
                meaning=f"Worker {ids} has just started, and has not said yet what it serves: perhaps these queues.",
            )  # fmt: skip
        else:
            yield error(
                "queues", f"nobody serves {shown}", meaning="These runs will never begin.",
                remedy=f"Start a worker with -Q {','.join(row.queue for row in rows)}, and keep it while something "
                f"waits there: a corrected queue or route applies to new work only. {GIVE_UP}",
            )  # fmt: skip

    def _publishing(self, executor: Transaction) -> Iterator[Finding]:
        rows = [row for row in depths.read(executor) if row.oldest_unpublished_s is not None]
        oldest_s = max((row.oldest_unpublished_s or 0.0 for row in rows), default=0.0)
        if oldest_s <= UNPUBLISHED_S[0]:
            yield well("publishing", "nothing waits for the broker")
            return
        names = ", ".join(sorted(row.queue for row in rows))
        yield _graded(oldest_s, UNPUBLISHED_S)(
            "publishing", f"{sum(row.unpublished for row in rows)} messages of {names} are due and not published, the "
            f"oldest for {oldest_s:.0f} s",
            meaning="The broker does not accept them, or nobody sweeps. Their runs begin later; nothing is lost.",
            remedy="See broker and sweeping below; the log of the worker that sweeps has the broker's answers.",
        )  # fmt: skip

    def _tasks(self, executor: Transaction) -> Iterator[Finding]:
        due = served.due(executor, for_s=UNSERVED_S)
        rows = self._of_first_store(executor, partial(self._unserved, due))
        if rows is None:
            return
        if rows:
            shown = ", ".join(f"{row.task} in {row.queue} ({row.runs} due)" for row in rows[:5])
            yield error(
                "tasks", f"no live worker of its queue knows {shown}", meaning="These runs do not begin. A job is "
                "parked, and a durable task goes to the dead set, when a worker gets its message.",
                remedy="Start a worker of that queue that imports the task, or register a renamed task under its old "
                f"name too. {GIVE_UP}",
            )  # fmt: skip
        unserved = {row.task for row in rows}
        unknown = [row for row in health.unknown_tasks(executor) if row.task not in unserved]
        if unknown:
            shown = ", ".join(f"{row.task} ({row.jobs} due)" for row in unknown[:5])
            yield warning(
                "tasks", f"no worker has ever served {shown}",
                meaning="The task was renamed, or the workers do not import its module: a worker parks the job when it "
                "gets its message.",
                remedy="Register the task under its old name too, or import its module (imports, autodiscover_tasks).",
            )  # fmt: skip
        parked_jobs = parked.count(executor, limit=6)
        if parked_jobs:
            shown = ", ".join(f"{row.jobs} of {row.task} in {row.queue}" for row in parked_jobs[:5])
            more = ", and others" if len(parked_jobs) > 5 else ""
            yield error(
                "tasks", f"jobs are parked: {shown}{more}",
                meaning="No worker of their queue knew the task when their message came. They run within seconds once "
                "one does, and cost nothing until then.",
                remedy="Start a worker of that queue that imports the task, or register a renamed task under its old "
                f"name too. {GIVE_UP}",
            )  # fmt: skip
        if not (rows or unknown or parked_jobs):
            yield well("tasks", "every task of which a run is due is known to a worker")

    def _workers(self, executor: Transaction) -> Iterator[Finding]:
        known = [row for row in workers.list_all(executor, self._settings) if row.dead_at is None]
        silent = [row for row in known if row.silent_s is not None]
        alive = [row for row in known if row.silent_s is None]
        suspected = ", ".join(row.ident for row in alive if row.suspect_at is not None)
        heard_s = min((row.silent_s for row in silent), default=0.0)
        silence = f"silent for {heard_s:.0f} s or longer: {', '.join(row.ident for row in silent)}"
        if not alive:
            grave = error if any(row.depth or row.running for row in depths.read(executor)) else warning
            yield grave(
                "workers", f"no worker is heard of; {silence}" if silent else "no worker is alive",
                meaning="No run begins, and no lost run is rescued.",
                remedy="Start workers: celery -A <app> worker. They declare silent ones dead, whose runs begin again.",
            )  # fmt: skip
        elif silent:
            yield warning(
                "workers", f"{len(alive)} alive; {silence}",
                meaning="They send no heartbeat, or their liveness lock is free. The sweeper declares them dead within "
                "sidejob_lease, and their runs begin elsewhere.",
                remedy="Run doctor again in a moment; if they are still silent, see sweeping. Check whether they were "
                "killed, are stopped, swap, or are cut off from the database.",
            )  # fmt: skip
        elif suspected:
            yield warning(
                "workers", f"suspected: {suspected}", meaning="It has been silent for a while. If that continues, it "
                "is declared dead, and its runs begin elsewhere.",
                remedy="Check whether it is stopped, swaps, or is cut off from the database.",
            )  # fmt: skip
        else:
            yield well("workers", f"{len(alive)} alive")
        holding = [row for row in health.dead_workers(executor) if row.runs]
        if holding:
            shown = ", ".join(f"worker {row.id} ({row.runs} runs, dead for {row.dead_s:.0f} s)" for row in holding)
            yield warning(
                "workers", f"dead and still holding: {shown}", remedy="Run doctor again in a moment, or see sweeping.",
                meaning="Their runs are being taken back one after the other, or nobody sweeps.",
            )  # fmt: skip
        for row in served.skewed(executor, SKEW_S):
            yield from self._clock(f"worker {row.ident}", row.skew_s)

    def _sweeping(self, executor: Transaction) -> Iterator[Finding]:
        row = statistics.sweep(executor)
        lag_s = max(0.0, row.lag_s or 0.0)
        if row.ident is not None and row.expired_s > UNSWEPT_S:
            yield _graded(max(lag_s, row.expired_s), SWEEP_LAG_S)(
                "sweeping", f"nobody sweeps: {row.ident} was the last, and its lease ended {row.expired_s:.0f} s ago",
                meaning=LATE, remedy="Start a worker with sidejob_worker_services, which sweeps at once; until then "
                "celery -A <app> sidejob poll sweeps once each time.",
            )  # fmt: skip
        elif lag_s <= SWEEP_LAG_S[0]:
            yield well("sweeping", f"{row.ident} keeps up" if row.ident else "nothing is overdue")
        elif row.ident is not None and row.expired_s <= 0 and (row.timers_lag_s or 0.0) <= SWEEP_LAG_S[0]:
            # Timers need the store alone; messages cannot be judged while the broker takes none.
            yield warning(
                "sweeping", f"{row.ident} sweeps, and messages have been due for {lag_s:.0f} s",
                meaning="The broker does not accept them, or there are very many. They go out later; nothing is lost. "
                "Timers are on time, and lost runs are rescued.",
                remedy="See broker below, and the log of that worker; sweeping itself is fine.",
            )  # fmt: skip
        else:
            yield _graded(lag_s, SWEEP_LAG_S)(
                "sweeping", f"the oldest item of the sweeper has been due for {lag_s:.0f} s", meaning=LATE,
                remedy="Run at least one worker with sidejob_worker_services, or beat with a worker for the poll's "
                "queue. If there is one, its log says why it fails.",
            )  # fmt: skip

    def _results(self, executor: Transaction) -> Iterator[Finding]:
        row = statistics.results(executor)
        if row.oldest_s is not None and row.oldest_s > UNSENT_S:
            yield warning(
                "results", f"{row.unsent} results wait for the result backend, the oldest for {row.oldest_s:.0f} s",
                meaning="Callers of result.get(), chords and errbacks still wait for them.",
                remedy="Check whether the result backend is up and accepts the workers' writes.",
            )  # fmt: skip
        else:
            yield well("results", "the result backend has them")

    def _dead(self, executor: Transaction) -> Iterator[Finding]:
        entries, _ = statistics.dead_entries(executor)
        if not entries.number:
            yield well("dead set", "empty")
            return
        groups = statistics.dead_groups(executor)[:3]
        shown = ", ".join(f"{row.entries} of {row.task} ({row.error})" for row in groups)
        yield warning(
            "dead set", f"{'about ' if entries.is_estimated else ''}{entries.number} entries: {shown}",
            meaning="These jobs and durable tasks failed for good, kept killing their workers, were revoked or have "
            "expired. They stay until a person decides.",
            remedy="List them with celery -A <app> sidejob dead groups, fix the cause, then celery -A <app> sidejob "
            "dead retry, in Python sidejob.dead.retry(id); or leave them to sidejob_dead_retention.",
        )  # fmt: skip

    def _retention(self, executor: Transaction) -> Iterator[Finding]:
        finished = piles.finished(executor) if self._settings.retention is None else 0
        if finished >= FINISHED:
            yield warning(
                "retention", f"about {finished} finished jobs are kept for ever", meaning="Nothing removes them, so "
                "the tables, backups and every VACUUM grow with them.",
                remedy="Set sidejob_retention, or retention= of their tasks.",
            )  # fmt: skip
        families = piles.families(executor, least=CHILDREN)
        if families:
            shown = ", ".join(f"job {row.parent_id} has about {row.children}" for row in families)
            yield warning(
                "retention", f"very many children: {shown}", meaning="Finished children are kept as long as their "
                "parent, unless their own task has a retention. A run that asks for job.children reads them all.",
                remedy="Give the children's task a retention=, or make them without a parent.",
            )  # fmt: skip
        if finished < FINISHED and not families:
            yield well("retention", "no finished jobs pile up")

    def _references(self, executor: Transaction) -> Iterator[Finding]:
        """Tell of references that a change of the broker has left behind; most brokers never had any."""
        if self._runtime.connections.is_broker or not (left := references.count(executor)):
            return
        known = workers.list_all(executor, self._settings)
        if any((row.broker or "").startswith(IN_POSTGRES) for row in known if row.dead_at is None):
            return
        at_least = "at least " if left == COUNTED else ""
        yield warning(
            "references", f"{at_least}{counted(left, 'reference', 'references')} of jobs and durable tasks in the "
            "queues of sidejobpg://, and no worker has that broker",
            meaning="A change of the broker has left them there, or the workers of sidejobpg:// are down. The work is "
            "in the store: db reassign has it sent to the new broker, and then these rows only take up space.",
            remedy="If the broker has changed for good: celery -A <app> sidejob db reassign, unless that was done; "
            f"then DELETE FROM {schema_check.quoted(self._settings.schema)}.broker_messages WHERE task_id IS NOT NULL. "
            "Otherwise start workers of sidejobpg://.",
        )  # fmt: skip

    # -- the health of tables ------------------------------------------------------------------------------------

    def _vacuum(self, executor: Transaction) -> Iterator[Finding]:
        if health.server(executor).autovacuum == "off":
            yield error(
                "vacuum", "autovacuum is off", remedy="Set autovacuum = on.",
                meaning="Every run leaves dead rows behind, so claims and sweeps become slower and slower.",
            )  # fmt: skip
            return
        late = [row for row in health.tables(executor, self._settings.schema) if row.dead > max(DEAD_ROWS, row.live)]
        if not late:
            yield well("vacuum", "keeps up with dead rows")
            return
        yield warning(
            "vacuum", ", ".join(f"{row.name} has {row.dead} dead rows for {row.live} live ones" for row in late),
            meaning="Vacuum does not keep up, or cannot remove them (see horizon). Claims and sweeps read past them "
            "and become slower.",
            remedy="Fix the horizon first; then VACUUM the table, and give autovacuum more (cost limit, workers).",
        )  # fmt: skip

    def _horizon(self, executor: Transaction) -> Iterator[Finding]:
        held = [row for row in health.horizon(executor) if row.since_s is None or row.since_s > PINNED_S[0]]
        if not held:
            yield well(
                "horizon", "no old transaction blocks vacuum" if health.server(executor).sees_all
                else "no old transaction of this user's; others cannot be seen without the role pg_read_all_stats",
            )  # fmt: skip
            return
        shown = "; ".join(
            f"{row.kind} {row.who}, {row.xids} transactions old" + (f", for {row.since_s:.0f} s" if row.since_s else "")
            for row in held
        )
        yield _graded(max(row.since_s or 0.0 for row in held), PINNED_S)(
            "horizon", shown, meaning="Vacuum cannot remove any row that died since then. The tables of jobs and "
            "messages grow, and everything becomes slower.",
            remedy="End the transaction (pg_terminate_backend), commit or roll back the prepared one, or drop the "
            "unused slot; set idle_in_transaction_session_timeout.",
        )  # fmt: skip

    def _rules(self, executor: Transaction, thorough: bool) -> Iterator[Finding]:
        broken = health.broken_rules(executor, every_job=thorough)
        for row in broken.rows:
            yield error(
                "rules", f"{row.rule}: {row.rows}, first job {row.id}", meaning="The rows contradict each other. This "
                "must never happen: it is a bug in this package, or rows were changed by hand.",
                remedy="job.run(force=True) gets such a job going again; please report it, with the log.",
            )  # fmt: skip
        if not broken.rows:
            which = "all messages" if broken.of_all else "all messages of a sample"
            yield well("rules", "all rows agree" if thorough else f"{which} agree with their jobs")

    # -- liveness locks ------------------------------------------------------------------------------------------

    def _liveness(self) -> Iterator[Finding]:
        """Check that session locks work where workers take them: a proxy shows process ids of its own."""
        settings = self._settings
        url, setting = self._runtime.store.direct_url()
        slow = f"A worker's death is noticed only by its silence, after sidejob_lease ({settings.lease:g} s)."
        try:
            with (
                closing(Connections(url, settings.schema, prepare=False, setting=setting)) as connections,
                health.looking(connections),
            ):
                proxied = connections.read(
                    lambda executor: health.server(executor).pid != executor.connection.info.backend_pid,
                    within_s=self._patience_s,
                )
        except SideJobError as failure:
            yield warning("liveness", str(failure), meaning=slow, remedy=f"Correct {setting}.")
            return
        if proxied:
            yield warning(
                "liveness", f"{setting} goes through a pooling proxy, which may not keep a session's locks",
                meaning=slow, remedy="Set sidejob_direct_url to the server itself, bypassing the proxy.",
            )  # fmt: skip
            return
        yield from self._look(lambda executor: self._locks(executor, slow), within_s=self._patience_s)

    def _locks(self, executor: Transaction, slow: str) -> Iterator[Finding]:
        known = workers.list_all(executor, self._settings)
        unlocked = [row.ident for row in known if row.dead_at is None and row.silent_s is None and not row.locked]
        if unlocked:
            yield warning(
                "liveness", f"no liveness lock: {', '.join(unlocked)}", meaning=slow,
                remedy="Set sidejob_direct_url for those workers; their log says why they have no lock.",
            )  # fmt: skip
        else:
            yield well("liveness", "locks work, and all workers that are not silent hold theirs")

    def _served(self, executor: Transaction) -> tuple[set[str], Sequence[Any]]:
        """Read which queues live workers serve, and which workers have not recorded theirs."""
        silent = workers.silent(executor, self._settings)
        return set(served.workers_of_queues(executor, silent)), served.unannounced(executor, silent)

    def _unserved(self, due: Sequence[Any], executor: Transaction) -> Sequence[Any]:
        """Read which of these tasks no live worker of their queue knows."""
        return served.unserved(executor, due, workers.silent(executor, self._settings))


def _graded(value: float, bounds: tuple[float, float]) -> Callable[..., Finding]:
    """Return the kind of finding for a value above the first bound: an error from the second bound on."""
    return error if value > bounds[1] else warning
