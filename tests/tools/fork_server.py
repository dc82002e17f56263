"""A process that has imported Celery and forks: a worker that starts as a copy of it need not import Celery again.

Those imports are most of what a start takes, and the same each time. Nothing of ours is among them, for many a process
must not know `celery_sidejob`. A second server has imported it too, and forks the processes whose program makes a
`SideJob`: these imports are two thirds of what is left of a start. A process imports its app and its tasks itself, in
the environment that it is given. A copy has its own session, directory, environment, arguments and log, like a process
that was started by `subprocess`; `ps` alone shows this program's name in place of its own.

Requests are lines on standard input, each with a number that its answer on standard output begins with. At the end of
input, when the test run is gone, the server ends, and so does whatever it has forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

IMPORTED = (
    "alembic.command", "celery.bin.amqp", "celery.bin.beat", "celery.bin.call", "celery.bin.control",
    "celery.bin.events", "celery.bin.graph", "celery.bin.list", "celery.bin.logtool", "celery.bin.migrate",
    "celery.bin.multi", "celery.bin.purge", "celery.bin.result", "celery.bin.shell", "celery.bin.upgrade",
    "celery.bin.worker", "click_didyoumean", "click_plugins", "kombu.transport.pyamqp", "kombu.transport.redis",
    "psycopg", "pytest", "redis", "rich.console", "rich.table", "rich.tree", "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.orm", "xml.etree.ElementTree",
)  # fmt: skip
"""Of Celery what the command `celery` imports before it looks for an app, which may replace parts of what comes later;
and what else takes long, and is imported by many of the processes that tests start."""
OURS = (
    "celery_sidejob.cli", "celery_sidejob.extension", "celery_sidejob.hooks.steps",
    "celery.apps.worker", "celery.backends.redis", "celery.concurrency.prefork", "celery.fixups.django",
    "celery.worker.consumer",
)  # fmt: skip
"""What a worker whose app makes a `SideJob` imports later: of us all but a few modules, and of Celery."""
CRASH_POINTS = "celery_sidejob.model.crash_points"
MAKES_A_SIDEJOB = re.compile(r"\b(SideJob|make_app)\(")
"""The latter is of tests/tools/apps.py."""
PATCHING = ("gevent", "eventlet")
"""What replaces parts of modules that we have imported: processes with a word of it start without us."""
READ_AT_IMPORT = ("COVERAGE_PROCESS_START", "PYTHONHASHSEED", "REMAP_SIGTERM", "SENTRY", "TZ")
"""What Python, its libraries or Celery read once, when they start or are imported; Sentry replaces parts of Celery."""


def can_fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path = Path()) -> bool:
    """Tell whether a process may begin as a copy of the server, and gains by it."""
    program, how, *_ = *argv, ""
    if how in ("-c", "-m"):
        gains = any("celery" in word or "tests." in word for word in argv[1:])
    else:
        gains = how.endswith(".py") and makes_a_sidejob(argv, env, cwd)
    return (
        program == sys.executable
        and gains
        and not any(name in word for word in argv[1:] for name in PATCHING)
        and not any(name in env for name in READ_AT_IMPORT)
    )


def makes_a_sidejob(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> bool:
    """Tell whether the program itself, or the module of its app, makes a `SideJob`, and may find ours imported."""
    _, how, *words = argv
    if how.endswith(".py"):
        return (cwd / how).is_file() and _says_so((cwd / how).read_text())
    what, *arguments = words
    if how == "-c":
        return _says_so(what)
    module = arguments[arguments.index("-A") + 1] if "-A" in arguments else what
    place = module.partition(":")[0].replace(".", "/")
    for folder in (str(cwd), *env.get("PYTHONPATH", "").split(os.pathsep)):
        for file in (Path(folder, f"{place}.py"), Path(folder, place, "__init__.py")):
            if file.is_file():
                return _says_so(file.read_text())
    return False


def _says_so(source: str) -> bool:
    return MAKES_A_SIDEJOB.search(source) is not None


class ForkServers:
    """The two servers: one has imported Celery, the other has imported `celery_sidejob` too."""

    def __init__(self, env: Mapping[str, str], *, root: Path) -> None:
        """Ours finds what a process with this environment finds; the other is given its copies' path by each of them.

        `root` is the folder in which `tests` is.
        """
        self._plain, self._ours = ForkServer({**env, "PYTHONPATH": str(root)}), ForkServer(env, *OURS)
        self._path = env["PYTHONPATH"]

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path) -> ForkedProcess:
        """Start a process as a copy of the one that has imported most of what it may find imported."""
        ours = env.get("PYTHONPATH") == self._path and makes_a_sidejob(argv, env, cwd)
        return (self._ours if ours else self._plain).start(argv, env=env, cwd=cwd, log_path=log_path)

    def close(self) -> None:
        """End both, and what they have forked; `with` does this."""
        self._plain.close()
        self._ours.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ForkServer:
    """Starts processes as copies of one that has imported Celery; that one is started when it is first needed."""

    def __init__(self, env: Mapping[str, str], *further: str) -> None:
        """The process has imported the modules `further` as well."""
        self._env = dict(env)
        self._further = further
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path) -> ForkedProcess:
        """Start one; when this returns it has its session."""
        return ForkedProcess(self, self.ask("fork", list(argv), dict(env), str(cwd), str(log_path)))

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have the server do something, and return its answer."""
        with self._lock:
            process = self._process = self._process or self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            number = next(self._numbers)
            process.stdin.write(json.dumps([number, verb, *arguments]).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                answered, answer = json.loads(line)
                if answered == number:  # else to a question that a time limit has cut short
                    return answer
        raise RuntimeError("the fork server has ended; why is on standard error")

    def close(self) -> None:
        """End the server and what it has forked; `with` does this."""
        if self._process is not None:
            self._process.communicate(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *self._further],
            env=self._env,
            cwd="/",  # not in the tree, see `Processes`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the test run
        )


class ForkedProcess:
    """A process that the server has forked: as much of `subprocess.Popen` as tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None as long as it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit code once it has ended."""
        from tests.tools.waiting import wait_until  # here, because the server imports nothing of the package

        try:
            wait_until(lambda: self.poll() is not None, timeout=timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it."""
        self.send_signal(signal.SIGKILL)


# -- the server's own process ------------------------------------------------------------------------------------------


def main() -> None:
    """Fork as asked until there are no more requests; in each forked process be what was asked for."""
    further = sys.argv[1:]
    for name in (*IMPORTED, *further):
        importlib.import_module(name)
    assert further or not any(name.partition(".")[0] == "celery_sidejob" for name in sys.modules)
    assert threading.active_count() == 1
    gc.freeze()  # a collection in a copy would touch, and so double, all that is shared
    order = serve()
    if order is not None:
        become(*order)


def serve() -> tuple[list[str], dict[str, str], str, str] | None:
    """Answer requests to their end and return None; in a forked process return what it is to be."""
    children: set[int] = set()
    for line in sys.stdin.buffer:
        number, verb, *arguments = json.loads(line)
        if verb == "fork":
            pid = os.fork()
            if pid == 0:
                os.setsid()
                answer(number, os.getpid())
                return arguments[0], arguments[1], arguments[2], arguments[3]
            children.add(pid)
        else:
            (pid,) = arguments
            ended, status = os.waitpid(pid, os.WNOHANG)
            answer(number, os.waitstatus_to_exitcode(status) if ended else None)
            children.discard(ended)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def answer(number: int, value: int | None) -> None:
    """Answer a request."""
    os.write(1, json.dumps([number, value]).encode() + b"\n")


def become(argv: list[str], env: dict[str, str], cwd: str, log_path: str) -> None:
    """Be the process of a command line, as its interpreter would have begun; the rest of our life is its own."""
    for path, flags, numbers in (
        (os.devnull, os.O_RDONLY, [0]),
        (log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, [1, 2]),
    ):
        opened = os.open(path, flags, 0o600)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if CRASH_POINTS in sys.modules:
        sys.modules[CRASH_POINTS].follow(env)  # the only variables that ours read at import
    _, how, *words = argv
    what, *arguments = words if how in ("-c", "-m") else [how, *words]
    first = {"-c": "", "-m": cwd}.get(how, os.path.dirname(os.path.abspath(what)))
    sys.path[:] = dict.fromkeys([first, *env.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]])
    importlib.invalidate_caches()
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    if how == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how != "-c":
        sys.argv = [what, *arguments]
        program.__file__ = os.path.abspath(what)
        exec(compile(Path(what).read_bytes(), what, "exec"), program.__dict__)
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
