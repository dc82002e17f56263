"""Fixtures that give real servers: the machine's own where the environment names them, else throwaway ones.

SIDEJOB_TEST_DATABASE_URL   a Postgres where we may create and drop databases (postgresql://user@host/database)
SIDEJOB_TEST_PGBOUNCER      1: every test reaches its store through a PgBouncer in transaction mode, of our own
SIDEJOB_TEST_REDIS_URL      a Redis or Valkey: of its 16 databases we use those that are empty when we begin, and empty
                            them again; what is in any other is not touched
SIDEJOB_TEST_AMQP_URL       a RabbitMQ; without it and without a `rabbitmq-server` to start, its tests are skipped
SIDEJOB_TEST_RABBITMQCTL    how to administer that RabbitMQ, e.g. "docker exec rabbit rabbitmqctl"; by default
                            rabbitmqctl of this machine if the RabbitMQ is on it
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest
import redis

from celery_sidejob import embedded
from celery_sidejob.embedded.server import Server
from celery_sidejob.testing.servers import POSTGRES, postgres
from tests.tools.databases import Databases, close_for_cloning, prepare_template
from tests.tools.freezing import family, thaw
from tests.tools.lent_rabbitmq import borrowed
from tests.tools.pgbouncer import MISSING, PROGRAM, PgBouncer
from tests.tools.rabbitmq import MISSING as MISSING_RABBITMQ
from tests.tools.rabbitmq import GivenRabbitMQ, Node, RabbitMQ, is_installed

SHORT_TEMPORARY = "/dev/shm" if tempfile.gettempdir() == "/dev/shm" else "/tmp"
"""Where a test makes a directory for servers: its path is short, as those of sockets must be, and each account may
enter it. Why in memory is said in `run`."""
REDIS_DATABASES = 16
FREE = "SIDEJOB_TEST_REDIS_FREE"
"""Which of them are ours: the processes of pytest-xdist are told so, as they may fill them at any time."""


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """An administrator's URL of this run's Postgres; tests use `database_url`."""
    with postgres() as url:
        yield url


@pytest.fixture(scope="session")
def databases(postgres_url: str) -> Iterator[Databases]:
    """Makes and drops databases on this run's Postgres.

    Ours writes nothing to a disk, and copies the files of a database in a third of the time of the usual way.
    """
    with closing(Databases(postgres_url)) as made:
        if POSTGRES not in os.environ:
            made.clone += " STRATEGY FILE_COPY"
        yield made


@pytest.fixture(scope="session")
def database_template(databases: Databases) -> Iterator[str]:
    """The name of a database with our schema and nothing in it, which nobody may connect to but everybody clone."""
    with databases.fresh() as name:
        prepare_template(databases.url_of(name))
        close_for_cloning(databases, name)
        yield name


@pytest.fixture(scope="session")
def pgbouncer(postgres_url: str) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode before this run's Postgres."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with PgBouncer(postgres_url) as server:
        yield server


@pytest.fixture
def pooled() -> bool:
    """Whether the test reaches its store through a PgBouncer; tests marked `pooled_too` run both ways."""
    return bool(os.environ.get("SIDEJOB_TEST_PGBOUNCER"))


@pytest.fixture
def store_url(
    pooled: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], str]]:
    """Makes of the URL of a database the one by which the test reaches it.

    Through a PgBouncer the liveness lock alone goes past it, as in production: by `SIDEJOB_DIRECT_URL`.
    """
    if not pooled:
        yield lambda url: url
        return
    server: PgBouncer = request.getfixturevalue("pgbouncer")
    reached: list[str] = []

    def through(url: str) -> str:
        if not reached:  # the first one a test asks for is its store
            monkeypatch.setenv("SIDEJOB_DIRECT_URL", url)
        reached.append(url)
        return server.url_of(url)

    yield through


@pytest.fixture(scope="module")
def module_store_url(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """As `store_url`, for a store that all tests of a module share."""
    if not os.environ.get("SIDEJOB_TEST_PGBOUNCER"):
        yield lambda url: url
        return
    server: PgBouncer = request.getfixturevalue("pgbouncer")
    with pytest.MonkeyPatch.context() as patch:

        def through(url: str) -> str:
            patch.setenv("SIDEJOB_DIRECT_URL", url)
            return server.url_of(url)

        yield through


@pytest.fixture
def database_url(databases: Databases, database_template: str, store_url: Callable[[str], str]) -> Iterator[str]:
    """A database of this test's own with our schema in it."""
    with databases.fresh(template=database_template) as name:
        yield store_url(databases.url_of(name))


@pytest.fixture
def empty_database_url(databases: Databases, store_url: Callable[[str], str]) -> Iterator[str]:
    """A database of this test's own with nothing in it."""
    with databases.fresh() as name:
        yield store_url(databases.url_of(name))


@pytest.fixture
def own_postgres() -> Iterator[embedded.Postgres]:
    """A Postgres that this test may kill, restart or freeze; it has none of our schema."""
    with embedded.Postgres(durable=False) as server:
        yield server
        _thaw(server)


@pytest.fixture
def own_valkey() -> Iterator[embedded.Valkey]:
    """A Valkey that this test may kill, restart or freeze."""
    with embedded.Valkey() as server:
        yield server
        _thaw(server)


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """The URL of this run's Redis, with any database; tests use `redis_url`."""
    given = os.environ.get("SIDEJOB_TEST_REDIS_URL")
    if given:
        yield given
        return
    with embedded.Valkey() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_database_numbers() -> Iterator[int]:
    """The number of the next test's database: a late message of the last test meets nobody in it.

    Processes of pytest-xdist that share a given Redis have their databases apart.
    """
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    free = [int(number) for number in os.environ[FREE].split()] if FREE in os.environ else range(REDIS_DATABASES)
    return itertools.cycle(free[own::processes])


def free_databases(server_url: str) -> list[int]:
    """Which databases of a Redis have nothing in them."""
    with redis.Redis.from_url(server_url) as client:
        used = {int(name.removeprefix("db")) for name in client.info("keyspace")}
    return [number for number in range(REDIS_DATABASES) if number not in used]


def claim_free_databases(processes: int) -> None:
    """Find out which databases of the given Redis are ours; raises UsageError if they are too few."""
    given = os.environ.get("SIDEJOB_TEST_REDIS_URL")
    if not given:
        return
    free = free_databases(given)
    if len(free) < 2 * processes:
        raise pytest.UsageError(
            f"The Redis of SIDEJOB_TEST_REDIS_URL has {len(free)} empty databases of {REDIS_DATABASES}, and "
            f"{2 * processes} are needed, two for each process. What is in the others is left alone: empty some "
            "(redis-cli -n NUMBER FLUSHDB), name another server, or none to have one started."
        )
    os.environ[FREE] = " ".join(map(str, free))


def give_back_databases() -> None:
    """Empty what was claimed."""
    for number in os.environ.pop(FREE, "").split():
        emptied(os.environ["SIDEJOB_TEST_REDIS_URL"], int(number))


@pytest.fixture
def redis_url(redis_server_url: str, redis_database_numbers: Iterator[int]) -> str:
    """An empty database of this run's Redis for this test."""
    return emptied(redis_server_url, next(redis_database_numbers))


@pytest.fixture
def other_redis_url(redis_server_url: str, redis_database_numbers: Iterator[int]) -> str:
    """Another one."""
    return emptied(redis_server_url, next(redis_database_numbers))


def emptied(server_url: str, number: int) -> str:
    """Empty a database of a Redis, and return its URL."""
    url = urlsplit(server_url)._replace(path=f"/{number}").geturl()
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture(scope="session")
def rabbitmq(pytestconfig: pytest.Config) -> Iterator[Node | GivenRabbitMQ]:
    """This run's RabbitMQ; tests use `amqp_url`, a vhost of it."""
    given = os.environ.get("SIDEJOB_TEST_AMQP_URL")
    if given:
        yield GivenRabbitMQ(given, os.environ.get("SIDEJOB_TEST_RABBITMQCTL", ""))
        return
    if not is_installed():
        pytest.skip(MISSING_RABBITMQ)
    if lent := borrowed(pytestconfig):
        yield lent
        return
    with RabbitMQ() as server:
        yield server.node


@pytest.fixture
def vhost(rabbitmq: Node | GivenRabbitMQ) -> Iterator[str]:
    """The name of a vhost of this test's own."""
    with fresh_vhost(rabbitmq) as name:
        yield name


@pytest.fixture
def amqp_url(rabbitmq: Node | GivenRabbitMQ, vhost: str) -> str:
    """A vhost of this test's own, or the one of the given URL where we cannot make any: name your queues uniquely."""
    return rabbitmq.vhost_url(vhost)


@pytest.fixture
def other_amqp_url(rabbitmq: Node | GivenRabbitMQ) -> Iterator[str]:
    """Another vhost of this test's own."""
    if not rabbitmq.may_administer:
        pytest.skip("we may not administer this RabbitMQ")
    with fresh_vhost(rabbitmq) as name:
        yield rabbitmq.vhost_url(name)


@pytest.fixture(scope="module")
def module_amqp_url(rabbitmq: Node | GivenRabbitMQ) -> Iterator[str]:
    """As `amqp_url`, for a broker that all tests of a module share."""
    with fresh_vhost(rabbitmq) as name:
        yield rabbitmq.vhost_url(name)


@contextmanager
def fresh_vhost(rabbitmq: Node | GivenRabbitMQ) -> Iterator[str]:
    """A vhost within the block; yields its name."""
    name = f"sidejob_test_{secrets.token_hex(6)}"
    rabbitmq.add_vhost(name)
    try:
        yield name
    finally:
        rabbitmq.delete_vhost(name)


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that this test may kill, restart or freeze."""
    if not is_installed():
        pytest.skip(MISSING_RABBITMQ)
    with RabbitMQ() as server:
        yield server
        _thaw(server)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pooled_too: runs directly and, where there is one, through a PgBouncer")
    if not hasattr(config, "workerinput"):
        claim_free_databases(getattr(config.option, "numprocesses", None) or 1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        give_back_databases()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have tests marked `pooled_too` run both ways."""
    if "pooled" in metafunc.fixturenames and metafunc.definition.get_closest_marker("pooled_too") is not None:
        ways = [True] if os.environ.get("SIDEJOB_TEST_PGBOUNCER") else [False, True]
        metafunc.parametrize("pooled", ways, ids=["pgbouncer" if way else "direct" for way in ways])


def _thaw(server: Server) -> None:
    """A frozen server would not hear that it is to stop."""
    try:
        pid = server.pid
    except embedded.ServerError:
        return  # killed by the test
    thaw(lambda: family(pid))
