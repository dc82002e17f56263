"""Writes what to install for the tests with the oldest supported versions, or with the newest: `./run versions`.

Plain Python, since nothing is installed when it runs.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(which: str) -> list[str]:
    """What the package requires, at its lower bounds if these are to be the oldest, and what the tests need."""
    project = tomllib.loads(PROJECT.read_text())
    ours = project["project"]
    required = [*ours["dependencies"], *(one for extra in ours["optional-dependencies"].values() for one in extra)]
    if which == "oldest":
        required = [re.sub(r">=(?=[\d.]+(;|$))", "==", one) for one in required]
    return [*project["build-system"]["requires"], "editables", *required, *project["dependency-groups"]["test"]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
