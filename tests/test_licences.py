"""What the package brings along may be used with it under any terms: nothing of it is under the GPL itself."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
REFUSED = re.compile(r"\b(A?GPL|(?<!Lesser )(?<!Library or Lesser )General Public License)", re.IGNORECASE)
"""The GPL and the AGPL. Under the LGPL a library (psycopg) may be used by anybody's program."""


def brought(requirements: list[str], extra: str = "") -> Iterator[Distribution]:
    """Yield what these requirements install, with all that it requires itself."""
    ahead = [(Requirement(one), extra) for one in requirements]
    seen = set()
    while ahead:
        wanted, extra = ahead.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for each in ("", *sorted(wanted.extras)):
            if (wanted.name.lower(), each) in seen:
                continue
            seen.add((wanted.name.lower(), each))
            try:
                found = distribution(wanted.name)
            except PackageNotFoundError:  # for another system
                continue
            yield found
            ahead += [(Requirement(one), each) for one in found.requires or ()]


def licence_of(found: Distribution) -> str:
    """What a distribution says of its licence: the first lines of a text, an expression, its classifiers."""
    said = found.metadata
    first = (said.get("License") or "").strip().splitlines()[:1]
    classifiers = [line for line in said.get_all("Classifier") or () if line.startswith("License ::")]
    return "; ".join([said.get("License-Expression") or "", *first, *classifiers]).strip("; ")


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_nothing_that_is_installed_with_it_is_under_the_gpl(extra: str) -> None:
    requirements = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    licences = {found.name: licence_of(found) for found in brought(requirements)}

    assert len(licences) >= len({Requirement(one).name for one in requirements})
    assert {name: said for name, said in licences.items() if not said or REFUSED.search(said)} == {}


def test_what_is_refused() -> None:
    assert REFUSED.search("GPL-2.0-or-later")
    assert REFUSED.search("GNU General Public License (GPL)")
    assert REFUSED.search("License :: OSI Approved :: GNU Affero General Public License v3")
    assert REFUSED.search("AGPL-3.0")
    assert not REFUSED.search("LGPL-3.0-only")
    assert not REFUSED.search("License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)")
