"""A run's hold on its job, and its proof: a step is applied only if the run is still the job's current run.

Every step may be repeated after a lost answer, so a step that was applied already is recognised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..model.errors import LeaseLostError, StoreUnavailableError
from ..store import claims
from ..store.errors import OutcomeUnknown, RowsLocked
from ..store.statement import Transaction
from .lock_set import KeptPorts
from .runtime import PAUSE_S, Runtime

T = TypeVar("T")


class BeginsAgainError(Exception):
    """A condition on which a unit was based no longer applies: the unit is refused, and its run must begin again."""


@dataclass(slots=True)
class Hold:
    """A claimed run. `(job_id, run_no, worker_id)` names it, `unit_no` counts its committed units."""

    job_id: int
    run_no: int
    worker_id: int
    kind: str
    unit_no: int = 0
    started: bool = False
    row: Any = field(kw_only=True)
    """The job and its asking at the time of the claim."""
    children: Sequence[Any] | None = None
    """The job's children at the time of the claim; None if there are very many, and for a shutdown."""
    ports: KeptPorts = field(default_factory=dict)
    """Rows of ports that earlier units of the run have read; see `LockSet`."""
    slot_in: str | None = None
    """The managed queue in which the end of this run frees a slot."""
    began_at: float | None = None
    """When it began, by the monotonic clock of its own process; None in any other process."""
    in_page: bool = False
    """Whether the worker claimed it before its process began it: then the worker may also write its end."""
    in_doubt: bool = False
    """Whether a commit of this run may still continue behind a broken connection, even after a later try failed."""

    @property
    def key(self) -> tuple[int, int]:
        """(job id, run number)"""
        return self.job_id, self.run_no


def repeat_until_known(  # noqa: PLR0912 - an arm for each answer, and for none
    runtime: Runtime,
    hold: Hold,
    name: str,
    work: Callable[[Transaction], T],
    *,
    ends: bool = False,
    single: bool = False,
) -> T | None:
    """Repeat a fenced transaction until it is known to be applied; None if it was applied, but its answer was lost.

    With `single` the transaction is one statement.
    """
    deadline = time.monotonic() + runtime.settings.lease
    refused: LeaseLostError | None = None
    while True:
        try:
            return runtime.connections.timed(name, work, single=single)
        except LeaseLostError as error:
            # The first commit may have continued behind the broken connection, and this may be its effect.
            if not hold.in_doubt:
                raise
            refused = error
        except StoreUnavailableError as error:
            hold.in_doubt = hold.in_doubt or isinstance(error, OutcomeUnknown)
            is_to_wait = not (isinstance(error, RowsLocked) and runtime.connections.waits_briefly)
            if time.monotonic() > deadline or not is_to_wait:
                raise
            time.sleep(PAUSE_S)
        try:
            row = claims.outcome(runtime.connections, hold.job_id)
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            continue
        if _is_applied(hold, row, ends=ends):
            return None
        if refused is not None:
            raise refused


def _is_applied(hold: Hold, row: Any, *, ends: bool) -> bool:
    """Tell from the job's row whether the unit, or the end, was applied; LeaseLostError if the run is not current."""
    if row is None:
        raise lease_lost(hold)
    if ends and row.ended_run == hold.run_no:
        return True
    if (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id):
        raise lease_lost(hold)
    return bool(not ends and row.unit_no == hold.unit_no + 1)


def check_fence(hold: Hold, row: Any, *, any_unit: bool = False) -> None:
    """Raise LeaseLostError unless the hold still has the job's locked row; `any_unit`: after any number of units."""
    is_ours = row is not None and (row.run_no, row.worker_id) == (hold.run_no, hold.worker_id)
    if not is_ours or (row.unit_no != hold.unit_no and not any_unit):
        raise lease_lost(hold)


def lease_lost(hold: Hold) -> LeaseLostError:
    """Return the error for a run that is no longer its job's current run."""
    return LeaseLostError(
        f"Run {hold.run_no} of job {hold.job_id} is no longer its current run: the worker was taken for dead and the "
        "job runs elsewhere, or the job was deleted. Nothing of this unit was applied."
    )
