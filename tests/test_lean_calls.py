"""A call meets only what it uses: how many files and functions of the package one without options passes through.

The broker is the store, the process is warm, and each call wakes the workers. Who listens to announcements is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery

import celery_sidejob
from celery_sidejob.operations import audience
from celery_sidejob.transport.postgres import link
from tests.tools.apps import make_app

PACKAGE = str(Path(celery_sidejob.__file__).parent)
WARM = 8


@pytest.fixture
def app(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app whose broker is its store; how long a call takes does not change what it does."""
    monkeypatch.setattr(link, "APART_S", 0.0)
    monkeypatch.setattr(audience, "KNOWN_S", 3600.0)
    made = make_app("lean", broker="sidejobpg://", sidejob_database_url=database_url, task_ignore_result=True)
    yield made
    made.sidejob.close()
    made.close()


def passed(call: Callable[[], Any]) -> tuple[int, int]:
    """Return through how many files and functions of the package a call passes."""
    for _ in range(WARM):
        call()
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            seen.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len({file for file, _ in seen}), len(seen)


def test_delay_of_a_durable_task(app: Celery) -> None:
    @app.task(name="durable", durable=True, shared=False)
    def durable(number: int) -> None:
        pass

    files, functions = passed(lambda: durable.delay(5))

    assert files <= 25, "of the package"
    assert functions <= 80, "of the package"


def test_enqueue(app: Celery) -> None:
    @app.sidejob.task(name="job")
    def job(job: Any, number: int) -> None:
        pass

    files, functions = passed(lambda: job.enqueue((5,)))

    assert files <= 30, "of the package"
    assert functions <= 110, "of the package"
