"""A unit that was written into the caller's transaction, and what its body is told when that was not committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..model.errors import (
    CommitInDoubtError,
    IllegalMoveError,
    SideJobError,
    StoreUnavailableError,
    UnitNotCommittedError,
)
from ..operations.runs.runs import NO_END, Unit
from ..store.borrowed.borrowed import Borrowed, is_open, is_trouble
from ..store.statement import Reader


@dataclass(frozen=True, slots=True)
class LentUnit:
    """A unit in the caller's transaction: what to go back to if that is rolled back."""

    job_id: int
    borrowed: Borrowed
    number: int
    before: Unit
    is_block: bool
    """Whether what was done since `before` goes with the transaction; a checkpoint has nothing since."""
    follow: Callable[[], None] | None
    """The work to be done after the commit; None where a hook does it."""
    commit_was_heard: Callable[[], bool]
    """Whether the caller got an answer to its commit, once that is known to have happened."""
    step: str | None
    """The step whose unit it is; None for the body's own unit."""

    def is_open(self, executor: Reader) -> bool:
        """Tell whether the transaction is neither committed nor rolled back yet."""
        return is_open(executor, self.number)

    def roll_back(self) -> None:
        """Roll the transaction back, which was left open; raises StoreUnavailableError if its connection is gone."""
        try:
            self.borrowed.roll_back()
        except Exception as error:
            if not is_trouble(error):
                raise
            raise StoreUnavailableError(f"A transaction is open, and the way to it gone: {error}") from error

    def still_open(self) -> SideJobError:
        """Return the error for a run that goes on while the transaction is open."""
        if self.borrowed.has_broken:
            return CommitInDoubtError(
                f"The connection given to job.unit(), checkpoint() or step() of job {self.job_id} broke, and Postgres "
                "has not decided yet what becomes of its transaction. Do not repeat the block: let this error end the "
                "run, which begins again from what is committed."
            )
        return IllegalMoveError(
            f"The transaction given to job.unit(), checkpoint() or step() of job {self.job_id} is still open: commit "
            "or roll it back before the run goes on."
        )

    def rolled_back(self, left: Unit) -> Undone | None:
        """Return what the body must be told after a rollback, if anything; `left` is the unit still to be committed."""
        if not (left.has_inputs or self.is_block):
            return None  # a checkpoint without inputs: all of it is still to come
        return Undone(self.job_id, left.has_inputs or self.step is not None, self.borrowed.has_broken, step=self.step)


@dataclass(frozen=True, slots=True)
class Undone:
    """The last unit in the caller's transaction was not committed, and the body has not repeated it since.

    `has_inputs`: packets were read before it, to be committed with it. Then the body may do nothing else than repeat
    it. Otherwise it only may not end so.
    """

    job_id: int
    has_inputs: bool
    has_broken: bool = False
    cause: BaseException | None = None
    """The error by which the block was left, if it was not committed because of that."""
    step: str | None = None
    """The step whose transaction it was."""

    def error(self) -> Exception:
        """Return the error for a body that goes on, or ends, as if the unit had been committed."""
        if isinstance(self.cause, NO_END):
            return self.cause  # no failure of the body, which has caught it
        if self.has_broken:  # the store's trouble, and not the body's: the run is lost, and begins again
            return StoreUnavailableError(
                f"The connection given to job.unit(), checkpoint() or step() of job {self.job_id} broke before its "
                "transaction was committed. What was read for it is on its port again."
            )
        if self.step is not None:
            return UnitNotCommittedError(
                f"The transaction given to step {self.step!r} of job {self.job_id} was rolled back, or not committed "
                "after step.value was set: repeat the step before the run goes on, and commit it."
            )
        return UnitNotCommittedError(
            f"The transaction given to job.unit() or checkpoint() of job {self.job_id} was rolled back, or not "
            "committed afterwards: what was read for it is on its port again. Commit after the block of job.unit(), "
            "not inside of it (a commit inside keeps your rows alone), or repeat the block before the run goes on; to "
            "leave a packet out, commit a block that does nothing else."
        )


def in_doubt(job_id: int) -> CommitInDoubtError:
    """Return the error for a body that begins a block after one whose commit was applied without an answer."""
    return CommitInDoubtError(
        f"The last block of job.unit() of job {job_id} is committed, although the answer to its commit was lost. Do "
        "not repeat the block: go on with the next turn, call job.checkpoint() before another block, or let this error "
        "end the run, which begins again from what is committed."
    )
