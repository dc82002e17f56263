"""`docs/lifecycle.md` shows every legal move, as `MOVES` has them, and explains every status."""

from __future__ import annotations

import re
from pathlib import Path

from celery_sidejob.model.status import MOVES, Status

PAGE = Path(__file__).parent.parent / "docs" / "lifecycle.md"


def drawing() -> str:
    """Return the state diagram that `MOVES` says."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for before, afters in MOVES.items():
        lines += [f"    {before or '[*]'} --> {after}" for after in sorted(afters)]
    return "\n".join([*lines, "```"])


def test_the_page_shows_every_legal_move() -> None:
    assert drawing() in PAGE.read_text(), f"docs/lifecycle.md must hold:\n{drawing()}"


def test_the_page_explains_every_status() -> None:
    statuses, _ = PAGE.read_text().split("## What wins")  # later tables are of other things
    assert re.findall(r"^\| `(\w+)` \|", statuses, re.MULTILINE) == [str(status) for status in Status]
