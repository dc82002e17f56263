"""What a transaction waits for while it has rows locked: the store alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import celery_sidejob
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

WAITS = ("publisher", "broker", "results", "observer", "announcer", "connections", "after_commit")
"""The parts of a runtime that may wait for a network."""
LOCK = "SELECT status FROM jobs WHERE id = %s FOR UPDATE NOWAIT"


def nothing(job: Any) -> None:
    """A body."""


@pytest.fixture
def hanging(database_url: str) -> Iterator[TcpProxy]:
    """A result backend that takes connections, and says nothing on them."""
    with TcpProxy.to(database_url) as proxy:
        proxy.black_hole()
        yield proxy


@pytest.mark.parametrize(("max_losses", "status"), [(3, "queued"), (1, "failed")])
def test_nobody_waits_for_a_rescued_job_while_the_result_backend_hangs(
    database_url: str, hanging: TcpProxy, aside: Callable[..., Future[Any]], max_losses: int, status: str
) -> None:
    """A backend for a database connects when it is made, and makes its tables."""
    backend = "db+" + hanging.url_for(database_url).replace("postgresql://", "postgresql+psycopg://")
    with closing(Stage(database_url, result_backend=backend)) as stage:
        job = stage.task(nothing, name="lost", max_losses=max_losses).enqueue()
        hold = stage.claim(job)
        assert hold is not None
        stage.declare_dead(stage.worker_id)

        rescued = aside(recovery.rescue, stage.runtime, job.id, run_no=hold.run_no, worker_id=stage.worker_id)
        wait_until(lambda: rescued.done() or hanging.connections, message="the rescue, or its wait for the backend")

        try:
            assert stage.sql(LOCK, job.id) == [(status,)]
        finally:
            hanging.refuse()
        assert rescued.result(30)


def test_a_function_in_another_uses_nothing_of_its_runtime_that_waits_for_a_network() -> None:
    """A parameter `LocalRuntime` keeps it from other functions with an executor."""
    package = Path(celery_sidejob.__file__).parent
    functions = [
        part
        for folder in ("operations", "jobs", "unit")
        for path in (package / folder).rglob("*.py")
        for part in ast.walk(ast.parse(path.read_text()))
        if _has_transaction(part)
    ]
    used = {
        ast.unparse(part)
        for function in functions
        if "LocalRuntime" not in ast.unparse(function)
        for part in ast.walk(function)
        if isinstance(part, ast.Attribute)
    }
    assert used & {f"runtime.{what}" for what in WAITS} == set()
    assert len(functions) > len(WAITS)


def _has_transaction(part: ast.AST) -> bool:
    """Tell whether code is a function with an executor. `keeping._encoding` only encodes, while the store works."""
    return (
        isinstance(part, ast.FunctionDef | ast.Lambda)
        and any(one.arg == "executor" for one in part.args.args + part.args.kwonlyargs)
        and getattr(part, "name", "") != "_encoding"
    )
