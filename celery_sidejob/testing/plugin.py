"""The pytest plugin: fixtures for users' own tests. docs/testing.md describes them.

pytest loads it in every run, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..extension import SideJob
    from .servers import RedisPart
    from .worker import Worker, Workers

WORKERS: pytest.StashKey[Workers] = pytest.StashKey()
"""The workers of a test, whose output is shown if it fails."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that names the app."""
    parser.addini("sidejob_app", "the app that the fixtures of celery_sidejob use, as `celery -A` is given it")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Make sure that the app's own tables, if any, are made and dropped only in databases for tests."""
    if session.config.getini("sidejob_app") and "sqlalchemy" in sys.modules:
        from .databases import refuse_tables_elsewhere

        refuse_tables_elsewhere()


@pytest.fixture(scope="session")
def sidejob_postgres_url() -> Iterator[str]:
    """An administrator's URL of a Postgres: that of SIDEJOB_TEST_DATABASE_URL, or of a throwaway server."""
    from .servers import postgres

    with postgres() as url:
        yield url


@pytest.fixture(scope="session")
def sidejob_redis() -> Iterator[RedisPart]:
    """A Redis, or a part of the Redis at SIDEJOB_TEST_REDIS_URL; only for an app whose broker or backend is Redis."""
    from .servers import redis_part

    with redis_part() as part:
        yield part


@pytest.fixture(scope="session")
def sidejob_database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the store: a database that this process makes and drops. Override it to use your own database.

    If the store is in a Django database that pytest-django makes for tests, it is that database.
    """
    from .databases import Databases, alias_of_store, url_of

    if request.config.pluginmanager.hasplugin("django"):
        alias = alias_of_store(_app(request))
        if alias is not None:
            request.getfixturevalue("django_db_setup")
            yield url_of(alias)
            return
    databases = Databases(request.getfixturevalue("sidejob_postgres_url"))
    with databases.fresh() as name:
        yield databases.url_of(name)


@pytest.fixture(scope="session")
def sidejob_broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of the broker, of the same type as the app's. Override it to use another broker."""
    from .servers import broker_url

    return broker_url(_app(request), _part(request))


@pytest.fixture(scope="session")
def sidejob_settings() -> Mapping[str, Any]:
    """Further changes to the app's configuration for tests; none by default. Override it to add some."""
    return {}


@pytest.fixture(scope="session")
def sidejob_configuration(
    request: pytest.FixtureRequest,
    sidejob_database_url: str,
    sidejob_broker_url: str,
    sidejob_settings: Mapping[str, Any],
) -> Mapping[str, Any]:
    """All changes to the app's configuration, in this process and in the workers of tests."""
    from .servers import configuration

    changes = configuration(_app(request), sidejob_database_url, sidejob_broker_url, _part(request))
    return {**changes, **sidejob_settings}


@pytest.fixture(scope="session")
def sidejob_app(request: pytest.FixtureRequest, sidejob_configuration: Mapping[str, Any]) -> Iterator[Any]:
    """Your app, on the servers of the tests until the end of the test run."""
    from .servers import configured

    app = _app(request)
    with configured(app, sidejob_configuration):
        yield app


@pytest.fixture
def sidejob_store(request: pytest.FixtureRequest, sidejob_app: Any) -> Iterator[SideJob]:
    """The app's `SideJob` on an empty store and broker; both are emptied after the test."""
    from .servers import empty_all

    part = _part(request)  # now, because no fixture may be requested once a test is over
    yield sidejob_app.sidejob
    empty_all(sidejob_app, part)


@pytest.fixture
def sidejob_workers(
    request: pytest.FixtureRequest, sidejob_store: SideJob, sidejob_configuration: Mapping[str, Any], tmp_path: Path
) -> Iterator[Workers]:
    """Starts real workers of your app: `sidejob_workers.start()`. They are killed after the test."""
    from .worker import Workers

    workers = Workers(request.config.getini("sidejob_app"), sidejob_configuration, tmp_path / "workers")
    request.node.stash[WORKERS] = workers
    yield workers
    workers.close()


@pytest.fixture
def sidejob_worker(sidejob_workers: Workers) -> Worker:
    """A real worker of your app with one process, already consuming when the test begins."""
    return sidejob_workers.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the output of a failed test's workers in its report."""
    report = yield
    workers = item.stash.get(WORKERS, None)
    if report.failed and workers is not None:
        report.sections += [(f"output of {worker!r}", worker.log_tail()) for worker in workers.started]
    return report


def _app(request: pytest.FixtureRequest) -> Any:
    from .servers import app_of

    return app_of(request.config.getini("sidejob_app"))


def _part(request: pytest.FixtureRequest) -> RedisPart | None:
    from .servers import kind_of

    conf = _app(request).conf
    needs = "redis" in (kind_of(conf.broker_url), kind_of(conf.result_backend))
    part: RedisPart | None = request.getfixturevalue("sidejob_redis") if needs else None
    return part
