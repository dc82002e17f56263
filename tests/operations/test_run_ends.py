"""Every end of a run passes one place: what clears a run's marker or its lock is used by that module alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import celery_sidejob
from tests.tools.statements import assignments, statements

PACKAGE = Path(celery_sidejob.__file__).parent
STORE = "celery_sidejob.store"
OF_JOBS = "celery_sidejob.operations.runs.endings"
BORROWED = f"{STORE}.borrowed.of_sqlalchemy"
OF_TASKS = "celery_sidejob.store.outbox.arming"

CLEARS = re.compile(
    r"\b(?:unit_no|locked_by) = NULL|DELETE FROM \{messages\}(?:(?!RETURNING).)*locked_by = %\(worker_id\)s", re.DOTALL
)
"""The run's marker in `jobs`, the lock of its message, or a row that goes together with its lock."""

ARMED = re.compile(r"\barmed AS \(.*?RETURNING", re.DOTALL)
"""Frees the message of a run that is over already: it arms jobs in no run alone."""


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules, by name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


def functions() -> dict[str, ast.FunctionDef]:
    """The functions of the store that run, or give to be run, a statement which clears what a run holds."""
    clearing = {where for where, statement in statements().items() if CLEARS.search(ARMED.sub("", statement.text))}
    found = {}
    for where in clearing:
        module, _, name = where.rpartition(".")
        for node in modules()[f"{STORE}.{module}"].body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(used, ast.Name) and used.id == name for used in ast.walk(node)
            ):
                found[f"{STORE}.{module}.{node.name}"] = node
    return found


def users(function: str) -> set[str]:
    """The modules that name a function of the store."""
    return {module for module, names in names_used().items() if function in names}


@cache
def names_used() -> dict[str, set[str]]:
    """The full names that each module uses of others."""
    return {module: set(named(module, tree)) for module, tree in modules().items()}


def named(module: str, tree: ast.Module) -> Iterator[str]:
    """The full names that a module imports, and those that it takes from modules it imports."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            imported.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield f"{imported[node.value.id]}.{node.attr}"


def test_what_clears_the_marker_of_a_jobs_run_is_used_by_one_module() -> None:
    ends = {name: users(name) for name, node in functions().items() if not gives_an_end(node)}

    assert ends == {f"{STORE}.run_ends.{name}": {OF_JOBS} for name in ("end", "end_page", "release")}
    assert users(f"{STORE}.outbox.arming.rearm") == {OF_JOBS}


def test_what_clears_the_lock_of_a_durable_tasks_run_is_given_to_one_module() -> None:
    ends = {name for name, node in functions().items() if gives_an_end(node)}

    assert ends == {
        f"{STORE}.outbox.{name}"
        for name in (
            "burials.bury", "holds.drop", "holds.give_back", "holds.remove", "holds.take_from_the_dead", "holds.unhold",
            "holds.unlock", "tasks.move",
        )
    }  # fmt: skip
    # The caller's SQLAlchemy has statements of its own.
    assert {module for module, tree in modules().items() if runs_an_end(tree)} - {BORROWED} == {OF_TASKS}


def gives_an_end(function: ast.FunctionDef) -> bool:
    """Whether it returns the end as a value, and has nothing with which to run it."""
    return (
        isinstance(function.returns, ast.Name) and function.returns.id == "TaskEnd" and not gets_an_executor(function)
    )


def gets_an_executor(function: ast.FunctionDef) -> bool:
    return any(argument.arg == "executor" for argument in function.args.args)


def runs_an_end(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "statement" for node in ast.walk(tree))


def test_nothing_else_begins_or_ends_a_run() -> None:
    """The marker is set by the claim, counted on by the fence, and cleared by the ends."""
    writers = {where for where, statement in statements().items() if "unit_no" in assignments(statement)}

    assert writers == {
        *(f"claims.{name}" for name in ("_CLAIM", "_CLAIM_PAGE", "_FENCE")),
        *(f"run_ends.{name}" for name in ("_END", "_END_PAGE", "_RELEASE", "_GIVE_UP")),
        *(f"permits.{name}" for name in ("_CLAIM", "_CLAIM_IN_LOCKED", "_CLAIM_OF_KEYS")),
        "steps._KEEP_ALONE",  # the fence of a unit that has only the record of a step
    }
