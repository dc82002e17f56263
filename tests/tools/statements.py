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
    for one in pkgutil.iter_modules(store.__path__):
        module = importlib.import_module(f"{store.__name__}.{one.name}")
        written += places(module)
        for name, value in vars(module).items():
            for place, statement in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(statement, Statement):
                    found[f"{one.name}.{name}{place and f'[{place}]'}"] = statement
    assert len(set(map(id, found.values()))) >= written > 50, "a statement is in no module-level name or dict"
    return found


def places(module: ModuleType) -> int:
    """How often a module's source makes a statement."""
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Statement"
        for node in ast.walk(tree)
    )


def numbered(statement: Statement, schema: str) -> tuple[str, int]:
    """The statement as PREPARE wants it, $1 for the first name and for each further place of it; how many names."""
    numbers: dict[str, str] = {}

    def number(place: re.Match[str]) -> str:
        return "%" if place[0] == "%%" else numbers.setdefault(place[1], f"${len(numbers) + 1}")

    return re.sub(r"%%|%\((\w+)\)s", number, statement.render(schema)), len(numbers)
