"""The workers: their life, whether a worker sweeps, and their liveness locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ..model.errors import SideJobError
from ..model.finding import Finding, check, error, graded, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import health, registry, stats, waiting
from ..store import workers as rows_of_workers
from ..store.connection.connections import Connections
from ..store.statement import Transaction
from . import database
from .database import look

SWEEP_LAG_S = (10.0, 60.0)
UNSWEPT_S = 5.0
"""Seconds for which the sweeper's lease may have ended: another worker takes it over within that."""
STOOD_WITHIN_S = 3600.0
"""For how long it is told that an event loop stood still."""
LATE = "Timers, retries and messages that the broker did not accept are late; lost runs are not rescued."


@check("workers")
def workers(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for workers that are silent, suspected or dead, and for event loops that stood still."""
    known = [row for row in rows_of_workers.list_all(executor, runtime.settings) if row.dead_at is None]
    silent = [row for row in known if row.silent_s is not None]
    alive = [row for row in known if row.silent_s is None]
    suspected = first_of(row.ident for row in alive if row.suspect_at is not None)
    heard_s = min((row.silent_s for row in silent), default=0.0)
    silence = f"silent for {heard_s:.0f} s or longer: {first_of(row.ident for row in silent)}"
    if not alive:
        grave = error if any(row.depth or row.running for row in waiting.depths(executor)) else warning
        yield grave(
            f"no worker is heard of; {silence}" if silent else "no worker is alive",
            meaning="No run begins, and no lost run is rescued.",
            remedy="Start workers: celery -A <app> worker. They declare silent ones dead, whose runs begin again.",
        )
    elif silent:
        yield warning(
            f"{len(alive)} alive; {silence}",
            meaning="They send no heartbeat, or their liveness lock is free. The sweeper declares them dead within "
            "sidejob_lease, and their runs begin elsewhere.",
            remedy="Run doctor again in a moment; if they are still silent, see sweeping. Check whether they were "
            "killed, are stopped, swap, or are cut off from the database.",
        )
    elif suspected:
        yield warning(
            f"suspected: {suspected}",
            meaning="It has been silent for a while. If that continues, it "
            "is declared dead, and its runs begin elsewhere.",
            remedy="Check whether it is stopped, swaps, or is cut off from the database.",
        )
    else:
        yield well(f"{len(alive)} alive")
    holding = [row for row in health.dead_workers(executor) if row.runs]
    if holding:
        shown = first_of(
            f"{row.ident} ({counted(row.runs, 'run', 'runs')}, dead for {row.dead_s:.0f} s)" for row in holding
        )
        yield warning(
            f"dead and still holding: {shown}",
            remedy="Run doctor again in a moment, or see sweeping.",
            meaning="Their runs are being taken back one after the other, or nobody sweeps.",
        )
    yield from _stood(executor)
    for row in registry.skewed(executor, database.SKEW_S):
        yield from database.difference(f"worker {row.ident}", row.skew_s)


@check("event loop")
def _stood(executor: Transaction) -> Iterator[Finding]:
    for row in registry.stood(executor, within_s=STOOD_WITHIN_S):
        yield warning(
            f"the event loop of {row.ident} has stood still, {row.ago_s:.0f} s ago: {row.stood}",
            meaning="All bodies of this worker waited meanwhile. Only the latest place is shown; the log has all.",
            remedy="Await what takes long there, run it by asyncio.to_thread(), or make it an ordinary task.",
        )


@check("sweeping")
def sweeping(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check whether a worker sweeps, and keeps up."""
    row = stats.sweep(executor)
    lag_s = max(0.0, row.lag_s or 0.0)
    if row.ident is not None and row.expired_s > UNSWEPT_S:
        yield graded(max(lag_s, row.expired_s), SWEEP_LAG_S)(
            f"nobody sweeps: {row.ident} was the last, and its lease ended {row.expired_s:.0f} s ago",
            meaning=LATE,
            remedy="Start a worker with sidejob_worker_services, which sweeps at once; until then "
            "celery -A <app> sidejob poll sweeps once each time.",
        )
    elif lag_s <= SWEEP_LAG_S[0]:
        yield well(f"{row.ident} keeps up" if row.ident else "nothing is overdue")
    elif row.ident is not None and row.expired_s <= 0 and (row.timers_lag_s or 0.0) <= SWEEP_LAG_S[0]:
        # Timers depend only on the store; messages cannot be judged while the broker accepts none.
        yield warning(
            f"{row.ident} sweeps, and messages have been due for {lag_s:.0f} s",
            meaning="The broker does not accept them, or there are very many. They go out later; nothing is lost. "
            "Timers are on time, and lost runs are rescued.",
            remedy="See broker below, and the log of that worker; sweeping itself is fine.",
        )
    else:
        yield graded(lag_s, SWEEP_LAG_S)(
            f"the oldest item of the sweeper has been due for {lag_s:.0f} s",
            meaning=LATE,
            remedy="Run at least one worker with sidejob_worker_services, or beat with a worker for the poll's "
            "queue. If there is one, its log says why it fails.",
        )


PAST = "Set sidejob_direct_url to the server itself, bypassing the proxy."


@check("liveness")
def liveness(runtime: Runtime, *, within_s: float | None) -> Iterator[Finding]:
    """Check that session locks, and notifications, work for workers: a proxy shows process ids of its own."""
    settings = runtime.settings
    url, setting = runtime.store.direct_url()
    slow = f"A worker's death is noticed only by its silence, after sidejob_lease ({settings.lease:g} s)."
    try:
        with (
            closing(Connections(url, settings.schema, prepare=False, setting=setting)) as connections,
            health.looking(connections),
        ):
            proxied = connections.read(
                lambda executor: health.server(executor).pid != executor.connection.info.backend_pid, within_s=within_s
            )
    except SideJobError as failure:
        yield warning(str(failure), meaning=slow, remedy=f"Correct {setting}.")
        return
    if proxied:
        yield warning(
            f"{setting} goes through a pooling proxy, which may not keep a session's locks",
            meaning=slow,
            remedy=PAST,
        )
        if runtime.results.in_store:
            yield warning(
                f"{setting} goes through a pooling proxy, which passes no notifications on",
                meaning="Callers that wait for a result look for it, up to half a second late.",
                remedy=PAST,
                check="results",
            )
        return
    yield from look(runtime, partial(_locks, slow=slow), within_s=within_s)


@check("liveness", "locks work, and all workers that are not silent hold theirs")
def _locks(executor: Transaction, runtime: Runtime, *, slow: str) -> Iterator[Finding]:
    known = rows_of_workers.list_all(executor, runtime.settings)
    unlocked = [row.ident for row in known if row.dead_at is None and row.silent_s is None and not row.locked]
    if unlocked:
        yield warning(
            f"no liveness lock: {first_of(unlocked)}",
            meaning=slow,
            remedy="Set sidejob_direct_url for those workers; their log says why they have no lock.",
        )
