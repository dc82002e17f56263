"""What a process loads that only imports us: as every client, worker and `celery` command does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import celery_sidejob
from tests.tools.versions import KOMBU_5_7

LATE = ("alembic", "sqlalchemy")
"""Needed by `db upgrade`, and where a transaction of SQLAlchemy's is lent: a third of what would be imported."""
HEAVY = (*LATE, "psycopg", "celery", "celery_sidejob.store", "celery_sidejob.hooks")


def test_what_few_processes_need_is_not_imported_by_all() -> None:
    look = "from celery_sidejob import SideJob; import celery_sidejob.cli, sys"
    look += f"; print([name for name in {LATE} if name in sys.modules])"

    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == "[]\n"


def test_the_module_that_instrumentation_must_come_before_is_not_imported() -> None:
    """Sentry replaces `celery.app.trace.build_tracer` when the app is made; the consumer keeps what it finds."""
    look = "from celery_sidejob import SideJob; import celery_sidejob.cli, sys"
    look += "; print('celery.app.trace' in sys.modules, 'celery.worker.consumer.consumer' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == "True False\n"


@KOMBU_5_7
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import celery_sidejob.transport", id="the transport"),
        pytest.param("import celery_sidejob; dir(celery_sidejob)", id="the package"),
        pytest.param("import celery_sidejob.testing.plugin", id="pytest's plugin"),
    ],
)
def test_the_transport_brings_nothing_of_the_rest(source: str) -> None:
    source += "\nimport sys, kombu; kombu.Connection('sidejob://').get_transport_cls()"
    source += f"\nprint([name for name in {HEAVY} if name in sys.modules], 'redis' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[] True"


def test_an_app_without_redis_does_not_import_it() -> None:
    source = (
        "from celery import Celery; from celery_sidejob import SideJob; import celery_sidejob.cli, sys\n"
        "app = Celery('shop', broker='sidejobpg://', backend='db+postgresql+psycopg://'); SideJob(app)\n"
        "import celery.apps.worker, celery_sidejob.hooks.worker.delivered\n"
        "print([name for name in ('redis', 'kombu.transport.redis') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "[]\n"


@KOMBU_5_7
def test_who_imports_the_extension_may_name_the_transport() -> None:
    source = (
        "from celery_sidejob import SideJob; import kombu; print(kombu.Connection('sidejobs://').get_transport_cls())"
    )
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "TLSTransport" in said.stdout


def test_every_public_name_is_there_for_people_type_checkers_and_programs() -> None:
    tree = ast.parse(Path(celery_sidejob.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(celery_sidejob.__all__)
    assert imported <= set(dir(celery_sidejob))
    assert all(hasattr(celery_sidejob, name) for name in imported)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        celery_sidejob.Nothing  # noqa: B018
