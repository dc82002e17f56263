"""The demo as people run it: it counts right, says what happened, and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT, Process, Processes

EXAMPLES = ROOT / "examples"
DEMO_S = 50.0
GONE_S = 20.0
CLIENT = """
import json, sys, code_census
root, collector = code_census.start(json.loads(sys.argv[1]))
totals = root.wait(timeout=40).state["totals"]
root.run()
again = root.wait(timeout=40).state["totals"]
collector.terminate().wait("terminated", timeout=40)
print("counted", json.dumps([totals, again, collector.state, len(code_census.sidejob.jobs(limit=1000))]))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the demo and all its processes keep their files; unlike `tmp_path` another account may enter it."""
    directory = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A few packages of the standard library."""
    target = tmp_path / "sample"
    for package in ("json", "email"):
        source = Path(sysconfig.get_path("stdlib")) / package
        shutil.copytree(source, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture
def demo(processes: Processes, temporary: Path, tmp_path: Path) -> Callable[..., Process]:
    """Start the demo in a directory of this test's own."""

    def start(*arguments: str) -> Process:
        env = {"TMPDIR": str(temporary), "COLUMNS": "100"}
        argv = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
        return processes.start(argv, env=env, name="demo", cwd=tmp_path)

    return start


def left_in(temporary: Path) -> list[psutil.Process]:
    """The processes that the demo has started, or those have: they work in the temporary directory, or know of it."""

    def belongs(process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Postgres writes over its environment; but it works in its data directory.
            return any(
                where.startswith(str(temporary)) for where in (process.cwd(), process.environ().get("TMPDIR", ""))
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    return [process for process in psutil.process_iter() if belongs(process)]


def test_it_counts_right_after_a_kill_and_an_emptied_broker(
    demo: Callable[..., Process], sample: Path, temporary: Path, tmp_path: Path
) -> None:
    files = len(list(sample.rglob("*.py"))) + 3
    running = demo(str(sample))
    assert running.wait(DEMO_S) == 0, running.log()
    said = running.log()
    assert "kill -9 of worker" in said
    assert "emptied the broker" in said
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    table = {row[0]: row[1:] for row in rows}
    assert table["files"] == [str(files)] * 2
    assert table["unparsable"] == ["3", "3"]
    assert "broker emptied" in table
    jobs = ElementTree.parse(tmp_path / "census.svg").findall(".//*[@class='job completed']")
    assert len(jobs) == files + len([path for path in sample.rglob("*") if path.is_dir()]) + 3
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("moment", ["A census of", "Up:", " done "])
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left_when_it_is_interrupted(
    demo: Callable[..., Process], temporary: Path, number: signal.Signals, exit_code: int, moment: str
) -> None:
    running = demo()  # of the standard library, so that it is not over before the signal
    running.wait_for_log(moment, DEMO_S)
    assert left_in(temporary)
    running.send_signal(number)
    assert running.wait(GONE_S) == exit_code, running.log()
    wait_until(lambda: not left_in(temporary), timeout=GONE_S, message="all processes to be gone")
    if number != signal.SIGKILL:
        assert list(temporary.iterdir()) == []


def test_a_path_that_is_not_there_is_an_error_of_the_caller(demo: Callable[..., Process]) -> None:
    running = demo("/no/such/path")
    assert running.wait(DEMO_S) == 2
    assert "there is no /no/such/path" in running.log()


def test_the_jobs_of_a_census_count_each_file_once(
    processes: Processes, database_url: str, redis_url: str, sample: Path
) -> None:
    env = {"SIDEJOB_DATABASE_URL": database_url, "CELERY_BROKER_URL": redis_url}
    (sample / "broken.py").write_text("def f(:\n")
    (sample / "empty").mkdir()
    (sample / "json" / "two.py").write_text("import a, b\n\n\nclass C:\n    async def f(self): ...\n")
    processes.start_worker("code_census", env=env, cwd=EXAMPLES, concurrency=2)
    client = processes.start_python(CLIENT, json.dumps({str(sample): 1}), env=env, cwd=EXAMPLES, name="client")
    client.wait_for_log("counted", 50)
    totals, again, unparsable, jobs = json.loads(client.log().rpartition("counted")[2])
    files = list(sample.rglob("*.py"))
    assert totals["files"] == len(files)
    assert totals["lines"] == sum(len(file.read_bytes().splitlines()) for file in files) - 1
    assert totals["classes"] == sum(file.read_text().count("\nclass ") for file in files)
    assert totals["unparsable"] == 1
    assert again == totals
    assert list(unparsable) == [str(sample / "broken.py")]
    assert jobs == len(files) + len([path for path in [sample, *sample.rglob("*")] if path.is_dir()]) + 2


def test_a_sample_is_always_the_same(processes: Processes, sample: Path) -> None:
    source = "import sys, code_census as c; print(len(c.entries(sys.argv[1], 1)), *c.entries(sys.argv[1], 3))"

    def entries() -> list[str]:
        process = processes.start_python(source, str(sample / "email"), cwd=EXAMPLES)
        assert process.wait() == 0, process.log()
        return process.log().split()

    first, second = entries(), entries()
    assert first == second
    assert str(sample / "email" / "mime") in first
    assert 1 < len(first) - 1 < int(first[0])
