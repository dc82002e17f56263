"""Every SQL statement of the package, found where it is written, and made ready for Postgres to look at."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import ModuleType

from celery_sidejob import store
from celery_sidejob.store.statement import Statement


@cache
def statements() -> dict[str, Statement]:
    """Every statement that the package runs, by where it is: ``jobs.FIND`` or ``jobs.BY_COLUMN[status]``."""
    found: dict[str, Statement] = {}
    written = 0
    prefix = f"{store.__name__}."
    for one in pkgutil.walk_packages(store.__path__, prefix):
        module = importlib.import_module(one.name)
        written += places(module)
        for name, value in vars(module).items():
            for place, statement in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(statement, Statement):
                    where = f"{one.name.removeprefix(prefix)}.{name}{place and f'[{place}]'}"
                    found[where] = statement
                    if statement.in_broker is not statement:
                        found[f"{where}, in the broker"] = statement.in_broker
    assert len(set(map(id, found.values()))) >= written > 50, "a statement is in no module-level name or dict"
    return found


def places(module: ModuleType) -> int:
    """How often a module's source makes a statement."""
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Statement", "Frequent")
        for node in ast.walk(tree)
    )


def numbered(statement: Statement, schema: str) -> tuple[str, int]:
    """The statement as PREPARE wants it, $1 for the first name and for each further place of it; how many names."""
    numbers: dict[str, str] = {}

    def number(place: re.Match[str]) -> str:
        return "%" if place[0] == "%%" else numbers.setdefault(place[1], f"${len(numbers) + 1}")

    return re.sub(r"%%|%\((\w+)\)s", number, statement.render(schema)), len(numbers)


def assignments(statement: Statement) -> set[str]:
    """The columns of jobs that the statement sets."""
    found = set()
    for update in re.finditer(r"UPDATE \{jobs\}(?: \w+)?\s+SET\s", statement.text):
        depth, expects = 0, True
        for token in re.finditer(r"[(),]|\bCASE\b|\bEND\b|\bWHERE\b|\w+", statement.text[update.end() :]):
            word = token[0]
            if depth == 0 and expects and word not in "(),":
                found.add(word)
                expects = False
            elif word in ("(", "CASE"):
                depth += 1
            elif word in (")", "END"):
                depth -= 1
            elif depth == 0 and word == ",":
                expects = True
            if depth < 0 or (depth == 0 and word in ("WHERE", "FROM", "RETURNING")):
                break
    return found
