"""Named instants at which a test may kill this process, hold it, or pretend that an answer was lost.

`reach(name)` stands before and after each commit and each broker call. Outside tests `reach` does nothing: the plan is
read once, at import, from `SIDEJOB_CRASH_POINTS`, which no production process sets.

The plan is `name=action[@count]`, several joined by commas. The action is taken the `count`-th time (default the first)
that this process reaches `name`. Actions: `kill` (SIGKILL), `stop` (SIGSTOP, the test sends SIGCONT), `lost` (raise
`AnswerLost`: the statement may have been executed, the caller cannot know). With `SIDEJOB_CRASH_ONCE=<file>` the first
process that acts creates the file and no later one acts: a restarted worker survives the same point. If it is a
directory, each point has a file of its own there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


class AnswerLost(ConnectionError):
    """A test pretends that the connection broke before the answer arrived."""


def _parse(plan: str) -> dict[str, tuple[str, int]]:
    actions = {}
    for entry in filter(None, plan.split(",")):
        name, _, action = entry.partition("=")
        action, _, count = action.partition("@")
        actions[name] = (action, int(count or 1))
    return actions


def _armed(plan: dict[str, tuple[str, int]], once: str | None) -> Callable[[str], None]:
    reached: dict[str, int] = {}

    def reach(name: str) -> None:
        if name not in plan:
            return
        action, count = plan[name]
        reached[name] = reached.get(name, 0) + 1
        if reached[name] != count or (once and not _first(once, name)):
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise AnswerLost(f"crash point {name}: the answer was lost")

    return reach


def _first(path: str, name: str) -> bool:
    if os.path.isdir(path):
        path = os.path.join(path, name)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _idle(name: str) -> None:
    """Does nothing: this is a production process."""


_plan = _parse(os.environ.get("SIDEJOB_CRASH_POINTS", ""))
reach: Callable[[str], None] = _armed(_plan, os.environ.get("SIDEJOB_CRASH_ONCE")) if _plan else _idle
