"""`ARCHITECTURE.md` names files that exist, and each of its recipes names at most four of them as steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
RECIPES = dict(re.findall(r"^## How to add (?:a|an) (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
MOST_FILES = 4


def places(text: str) -> list[str]:
    """The files and folders that a text names: code with a slash or a file's ending, but no commands."""
    code = re.findall(r"`([^`\s]+)`", text)
    return [place for place in code if re.fullmatch(r"[\w./]+(/|\.py|\.md)", place)]


def exists(place: str) -> bool:
    """Whether it is there, in the package or beside it."""
    return (ROOT / "celery_sidejob" / place).exists() or (ROOT / place).exists()


def steps(recipe: str) -> list[str]:
    """The numbered steps of a recipe."""
    return re.findall(r"^\d\. (.*?)(?=^\d\. |^\n|\Z)", recipe, re.MULTILINE | re.DOTALL)


def test_the_files_exist() -> None:
    assert [place for place in places(PAGE) if not exists(place)] == []
    assert len(places(PAGE)) > 80


def test_the_files_of_the_tree_exist() -> None:
    """Each name with an ending, and each folder, in the drawing."""
    tree = PAGE.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    top = re.findall(r"^[├└]── (\S+)", tree, re.MULTILINE)
    assert [place for place in top if not exists(place)] == []
    missing = {path.name for path in (ROOT / "celery_sidejob").glob("*.py")} - set(re.findall(r"\w+\.py", tree))
    assert missing == set()


def test_there_is_a_recipe_for_each_thing() -> None:
    things = {"duty", "option of a job", "status", "gate", "command", "statistic", "transport"}
    assert things <= set(RECIPES)


@pytest.mark.parametrize("thing", RECIPES)
def test_a_recipe_has_at_most_four_steps_and_each_begins_with_its_file(thing: str) -> None:
    found = steps(RECIPES[thing])

    assert 0 < len(found) <= MOST_FILES
    assert [step for step in found if not places(step)] == []
