"""The server of a store: its version, its durability, its clock, and what blocks its vacuum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..model.finding import Finding, error, graded, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import health
from ..store.statement import Transaction
from . import clocks

OLDEST_SERVER = 130000
NOTHING_RUNS = "Nothing can be asked, and no run begins."
PINNED_S = (300.0, 3600.0)
"""For how long a transaction may hold back vacuum: longer is a warning, an error."""
HELD_S = (60.0, 600.0)
"""For how long a transaction may have locked rows of ours: longer is a warning, an error."""


def server(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Look at the version of the server, at its durability and at the clock here."""
    before = time.time()
    row = health.server(executor)
    here = (before + time.time()) / 2
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
    yield from _durability(row)
    yield from clocks.difference("this machine", row.clock - here)


def _durability(row: Any) -> Iterator[Finding]:
    if row.fsync == "off" or row.synchronous_commit == "off":
        setting = "fsync" if row.fsync == "off" else "synchronous_commit"
        yield warning(
            "durability", f"{setting} is off", remedy=f"Set {setting} to on.",
            meaning="A crash of the database server loses confirmed commits: jobs, packets and wakes.",
        )  # fmt: skip
    else:
        yield well("durability", f"fsync is on, synchronous_commit is {row.synchronous_commit}")


def horizon(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Look for what keeps vacuum from removing dead rows."""
    held = [row for row in health.horizon(executor) if row.since_s is None or row.since_s > PINNED_S[0]]
    if not held:
        yield well(
            "horizon", "no old transaction blocks vacuum" if health.server(executor).sees_all
            else "no old transaction of this user's; others cannot be seen without the role pg_read_all_stats",
        )  # fmt: skip
        return
    shown = first_of((
        f"{row.kind} {row.who}, {counted(row.xids, 'transaction', 'transactions')} old"
        + (f", for {row.since_s:.0f} s" if row.since_s else "")
        for row in held
    ), separator="; ")  # fmt: skip
    yield graded(max(row.since_s or 0.0 for row in held), PINNED_S)(
        "horizon", shown, meaning="Vacuum cannot remove any row that died since then. The tables of jobs and "
        "messages grow, and everything becomes slower.",
        remedy="End the transaction (pg_terminate_backend), commit or roll back the prepared one, or drop the "
        "unused slot; set idle_in_transaction_session_timeout.",
    )  # fmt: skip


def locks(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Look for open transactions with rows for which calls and runs may wait."""
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
    )  # fmt: skip
