"""What the package's page shows: the README, in which no link leads to a file that only the repository has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from hatch_build import page

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TARGET = re.compile(r"\]\(([^)]+)\)")


def targets(text: str) -> set[str]:
    """Where the links of a page lead to."""
    return set(TARGET.findall(text))


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 160, "what goes further stands on a page of docs/"


def test_with_an_address_each_link_is_absolute() -> None:
    files = "https://code.example/sidejob/blob/v1"
    relative = {target for target in targets(README) if not target.startswith(("#", "https://"))}
    assert "docs/durable.md" in relative
    assert targets(page(README, files)) == targets(README) - relative | {f"{files}/{target}" for target in relative}


def test_without_an_address_the_text_of_a_link_stays() -> None:
    assert (
        page("More: [durable tasks](docs/durable.md#x), [above](#top).", None) == "More: durable tasks, [above](#top)."
    )
    assert all(target.startswith(("#", "https://")) for target in targets(page(README, None)))


def test_the_package_has_that_page() -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = project["urls"].get("Source")
    files = f"{source}/blob/v{project['version']}" if source else None
    assert json.loads(built.stdout)["readme"] == {"content-type": "text/markdown", "text": page(README, files)}
