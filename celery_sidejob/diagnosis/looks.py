"""Runs checks of a store: each in its own transaction, within a time limit, and whatever may be wrong there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..model.errors import SchemaError, SideJobError
from ..model.finding import Finding, error
from ..operations.runtime import Runtime
from ..store import health
from ..store.statement import Transaction

Check = Callable[[Transaction, Runtime], Iterable[Finding]]


def look(runtime: Runtime, *checks: Check, within_s: float | None) -> Iterator[Finding]:
    """Yield the findings of each check, or the finding that it failed; raises SchemaError if tables are missing."""
    for check in checks:
        try:
            yield from findings_of(check, runtime, within_s=within_s)
        except SchemaError:
            raise
        except SideJobError as failure:
            yield error("store", str(failure), meaning="This check failed.", remedy="See what the message says.")


def findings_of(check: Check, runtime: Runtime, *, within_s: float | None) -> list[Finding]:
    """Return the findings of one check; raises one of our errors if it failed."""
    connections = runtime.connections
    with health.looking(connections), connections.talking(within_s=within_s):
        return connections.transact("doctor", lambda executor: list(check(executor, runtime)))
