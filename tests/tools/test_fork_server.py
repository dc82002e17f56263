"""A forked process is what one that was started would be."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.fork_server import ForkedProcess, ForkServer, ForkServers, can_fork, makes_a_sidejob
from tests.tools.freezing import is_alive
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

LOOK = """
import json, os, signal, sys, tests.tools
print(json.dumps({
    "arguments": sys.argv, "path": sys.path, "directory": os.getcwd(), "environment": dict(os.environ),
    "leads its session": os.getsid(0) == os.getpid(), "main": vars(sys.modules["__main__"]) is globals(),
    "files": sorted(int(name) for name in os.listdir("/dev/fd")), "input": sys.stdin.read(),
    "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "ours": "celery_sidejob" in sys.modules,
}))
print("and to the other stream", file=sys.stderr)
"""
ENDS = {
    "at its end": ("import celery", 0),
    "with a code": ("import celery, sys; sys.exit(3)", 3),
    "with an error": ("import celery; raise ValueError('celery')", 1),
    "by a signal": ("import celery, os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "by Ctrl-C": ("import celery, os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
}


@pytest.fixture(params=["started", "forked"])
def either(request: pytest.FixtureRequest, tmp_path: Path, process_guard: Guard, fork_server: ForkServers) -> Processes:
    """What starts processes in one way, and in the other."""
    return Processes(tmp_path / "processes", process_guard, fork_server if request.param == "forked" else None)


def test_both_have_the_same_surroundings(tmp_path: Path, process_guard: Guard, fork_server: ForkServers) -> None:
    (tmp_path / "look_around_tests.py").write_text(LOOK)
    seen: dict[str, list[Any]] = {"-c": [], "-m": []}
    for server in (None, fork_server):
        processes = Processes(tmp_path / "processes", process_guard, server)
        for how, what in (("-c", LOOK), ("-m", "look_around_tests")):
            env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "MINE": "given"}
            argv = [sys.executable, how, what, "tests.", "a word"]
            process = processes.start(argv, env=env, cwd=tmp_path)
            assert isinstance(process._started, ForkedProcess) is (server is not None)
            assert process.wait() == 0, process.log()
            document, other = process.log().splitlines()
            assert other == "and to the other stream"
            seen[how].append(json.loads(document))

    for started, forked in seen.values():
        path = list(dict.fromkeys(started["path"]))
        assert forked["path"][: len(path)] == path, "what comes after is found there already"
        assert {**forked, "path": None} == {**started, "path": None}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_such_a_process_does(either: Processes, how: str) -> None:
    source, code = ENDS[how]
    process = either.start_python(source)

    assert process.wait() == code
    assert not process.alive
    process.terminate()  # of which a process that has ended hears nothing
    assert either.kill_all() == []


def test_what_it_has_registered_is_done_at_its_end(either: Processes) -> None:
    process = either.start_python("import atexit, celery; atexit.register(print, 'over')")

    assert process.wait() == 0
    assert process.log() == "over\n"


@pytest.mark.parametrize(
    "argv",
    [
        [sys.executable, "-m", "celery", "-A", "tests.app", "worker", "--pool=gevent"],
        [sys.executable, "-c", "import eventlet, celery"],
        [sys.executable, "-c", "print('nothing')"],
        [sys.executable, "celery.py"],
        ["/usr/bin/celery", "-m", "celery"],
    ],
)
def test_what_patches_modules_and_what_gains_nothing_is_started(argv: list[str]) -> None:
    assert not can_fork(argv, {})


def test_what_is_read_by_celery_when_it_is_imported_has_a_process_started() -> None:
    argv = [sys.executable, "-m", "celery", "-A", "tests.app", "worker"]

    assert can_fork(argv, {"SIDEJOB_LEASE": "4"})
    assert not can_fork(argv, {"REMAP_SIGTERM": "SIGQUIT"})


def test_nothing_is_imported_that_an_app_may_still_replace(processes: Processes) -> None:
    look = "import json, sys; print(json.dumps([name for name in sys.modules if name.startswith('celery')]))"
    before = processes.start_python(f"{look} # tests.", name="forked")
    command = processes.start([sys.executable, "-c", f"import celery.bin.celery; {look}"], env={"TZ": "UTC"})

    assert (before.wait(), command.wait()) == (0, 0)
    assert set(json.loads(before.log())) <= set(json.loads(command.log()))


SHOP = """
from celery import Celery
from celery_sidejob import SideJob
app = Celery("shop")
sidejob = SideJob(app)
"""
REMEMBERED = "import json, sys; print(json.dumps('celery_sidejob.extension' in sys.modules)) # tests."


def test_who_makes_a_sidejob_finds_ours_imported_and_nobody_else_does(processes: Processes) -> None:
    plain = processes.start_python(REMEMBERED, name="plain")
    ours = processes.start_python(f"{REMEMBERED} SideJob()", name="ours")
    elsewhere = processes.start_python(f"{REMEMBERED} SideJob()", env={"PYTHONPATH": "/"}, name="elsewhere")

    assert [process.wait() for process in (plain, ours, elsewhere)] == [0] * 3
    assert [json.loads(process.log()) for process in (plain, ours, elsewhere)] == [False, True, False]


def test_a_copy_follows_its_own_plan_of_crash_points(processes: Processes) -> None:
    source = "from celery_sidejob.model.crash_points import reach; reach('here')"
    for program in (f"{source} # tests.", f"{source} # tests. SideJob()"):
        planned = processes.start_python(program, env={"SIDEJOB_CRASH_POINTS": "here=kill"}, name="planned")
        other = processes.start_python(program, name="other")
        assert (planned.wait(), other.wait()) == (-signal.SIGKILL, 0)


def test_a_point_for_the_pool_passes_the_worker_itself_by(processes: Processes) -> None:
    source = """
import os
from celery_sidejob.model.crash_points import reach
reach("here")
if (pid := os.fork()) == 0:
    reach("here")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    worker = processes.start_python(source, env={"SIDEJOB_CRASH_POINTS": "here=kill-child"})
    assert (worker.wait(), int(worker.log())) == (0, -signal.SIGKILL)


def test_an_apps_module_tells_whether_it_makes_a_sidejob(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(SHOP)
    (tmp_path / "plain.py").write_text("from celery_sidejob import transport")
    elsewhere = tmp_path / "elsewhere"

    def tells(app: str, cwd: Path, **env: str) -> bool:
        return makes_a_sidejob([sys.executable, "-m", "celery", "-A", app, "worker"], env, cwd)

    assert [tells(app, tmp_path) for app in ("shop", "shop:app", "package", "plain", "none")] == [True] * 3 + [
        False
    ] * 2
    assert tells("shop", elsewhere, PYTHONPATH=f"/:{tmp_path}")
    assert not tells("shop", elsewhere)
    assert makes_a_sidejob([sys.executable, "-m", "shop"], {}, tmp_path)


def test_a_worker_imports_little_of_ours_that_its_server_has_not(
    processes: Processes, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Or the second server would no longer be worth its start."""
    (tmp_path / "shop.py").write_text(
        SHOP
        + """
import atexit, sys

def ours():
    return len([name for name in sys.modules if name.startswith("celery_sidejob")])

atexit.register(lambda before: print(before, ours(), file=sys.__stdout__), ours())
"""
    )
    env = {"SIDEJOB_DATABASE_URL": database_url, "CELERY_BROKER_URL": redis_url}
    worker = processes.start_worker("shop", env=env, cwd=tmp_path, pool="solo")

    worker.terminate()

    assert worker.wait() == 0
    at_first, at_last = map(int, worker.log().splitlines()[-1].split())
    assert 100 < at_first <= at_last < at_first + 25


def test_nothing_outlives_its_server(tmp_path: Path) -> None:
    with ForkServer(environment({"PYTHONPATH": str(Path(__file__).parents[2])})) as server:
        argv = [sys.executable, "-c", "import celery, time; time.sleep(600)"]
        process = server.start(argv, env=environment({}), cwd=tmp_path, log_path=tmp_path / "log")
        assert is_alive(process.pid)

    wait_until(lambda: not is_alive(process.pid))


def test_a_script_that_makes_a_sidejob_runs_as_it_would_alone(
    tmp_path: Path, process_guard: Guard, fork_server: ForkServers
) -> None:
    (tmp_path / "beside.py").write_text("FOUND = True")
    script = "import beside, json, sys; print(json.dumps([sys.argv, sys.path, __file__, __name__, beside.FOUND]))"
    (tmp_path / "script.py").write_text(f"{script} # SideJob(")
    seen: list[list[Any]] = []
    for server in (None, fork_server):
        process = Processes(tmp_path / "processes", process_guard, server).start(
            [sys.executable, "script.py", "a word"], cwd=tmp_path
        )
        assert isinstance(process._started, ForkedProcess) is (server is not None)
        assert process.wait() == 0, process.log()
        seen.append(json.loads(process.log()))

    (_, alone, *_), (_, forked, *_) = seen
    alone = list(dict.fromkeys(alone))
    assert forked[: len(alone)] == alone
    assert [[*one[:1], *one[2:]] for one in seen] == [[["script.py", "a word"], *seen[0][2:]]] * 2
