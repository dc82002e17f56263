"""One scene for each test. What is marked slow runs only with ``-m slow``: `pytest -m slow tests/acceptance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.acceptance.scene import Scene
from tests.acceptance.shared_site import Place
from tests.tools.databases import Databases
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.workers import Processes


@pytest.fixture
def scene(database_url: str, redis_url: str, record: Record, processes: Processes) -> Iterator[Scene]:
    """A store, a broker and a record of this test's own, and what starts workers on them."""
    made = Scene(database_url, redis_url, record, processes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_place(
    databases: Databases, database_template: str, redis_server_url: str, redis_database_numbers: Iterator[int],
    process_guard: Guard, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest,
    module_store_url: Callable[[str], str],
) -> Iterator[Place]:  # fmt: skip
    """A store, a broker and a record that the tests of a module share, and what starts workers on them."""
    directory = tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
    processes = Processes(directory / "processes", process_guard)
    with databases.fresh(template=database_template) as name:
        broker_url = f"{redis_server_url.rpartition('/')[0]}/{next(redis_database_numbers)}"
        url = module_store_url(databases.url_of(name))
        yield Place(url, broker_url, Record(directory / "record.jsonl"), processes)
        assert processes.kill_all() == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a walk that takes minutes; only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless it is asked for."""
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow: pytest -m slow"))
