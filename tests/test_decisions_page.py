"""`docs/decisions.md` has each decision once, in its group and in the order of the dates, also after a merge."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "decisions.md").read_text()
INTRODUCTION, *GROUPS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
DECISION = re.compile(r"^\*\*(\d{4}-\d\d-\d\d) · (.+?)\*\*", re.MULTILINE | re.DOTALL)


def test_each_stands_once_in_a_group() -> None:
    assert not DECISION.search(INTRODUCTION)
    titles = Counter(" ".join(title.split()) for _, title in DECISION.findall(PAGE))
    assert [title for title, number in titles.items() if number > 1] == []


def test_a_group_begins_with_its_oldest() -> None:
    assert len(GROUPS) > 5
    dates = [[date for date, _ in DECISION.findall(group)] for group in GROUPS]
    assert [(one, other) for group in dates for one, other in pairwise(group) if one > other] == []


def test_each_is_a_paragraph_of_its_own() -> None:
    assert re.findall(r"[^\n]\n(\*\*\d{4}-.*)", PAGE) == []
