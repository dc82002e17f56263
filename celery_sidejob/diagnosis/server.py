"""The server of a store: its version, its durability, its clock, and the transactions that block its vacuum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..model.finding import Finding, error, graded, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import health
from ..store.statement import Transaction

OLDEST_SERVER = 130000
NOTHING_RUNS = "Nothing can be asked, and no run begins."
PINNED_S = (300.0, 3600.0)
"""Seconds for which a transaction may hold back vacuum: longer is a warning, then an error."""
SKEW_S = 2.0
"""How far clocks may differ: `expires` of tasks depends on them, and so do the times in logs."""
HELD_S = (60.0, 600.0)
"""Seconds for which a transaction may have locked our rows: longer is a warning, then an error."""


def server(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check the version and the durability of the server, and the clock of this machine."""
    before = time.time()
    row = health.server(executor)
    here = (before + time.time()) / 2
    if row.number < OLDEST_SERVER:
        yield error(
            "store",
            f"Postgres {row.version}",
            meaning="This package needs Postgres 13 or newer.",
            remedy="Upgrade the server.",
        )
    elif row.standby:
        yield error(
            "store",
            f"Postgres {row.version} is a standby: it cannot be written to.",
            meaning=NOTHING_RUNS,
            remedy="Point sidejob_database_url at the primary.",
        )
    else:
        yield well("store", f"Postgres {row.version}, as {row.role}")
    yield from _durability(row)
    yield from difference("this machine", row.clock - here)


def _durability(row: Any) -> Iterator[Finding]:
    if row.fsync == "off" or row.synchronous_commit == "off":
        setting = "fsync" if row.fsync == "off" else "synchronous_commit"
        yield warning(
            "durability",
            f"{setting} is off",
            remedy=f"Set {setting} to on.",
            meaning="A crash of the database server loses confirmed commits: jobs, packets and wakes.",
        )
    else:
        yield well("durability", f"fsync is on, synchronous_commit is {row.synchronous_commit}")


def horizon(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for transactions and slots that keep vacuum from removing dead rows."""
    held = [row for row in health.horizon(executor) if row.since_s is None or row.since_s > PINNED_S[0]]
    if not held:
        yield well(
            "horizon",
            "no old transaction blocks vacuum"
            if health.server(executor).sees_all
            else "no old transaction of this user's; others cannot be seen without the role pg_read_all_stats",
        )
        return
    shown = first_of(
        (
            f"{row.kind} {row.who}, {counted(row.xids, 'transaction', 'transactions')} old"
            + (f", for {row.since_s:.0f} s" if row.since_s else "")
            for row in held
        ),
        separator="; ",
    )
    yield graded(max(row.since_s or 0.0 for row in held), PINNED_S)(
        "horizon",
        shown,
        meaning="Vacuum cannot remove any row that died since then. The tables of jobs and "
        "messages grow, and everything becomes slower.",
        remedy="End the transaction (pg_terminate_backend), commit or roll back the prepared one, or drop the "
        "unused slot; set idle_in_transaction_session_timeout.",
    )


def locks(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for open transactions with locked rows for which calls and runs may wait."""
    held = [row for row in health.lockers(executor, runtime.settings.schema) if row.since_s > HELD_S[0]]
    if not held:
        yield well("locks", "no open transaction has locked rows for long")
        return
    yield graded(max(row.since_s for row in held), HELD_S)(
        "locks",
        first_of((f"{row.who} has locked rows of {row.what} for {row.since_s:.0f} s" for row in held), separator="; "),
        meaning="Calls that need these rows fail after some seconds. Runs that need them cannot end, and begin again.",
        remedy="Let its program commit or roll back. If that program is frozen or gone, end the session with "
        "pg_terminate_backend(pid).",
    )


def difference(whose: str, skew_s: float) -> Iterator[Finding]:
    """Grade the difference between the clock of a machine or a worker and the database's."""
    if abs(skew_s) > SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        yield warning(
            "clock",
            f"the clock of {whose} is {abs(skew_s):.1f} s {side} the database's",
            meaning="Each eta= or expires= that is computed there is off by that much, and so are the times in its "
            "logs. Leases and timers are not: they use only the database's clock.",
            remedy="Let NTP or chrony set both clocks.",
        )
    else:
        yield well("clock", f"the clock of {whose} differs from the database's by {abs(skew_s):.2f} s")
