"""What a function of the store may be given is in its type: a reader, an open transaction, or connections.

mypy refuses connections where a transaction is wanted. What it cannot see is what the statements do.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from celery_sidejob import StoreUnavailableError, store
from celery_sidejob.store import workers
from celery_sidejob.store.statement import Statement
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage

WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|TRUNCATE|SHARE|SET)\b|advisory_\w*lock|nextval")
"""What writes, or locks."""


def test_what_is_given_a_reader_only_reads() -> None:
    modules = [importlib.import_module(one.name) for one in pkgutil.walk_packages(store.__path__, f"{store.__name__}.")]
    run = [(f"{module.__name__}.{name}", one) for module in modules for name, one in run_by_readers(module)]
    assert len(run) > 90
    assert [name for name, one in run if WRITES.search(one.text)] == []


def run_by_readers(module: ModuleType) -> Iterator[tuple[str, Statement]]:
    """The statements of a module that its functions with a reader name."""
    for function in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef) or "Reader" not in map(annotation, function.args.args):
            continue
        for node in ast.walk(function):
            found = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
            for one in found.values() if isinstance(found, dict) else [found]:
                if isinstance(one, Statement):
                    yield function.name, one


def annotation(argument: ast.arg) -> str:
    """An argument's type, as it is written."""
    return ast.unparse(argument.annotation) if argument.annotation is not None else ""


def test_an_identity_whose_answer_was_lost_is_not_made_again_under_its_name(stage: Stage, at: Arm) -> None:
    at("register:after-commit", lost)
    with pytest.raises(StoreUnavailableError), workers.as_worker(stage.runtime.connections):
        pytest.fail("nobody knows whether it has an identity")
    with workers.as_worker(stage.runtime.connections) as worker_id:
        assert worker_id
