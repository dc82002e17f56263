"""The work that follows the commit of changes, in its order."""

from __future__ import annotations

from ..after_commit import AfterCommit, follow
from ..gates import capacity
from ..runtime import Runtime
from .dependencies import look
from .noted_asks import apply_noted_asks
from .publications import deliver
from .tree_terminations import terminate_pages


def follow_up(runtime: Runtime, after_commit: AfterCommit, *, to_the_end: bool = False) -> None:
    """Do the work that follows a commit, in its order.

    Report events, publish messages and store results. Then apply the noted asks, free jobs that waited for others,
    terminate pages of large trees, and deliver publications.

    All of this is recorded in rows by now, so no error here makes the call fail, and the sweeper does the rest, also if
    this process dies. `to_the_end`: return only when the large trees are terminated.
    """
    follow(runtime, after_commit)
    if after_commit.noted or after_commit.trees:
        apply_noted_asks(runtime, after_commit.noted, () if to_the_end else after_commit.trees)
    if after_commit.looks:
        look(runtime, after_commit.looks)
    if to_the_end:
        terminate_pages(runtime, after_commit.trees, to_the_end=True)
    if after_commit.undelivered:
        deliver(runtime, after_commit.undelivered)
    if after_commit.pools:
        capacity.ring(runtime, after_commit.pools)
