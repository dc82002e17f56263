"""Processes are started, killed, frozen and, whatever happens, not left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import celery
import psutil
import pytest

from tests.tools.freezing import is_alive
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

APP = "tests.tools.plain_app"


@pytest.fixture
def env(redis_url: str, record: Record) -> dict[str, str]:
    return {"BROKER_URL": redis_url, **record.env}


@pytest.fixture
def client(redis_url: str) -> celery.Celery:
    return celery.Celery(broker=redis_url, set_as_current=False)


def test_a_worker_is_ready_and_runs_tasks(
    processes: Processes, env: dict[str, str], client: celery.Celery, record: Record
) -> None:
    worker = processes.start_worker(APP, env=env)
    client.send_task("plain.note", ["hello"])

    (line,) = record.wait_for("hello")
    assert worker.children() == [line["pid"]]
    assert worker.alive

    worker.terminate()
    assert worker.wait() == 0
    assert not worker.alive
    assert worker.group() == []
    client.close()


def test_queues_pool_and_name_reach_the_worker(
    processes: Processes, env: dict[str, str], client: celery.Celery, record: Record
) -> None:
    worker = processes.start_worker(APP, env=env, pool="solo", queues=["high", "low"], name="ours", extra=["-E"])
    client.send_task("plain.note", ["low"], queue="low")

    assert record.wait_for("low")[0]["pid"] == worker.pid
    assert worker.nodename == "ours@test"
    assert "task events: ON" in worker.log()
    client.close()


FORKING = """
import os, time
if os.fork():
    print("parent", flush=True)
else:
    print("child", flush=True)
time.sleep(600)
"""


def test_a_kill_takes_the_main_process_and_the_group_kill_the_rest(processes: Processes) -> None:
    parent = processes.start_python(FORKING)
    parent.wait_for_log("parent")
    parent.wait_for_log("child")
    (child,) = parent.children()

    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    assert parent.group() == [child]

    parent.kill_group()
    assert parent.group() == []
    assert not is_alive(child)


def test_a_killed_worker_is_gone_in_the_middle_of_its_task(
    processes: Processes, env: dict[str, str], client: celery.Celery, record: Record
) -> None:
    worker = processes.start_worker(APP, env=env)
    client.send_task("plain.hang")
    record.wait_for("hanging")

    worker.kill()
    assert worker.wait() == -signal.SIGKILL
    worker.kill_group()  # on Linux Celery has asked for its pool children to be killed as well; elsewhere we do it
    assert worker.group() == []
    client.close()


def test_a_frozen_worker_does_nothing_until_it_goes_on(
    processes: Processes, env: dict[str, str], client: celery.Celery, record: Record
) -> None:
    worker = processes.start_worker(APP, env=env)
    worker.stop_signal()
    assert {psutil.Process(pid).status() for pid in worker.group()} == {psutil.STATUS_STOPPED}
    assert worker.alive
    client.send_task("plain.note", ["late"])

    with pytest.raises(TimeoutError):
        record.wait_for("late", timeout=0.3)
    worker.cont()
    record.wait_for("late")
    client.close()


def test_beat_sends_what_is_due(processes: Processes, env: dict[str, str], record: Record) -> None:
    processes.start_worker(APP, env=env, pool="solo")
    processes.start_beat(APP, env=env)

    record.wait_for("tick", count=2)


def test_a_worker_that_cannot_start_is_reported_with_its_log(processes: Processes, env: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with 2> before it wrote .*no_such_app"):
        processes.start_worker("tests.tools.no_such_app", env=env)


def test_a_log_line_that_does_not_come_is_a_timeout_with_the_log(processes: Processes) -> None:
    process = processes.start_python("import time; print('begun'); time.sleep(600)")
    process.wait_for_log("begun")

    with pytest.raises(TimeoutError, match=r"(?s)'ended'.*its log ends with:\nbegun"):
        process.wait_for_log("ended", timeout=0.05)
    with pytest.raises(TimeoutError, match="not ended within"):
        process.wait(0.05)


def test_a_process_gets_only_the_environment_it_is_given(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEJOB_CRASH_POINTS", "claim.committed=kill")
    source = "import os; print(os.environ.get('SIDEJOB_CRASH_POINTS'), os.environ['MINE'])"
    process = processes.start_python(source, env={"MINE": "given"})

    assert process.wait() == 0
    assert process.log() == "None given\n"


def test_a_process_imports_what_the_tests_import(processes: Processes) -> None:
    import celery_sidejob

    source = "import celery_sidejob, tests.tools; print(celery_sidejob.__path__[0], tests.tools.__path__[0])"
    process = processes.start_python(source)

    assert process.wait() == 0, process.log()
    assert process.log().split() == [celery_sidejob.__path__[0], str(Path(__file__).parent)]


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from tests.tools.guard import Guard
from tests.tools.workers import Processes

processes = Processes(Path(sys.argv[1]), Guard())
parent = processes.start_python(sys.argv[2])
parent.wait_for_log("parent")
parent.wait_for_log("child")
(child,) = parent.children()
print(parent.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_run_that_is_killed(processes: Processes, tmp_path: Path) -> None:
    run = processes.start_python(KILLED_RUN, str(tmp_path / "inner"), FORKING)
    assert run.wait() == -signal.SIGKILL, run.log()

    parent, child = map(int, run.log().split())
    wait_until(lambda: not is_alive(parent) and not is_alive(child))


FAILING_TEST = """
def test_fails(processes):
    processes.start_python("print('what the process said')").wait()
    print("group:", processes.start_python("import time; time.sleep(600)").pid)
    assert False
"""


def test_a_failing_test_shows_the_logs_and_leaves_nothing(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.tools.workers']")
    (tmp_path / "test_fails.py").write_text(FAILING_TEST)
    run = processes.start([sys.executable, "-m", "pytest", "-p", "no:randomly", "."], cwd=tmp_path)

    assert run.wait(60) == pytest.ExitCode.TESTS_FAILED, run.log()
    assert "what the process said" in run.log()
    assert "log of <Process python" in run.log()
    pid = next(int(line.split()[1]) for line in run.log().splitlines() if line.startswith("group:"))
    assert not is_alive(pid)
