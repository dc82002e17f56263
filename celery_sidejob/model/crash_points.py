"""Named instants at which a test may kill this process, stop it, or pretend that an answer was lost.

`reach(name)` stands before and after each commit and each broker call. Outside tests `reach` does nothing. A test plans
what happens there: with `acting` in its own process, with the variable `SIDEJOB_CRASH_POINTS` in another. The variable
is read once, at import; no production process sets it.

The plan is `name=action[@count]`, several joined by commas. The action is taken the `count`-th time (default the first)
that this process reaches `name`; several names joined by `|` are counted together. Actions: `kill` (SIGKILL),
`kill-child` (SIGKILL, in a process of a worker's pool alone: the worker itself, whose services come past many of these
points, goes on), `kill-group` (SIGKILL to the whole process group: a worker with its pool), `stop` (SIGSTOP, the test
sends SIGCONT), `lost` (raise `AnswerLost`: the statement may have been executed, the caller cannot know). With
`SIDEJOB_CRASH_ONCE=<file>` the first process that acts creates the file and no later one acts: a restarted worker
survives the same point. If it is a directory, each point has a file of its own there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Actor = Callable[[str], object]
"""Called with the name of each point that is reached."""


class AnswerLost(ConnectionError):
    """A test pretends that the connection broke before the answer arrived."""


class Died(BaseException):
    """A test pretends that this process died here: nothing is caught, given back or written on the way out."""


@contextmanager
def acting(act: Actor) -> Iterator[None]:
    """Within the block the actor is called at each point of this process."""
    global actor
    before, actor = actor, act
    try:
        yield
    finally:
        actor = before


def reach(name: str) -> None:
    """Do what a test has planned for this point; nothing in a production process."""
    if actor is not None:
        actor(name)


def _parse(plan: str) -> dict[str, tuple[str, str, int]]:
    """Return, by the name of a point, the names that are counted with it, the action and the count."""
    actions = {}
    for entry in filter(None, plan.split(",")):
        names, _, action = entry.partition("=")
        action, _, count = action.partition("@")
        actions.update(dict.fromkeys(names.split("|"), (names, action, int(count or 1))))
    return actions


def _armed(plan: dict[str, tuple[str, str, int]], once: str | None) -> Actor:
    reached: dict[str, int] = {}
    reader = os.getpid()

    def act(name: str) -> None:
        if name not in plan:
            return
        names, action, count = plan[name]
        if action == "kill-child" and os.getpid() == reader:
            return
        reached[names] = reached.get(names, 0) + 1
        if reached[names] != count or (once and not _first(once, name)):
            return
        if action in ("kill", "kill-child"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "kill-group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        elif action == "stop":
            signal.raise_signal(signal.SIGSTOP)  # to this thread, which goes no further until SIGCONT
        else:
            raise AnswerLost(f"crash point {name}: the answer was lost")

    return act


def _first(path: str, name: str) -> bool:
    if os.path.isdir(path):
        path = os.path.join(path, name)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _planned(environ: Mapping[str, str]) -> Actor | None:
    plan = _parse(environ.get("SIDEJOB_CRASH_POINTS", ""))
    return _armed(plan, environ.get("SIDEJOB_CRASH_ONCE")) if plan else None


actor: Actor | None = _planned(os.environ)
"""Called at each point; None outside tests, so that the most frequent transactions need not even call `reach`."""


def follow(environ: Mapping[str, str]) -> None:
    """Follow the plan in these variables: a forked process has other variables than its parent had at import."""
    global actor
    actor = _planned(environ)
