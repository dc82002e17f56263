"""One scene for each test. What is marked slow runs only with ``-m slow``: `pytest -m slow tests/acceptance`.

Workers have the pool prefork where a test names no other; `--pools prefork,solo,threads,gevent` runs each test on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.acceptance.scene import Scene
from tests.acceptance.shared_site import Place
from tests.tools.brokers import Broker, broker_of
from tests.tools.databases import Databases
from tests.tools.fork_server import ForkServers
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.servers import emptied
from tests.tools.workers import PROCESSES, Processes


@pytest.fixture
def scene(database_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[Scene]:
    """A store, a broker and a record of this test's own, and what starts workers on them."""
    made = Scene(database_url, broker, record, processes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_place(
    databases: Databases, database_template: str, redis_server_url: str, redis_database_numbers: Iterator[int],
    process_guard: Guard, fork_server: ForkServers, tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest, module_store_url: Callable[[str], str], worker_pool: str, broker_kind: str,
) -> Iterator[Place]:  # fmt: skip
    """A store, a broker and a record that the tests of a module share, and what starts workers on them."""
    directory = tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
    processes = Processes(directory / "processes", process_guard, fork_server, pool=worker_pool)
    request.node.stash[PROCESSES] = processes
    with databases.fresh(template=database_template) as name:
        redis_url = emptied(redis_server_url, next(redis_database_numbers))
        url = module_store_url(databases.url_of(name))
        servers = {"database_url": lambda: url, "amqp_url": lambda: request.getfixturevalue("module_amqp_url")}
        broker = broker_of(broker_kind, redis_url, lambda fixture: servers[fixture]())
        yield Place(url, broker, Record(directory / "record.jsonl"), processes)
        assert processes.kill_all() == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what starts workers on each of `--pools`; a test that has a parameter `pool` chooses for itself."""
    pools = metafunc.config.option.pools.split(",")
    if "worker_pool" in metafunc.fixturenames and pools != ["prefork"]:
        pools = ["prefork"] if "pool" in metafunc.fixturenames else pools
        metafunc.parametrize("worker_pool", pools, scope="session")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pools(*names, reason): makes sense on these pools alone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what makes no sense on a pool."""
    for item in items:
        marker = item.get_closest_marker("pools")
        pool = getattr(item, "callspec", None) and item.callspec.params.get("worker_pool")
        if marker is not None and (pool or "prefork") not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"{pool}: {marker.kwargs['reason']}"))
