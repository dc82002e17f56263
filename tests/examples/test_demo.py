"""The demo as people run it: it counts right, says what happened, and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import httpx
import psutil
import psycopg
import pytest
import redis

from tests.tools.servers import SHORT_TEMPORARY
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
    directory = Path(tempfile.mkdtemp(prefix="demo-", dir=SHORT_TEMPORARY))
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
    """Start the demo in a directory of this test's own; by a shell, if its line is given with {demo} in it."""

    def start(*arguments: str, shell: str | None = None, **env: str) -> Process:
        argv = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
        if shell is not None:
            argv = ["bash", "-c", shell.format(demo=shlex.join(argv))]
        env = {"TMPDIR": str(temporary), "COLUMNS": "100"} | env
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


def is_empty(directory: Path) -> bool:
    """Tell whether nothing is in a directory; LookupError says what is."""
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    if found:
        raise LookupError(f"there are {len(found)}: {found[:20]}")
    return True


def tables_of(said: str) -> dict[str, list[str]]:
    """The rows of all tables, by what stands in their first column."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


BROKERS = [
    pytest.param((), False, id="postgres"),
    pytest.param(("--broker", "redis"), True, id="redis", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arguments", "has_valkey"), BROKERS)
def test_it_counts_right_after_a_kill_and_an_emptied_broker(
    demo: Callable[..., Process], sample: Path, temporary: Path, tmp_path: Path, arguments: Sequence[str],
    has_valkey: bool,
) -> None:  # fmt: skip
    (sample / "binary.py").write_bytes(bytes(range(256)) * 10)
    (sample / "deep.py").write_text("(" * 5000 + ")" * 5000)
    (sample / "python2.py").write_text('print "Hello"\n')
    (sample / "[red] :smile: é.py").write_text("x = 1\n")
    (sample / "loop.py").symlink_to("loop.py")
    (sample / "json" / "back").symlink_to(sample)
    files = len(list(sample.rglob("*.py"))) - 1
    running = demo(*arguments, str(sample))
    running.wait_for_log("Up after", DEMO_S)
    servers = {process.name().partition("-")[0] for process in left_in(temporary)} & {"postgres", "valkey"}
    assert servers == ({"postgres", "valkey"} if has_valkey else {"postgres"})
    assert running.wait(DEMO_S) == 0, running.log()
    said = running.log()
    assert re.search(r"kill -9 of worker \d, process \d+(, the one that sweeps)?, with [1-9]\d* runs? under way", said)
    assert "emptied the broker" in said
    table = tables_of(said)
    assert table["files"] == [str(files)] * 2
    assert table["unparsable"] == ["3", "3"]
    assert "broker emptied" in table
    picture = ElementTree.parse(tmp_path / "census.svg")
    jobs = files + len([path for path in sample.rglob("*") if path.is_dir() and not path.is_symlink()]) + 2
    assert (picture.getroot()[0].text or "").endswith(f": {jobs + 1} jobs")
    recovered = picture.findall(".//*[@class='job completed recovered']")
    assert recovered
    assert len(picture.findall(".//*[@class='job completed']")) + len(recovered) == jobs
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.few(0)
def test_with_its_web_page_it_stays_until_ctrl_c(demo: Callable[..., Process], sample: Path, temporary: Path) -> None:
    running = demo("--web", str(sample))
    running.wait_for_log("The web page stays until Ctrl-C", DEMO_S)
    found = re.search(r"(http://\S+/) Log in as demo with (\S+)", running.log())
    assert found is not None
    with httpx.Client(base_url=found[1]) as browser:
        entered = browser.post("login", data={"name": "demo", "password": found[2]})
        cookies = {"cookie": f"sidejob_web={entered.cookies['sidejob_web']}"}
        assert "code_census.count" in browser.get("jobs", headers=cookies).text
    running.send_signal(signal.SIGINT)
    assert running.wait(GONE_S) == 130, running.log()
    wait_until(lambda: not left_in(temporary), timeout=GONE_S, message="all processes to be gone")


STRUCK = [
    pytest.param("Starting", signal.SIGINT, 130, marks=pytest.mark.slow),
    ("Starting", signal.SIGKILL, -signal.SIGKILL),
    pytest.param("Up after", signal.SIGINT, 130, marks=pytest.mark.slow),
    ("Up after", signal.SIGTERM, 143),
    ("jobs done", signal.SIGINT, 130),
    pytest.param("jobs done", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
]
"""CI has each moment, and each signal, once."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("moment", "number", "exit_code"), STRUCK)
def test_nothing_is_left_when_it_is_interrupted(
    demo: Callable[..., Process], temporary: Path, number: signal.Signals, exit_code: int, moment: str
) -> None:
    running = demo()  # of the standard library, so that it is not over before the signal
    running.wait_for_log(moment, DEMO_S)
    running.send_signal(number)
    assert running.wait(GONE_S) == exit_code, running.log()
    assert "Traceback" not in running.log()
    wait_until(lambda: not left_in(temporary), timeout=GONE_S, message="all processes to be gone")
    wait_until(lambda: is_empty(temporary), timeout=GONE_S, message="all directories to be gone")


@pytest.mark.few(0)
def test_nothing_is_left_when_nobody_reads_it_to_the_end(
    demo: Callable[..., Process], sample: Path, temporary: Path
) -> None:
    running = demo(str(sample), shell="{demo} <&- | head -n 3")
    assert running.wait(DEMO_S) == 0
    assert len(running.log().splitlines()) == 3, running.log()
    wait_until(lambda: not left_in(temporary), timeout=GONE_S, message="all processes to be gone")
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_servers_that_were_given_are_left_as_they_were(
    demo: Callable[..., Process], sample: Path, temporary: Path, empty_database_url: str, redis_url: str
) -> None:
    running = demo(str(sample / "json"), SIDEJOB_DATABASE_URL=empty_database_url, CELERY_BROKER_URL=redis_url)
    assert running.wait(DEMO_S) == 0, running.log()
    assert "kill -9 of worker" in running.log()
    assert "is not ours, so it is not emptied" in running.log()
    assert schemas_of(empty_database_url) == {"public"}
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter()) == []
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_postgres_that_was_given_is_the_broker_and_is_left_as_it_was(
    demo: Callable[..., Process], sample: Path, temporary: Path, empty_database_url: str
) -> None:
    running = demo(str(sample / "json"), SIDEJOB_DATABASE_URL=empty_database_url)
    assert running.wait(DEMO_S) == 0, running.log()
    assert "emptied the broker" in running.log()
    assert schemas_of(empty_database_url) == {"public"}
    assert left_in(temporary) == []


@pytest.mark.few(0)
def test_a_broker_is_chosen_once(demo: Callable[..., Process], sample: Path, redis_url: str) -> None:
    for arguments, given, complaint in [
        (["--broker", "redis"], redis_url, "--broker redis is for a broker of the demo's own"),
        ([], "sidejobpg://localhost/census", "set SIDEJOB_DATABASE_URL alone"),
    ]:
        running = demo(*arguments, str(sample), CELERY_BROKER_URL=given)
        assert running.wait(DEMO_S) == 1
        assert complaint in running.log()
        assert "Traceback" not in running.log()


def schemas_of(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)'")
        return {name for (name,) in rows}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "there is no "),
        (lambda path: path.write_text("x = 1\n"), "is not a directory"),
        (lambda path: path.symlink_to(path), "is not a directory"),
        (lambda path: (path / "__pycache__").mkdir(parents=True), "there is no Python file in "),
    ],
)
def test_a_path_without_python_files_is_refused(
    demo: Callable[..., Process], tmp_path: Path, temporary: Path, make: Callable[[Path], object], complaint: str
) -> None:
    make(tmp_path / "given.py")
    running = demo(str(tmp_path / "given.py"))
    assert running.wait(DEMO_S) == 2
    assert complaint in running.log()
    assert str(tmp_path / "given.py") in running.log()
    assert "Traceback" not in running.log()
    assert list(temporary.iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"SIDEJOB_DATABASE_URL": "mysql://localhost/census"}, "must begin with postgresql://, not with mysql://"),
        (
            {"SIDEJOB_DATABASE_URL": "postgresql://127.0.0.1:1/census"},
            "Postgres of SIDEJOB_DATABASE_URL cannot be used",
        ),
        ({"CELERY_BROKER_URL": "redis://127.0.0.1:1/0"}, "broker of CELERY_BROKER_URL cannot be used"),
        (
            {"CELERY_BROKER_URL": "ftp://127.0.0.1/0"},
            "broker of CELERY_BROKER_URL cannot be used: No such transport: ftp",
        ),
    ],
)
def test_servers_that_cannot_be_reached_are_refused(
    demo: Callable[..., Process], sample: Path, temporary: Path, given: dict[str, str], complaint: str
) -> None:
    running = demo(str(sample), **given)
    assert running.wait(DEMO_S) == 1
    assert complaint in running.log()
    assert "Traceback" not in running.log()
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.few(0)
def test_a_schema_that_is_there_is_not_touched(demo: Callable[..., Process], sample: Path, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE SCHEMA others CREATE TABLE jobs (kept int)")
    for schema in ("others", "sidejob"):
        running = demo(str(sample), SIDEJOB_DATABASE_URL=database_url, SIDEJOB_SCHEMA=schema)
        assert running.wait(DEMO_S) == 1
        assert f"Schema '{schema}' is there already" in running.log()
    assert schemas_of(database_url) == {"public", "others", "sidejob"}
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(kept) FROM others.jobs").fetchone() == (0,)


def test_more_files_than_there_is_time_for_are_sampled_and_more_directories_refused(
    processes: Processes, sample: Path
) -> None:
    source = """
import sys
from census_demo import plan
given = sys.argv[1]
plan.probe = lambda: 1.0
plan.BUDGET_S = 1000.0
whole = plan.make_plan(given)
plan.BUDGET_S = 20.0
part = plan.make_plan(given)
plan.BUDGET_S = 1.0
try:
    plan.make_plan(given)
except plan.UnusablePathError as error:
    print(whole.is_sample, part.is_sample, whole.files == part.all_files > part.files > 0, error)
"""
    process = processes.start_python(source, str(sample), cwd=EXAMPLES)
    assert process.wait() == 0, process.log()
    assert re.fullmatch(
        rf"False True True {sample} has more than \d directories, too many for a demo.*\n", process.log()
    )


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


def test_the_plain_loop_counts_files_that_all_parse_as_the_jobs_do(processes: Processes, sample: Path) -> None:
    """Neither has a number of files that do not parse: the demo compares what they have."""
    source = """
import json, sys
from collections import Counter
from pathlib import Path
import code_census
from census_demo.plain import count_all

jobs = Counter()
for file in Path(sys.argv[1]).rglob("*.py"):
    jobs.update({"files": 1, **code_census.count(file)})
plainly, unparsable = count_all(Path(sys.argv[1]), 1, lambda: None)
print(json.dumps([jobs, plainly, list(unparsable)]))
"""
    process = processes.start_python(source, str(sample), cwd=EXAMPLES)
    assert process.wait() == 0, process.log()
    jobs, plainly, unparsable = json.loads(process.log())
    assert (plainly, unparsable) == (jobs, [])


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
