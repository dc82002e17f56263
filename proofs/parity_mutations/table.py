"""The stated mutations, and the tests that the page names for each item."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "parity" / "sidejob.md"
TABLE = Path(__file__).with_name("mutations.toml")


@dataclass(frozen=True, slots=True)
class Mutation:
    """What to exchange in a file in order that an item of the page does not hold any more."""

    item: str
    breaks: str
    """What is then so instead, in a few words."""
    file: str
    old: str
    """A text that the file has exactly once."""
    new: str

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation; ValueError if the old text is not there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.item}: {self.file} has its old text {found} times: {self.old!r}")
        return text.replace(self.old, self.new)


def mutations() -> dict[str, Mutation]:
    """Read the table, {item: mutation}."""
    given = tomllib.loads(TABLE.read_text())
    return {item: Mutation(item, **fields) for item, fields in given.items()}


def items_with_tests() -> dict[str, list[str]]:
    """Read the page, {item: tests}: the last column of each row."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| ((?:SJ|WS)-\d+) \|", line):
            found[match[1]] = re.findall(r"`(tests/[^`]+)`", line.strip("| ").split(" | ")[-1])
    return found
