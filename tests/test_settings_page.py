"""`docs/settings.md` lists every setting, as the table in `model/settings.py` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery_sidejob.model.retention import Retention
from celery_sidejob.model.settings import SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def shown(default: Any) -> str:
    """Return a default as a reader wants it."""
    if default is None or default == ():
        return "none"
    if isinstance(default, Retention):
        return f"{default.older_than.days} days"
    return f"`{default!r}`"


def table() -> str:
    """Return the table that the settings say."""
    rows = [f"| `{setting.key}` | {shown(setting.default)} | {setting.meaning} |" for setting in SETTINGS]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def test_the_page_lists_every_setting() -> None:
    assert table() in PAGE.read_text(), f"docs/settings.md must hold:\n{table()}"
