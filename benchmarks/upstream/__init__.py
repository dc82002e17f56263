"""Celery's and kombu's own integration tests on stock Redis, on our brokers and with all tasks durable, compared.

    python -m benchmarks upstream               # Celery's canvas, tasks, inspect and worker, seven sides: an hour
    python -m benchmarks upstream --sides stock,durable -- t/integration/test_canvas.py -k chord
    python -m benchmarks upstream --of kombu    # kombu's tests of its Redis transport, on two sides: five minutes

The sides are `stock` (kombu's transport for Redis), `sidejob` and `sidejobpg` (the same tests on these brokers), and,
for Celery's tests only, `durable` and `sidejobpg-durable` (every task is durable, on kombu's transport for Redis and on
`sidejobpg://`), and `results` and `results-durable` (plain and durable tasks on `sidejobpg://`, where their results are
too; those of the other sides are in Redis). The package index gives the tests, in the version that is installed here;
they are not changed. `plugin.py` gives the tests of Celery our broker URL or our store, and `kombu_plugin.py` those of
kombu our transport for `redis://`. Workers that a test starts learn our URLs from `urls.py`. Each side has a Valkey of
its own, and a Postgres where it needs one. All sides run at once, or as many as `--at-once` says. The tests have time
limits of their own, which a busy machine misses: a test that ended differently on two sides, without a reason here, is
run once more by itself, one side after the other, and this counts. A test may fail on the stock side too: the command
fails only where a test ends differently on two sides.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import redis

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade

ROOT = Path(__file__).parents[2]
STOCK = "stock"
"""The scheme by which the plugin has kombu know its own transport for Redis."""
LIKE_REDIS = "redis_like"
"""The name by which Celery knows our result backend there: half of the tests ask for a name that begins with redis."""


@dataclass(frozen=True)
class Upstream:
    """A package whose integration tests are run here."""

    name: str
    tests: list[str]
    sides: tuple[str, ...]
    configuration: str
    """The file beside the tests that pytest reads."""
    plugin: str
    decided: Mapping[str, str]
    """Differences that stay, with the reason; see `reason_of`."""
    alone: tuple[str, ...] = ("pytest-rerunfailures",)
    libraries: tuple[str, ...] = ()
    """The tests import these, and our lock does not name them; pip installs the first ones without dependencies."""


KEYS = "reads Redis' own keys or channels; the results are in Postgres"
PROTOCOL = "calls with task_protocol 1; durable tasks need 2, and such a call raises SettingsError"
RECORD = "asks for what is held in kombu's own hash; ours has a record for each consumer"
BELL = "expects the message in the answer that is waited for; ours is a bell, and then the message is fetched"
AT_END = "expects a running task to be acknowledged; a durable task on sidejobpg:// is, once its run has ended"
CELERY = Upstream(
    "celery",
    [f"t/integration/test_{name}.py" for name in ("canvas", "group_chains", "tasks", "inspect", "worker")],
    ("stock", "sidejob", "durable", "sidejobpg", "sidejobpg-durable", "results", "results-durable"),
    "pyproject.toml",
    "benchmarks.upstream.plugin",
    {
        "test_revoked_by_headers_complex_canvas": "calls a task by the id of a durable task that still waits; this "
        "package refuses such a call",
        "test_task_sent_event_respects_publish_retry_limit": "expects an event that could not be sent in a list of "
        "Celery that nothing reads; after the call of a durable task, such an event is dropped",
        "test_replaced_task_nesting_level_0": "clears a flag after the call, which the worker may have set before "
        "the call of a durable task returns; fails sometimes",
        "test_task_failed": "expects a line of the worker's log 10 ms after the result, which may come later from a "
        "durable task; fails sometimes",
        "test_group_results_reach_the_next_group*-1]": PROTOCOL,
        "test_pending_chord_keeps_header_errback*-1]": PROTOCOL,
        "test_reapplying_frozen_chord_dispatches_body_again": "ends either way with results in Redis",
        "test_chord_on_error": KEYS,
        "test_asyncresult_forget_cancels_subscription": KEYS,
        "test_asyncresult_get_cancels_subscription": KEYS,
        "test_error_propagates_from_chord": "fails with Redis too, where the test expects that (celery#6437)",
        "test_active": AT_END,
        "test_query_task": AT_END,
        "test_scheduled": "expects the constant 6, the priority of all timers of a worker; on sidejobpg:// the message "
        "waits in Postgres, and `inspect scheduled` shows its own priority",
    },
    alone=("pytest-rerunfailures", "pytest-subtests", "pytest-order", "freezegun", "tblib"),
    libraries=("cryptography", "pydantic"),
)
KOMBU = Upstream(
    "kombu",
    ["t/integration/test_redis.py", "t/integration/test_redis_brpop_qos.py"],
    ("stock", "sidejob"),
    "setup.cfg",
    "benchmarks.upstream.kombu_plugin",
    {
        "test_restore_visible_requeues_expired_unacked": RECORD,
        "test_failed_requeue_keeps_message_unacked": RECORD,
        "test_failed_restore_visible_keeps_message_unacked": RECORD,
        "test_unacked_message_requeued_on_connection_close": RECORD,
        "test_hub_pauses_pending_brpop_until_ack": BELL,
        "test_drain_events_resumes_pending_brpop_without_resending": BELL,
    },
)
UPSTREAMS = {one.name: one for one in (CELERY, KOMBU)}
WITHOUT = ("randomly", "xdist", "asyncio")
"""Plugins of our environment that these tests were not written for."""


@dataclass(frozen=True)
class Suite:
    """The unpacked tests, and what they import."""

    folder: Path
    libraries: Path
    plugin: str


def main(arguments: list[str]) -> int:
    """Run the suite on each side; 1 if a test ended differently on one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks upstream", description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=UPSTREAMS, default=CELERY.name, help="whose tests")
    parser.add_argument(
        "--sides", help="some of the sides, with commas between them; without it all that the tests have"
    )
    parser.add_argument("--at-once", type=int, help="how many sides run at the same time; without it all")
    parser.add_argument("--keep", type=Path, help="a folder for the output of each side's pytest")
    parser.add_argument("pytest", nargs="*", help="tests and options for pytest, after --")
    given = parser.parse_args(arguments)
    upstream = UPSTREAMS[given.of]
    sides = given.sides.split(",") if given.sides else upstream.sides
    if unknown := set(sides) - set(upstream.sides):
        parser.error(f"--sides takes {', '.join(upstream.sides)}, not {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="upstream-") as directory:
        logs = given.keep or Path(directory)
        alone = logs / "alone"
        alone.mkdir(parents=True, exist_ok=True)
        suite = fetch(upstream, Path(directory))
        with ThreadPoolExecutor(given.at_once) as pool:  # the tests mostly wait
            ended = pool.map(lambda side: run(side, suite, given.pytest or upstream.tests, logs), sides)
            outcomes = dict(zip(sides, ended, strict=True))
        if again := [address(name) for name in to_repeat(outcomes, upstream.decided)]:
            print(f"once more, by themselves: {' '.join(again)}")
            for side in sides:
                outcomes[side] |= run(side, suite, again, alone)
    return report(outcomes, upstream.decided)


def fetch(upstream: Upstream, directory: Path) -> Suite:
    """Download the source of the installed package and what its tests need."""
    libraries, name = directory / "libraries", upstream.name
    if upstream.libraries:
        pip("install", "--target", libraries, *upstream.libraries)
    pip("install", "--target", libraries, "--no-deps", *upstream.alone)
    pip("download", "--dest", directory, "--no-deps", "--no-binary", name, f"{name}=={version(name)}")
    (archive,) = directory.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    (unpacked,) = (path for path in directory.glob(f"{name}-*") if path.is_dir())
    folder = directory / "suite"
    folder.mkdir()
    # Without the package beside them: the tests import the one that is installed here.
    (unpacked / "t").rename(folder / "t")
    (unpacked / upstream.configuration).rename(folder / upstream.configuration)
    (libraries / "sitecustomize.py").write_text("import benchmarks.upstream.urls\n")
    return Suite(folder, libraries, upstream.plugin)


def pip(*words: str | Path) -> None:
    """Call pip, which stays silent unless something goes wrong."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    subprocess.run(command, check=True)


def run(side: str, suite: Suite, arguments: list[str], logs: Path) -> dict[str, str]:
    """Run the tests on one side; returns how each ended."""
    results = logs / f"{side}.xml"
    command = [sys.executable, "-m", "pytest", "-p", suite.plugin, f"--junitxml={results}"]
    command += [*(word for plugin in WITHOUT for word in ("-p", f"no:{plugin}")), "--tb=native", *arguments]
    with ExitStack() as stack, (logs / f"{side}.log").open("w") as log:
        environment = {**os.environ, **servers(side, stack), "PYTHONPATH": f"{ROOT}:{suite.libraries}"}
        print(f"{side}: running, output in {log.name}", flush=True)
        subprocess.run(command, cwd=suite.folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return outcomes_in(results)


def servers(side: str, stack: ExitStack) -> Mapping[str, str]:
    """Start a side's servers; returns the variables by which the tests and the plugin find them."""
    server = stack.enter_context(embedded.Valkey())
    with redis.Redis.from_url(server.url) as client:
        client.acl_setuser("default", enabled=True, nopass=True)  # the tests' own connections know no password
    url = urlsplit(server.url)
    # Under a name of its own, as a test asks for URLs that begin with redis and leaves that broker out.
    scheme = "sidejob" if side == "sidejob" else STOCK
    broker = url._replace(scheme=scheme, path="/0").geturl()
    backend = url._replace(path="/0").geturl()
    store = None
    if side not in (STOCK, "sidejob"):
        store = stack.enter_context(embedded.Postgres(durable=False)).url
        upgrade(store, schema="sidejob")
        if side != "durable":
            broker = store.replace("postgresql://", "sidejobpg://", 1)
        if side == "results":
            backend = f"{LIKE_REDIS}+{broker}"
        elif side == "results-durable":
            backend = f"{LIKE_REDIS}+sidejobpg://"  # the store, so that a task's end and its result are one commit
    given = {
        "TEST_BROKER": broker,
        "TEST_BACKEND": backend,
        "REDIS_HOST": str(url.hostname),
        "REDIS_PORT": str(url.port),
        "REDIS_6379_TCP": str(url.port),
        "UPSTREAM_SIDE": side,
        "WORKER_LOGLEVEL": "INFO",  # some tests read the worker's log
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # and one starts `celery`
    }
    if side.endswith("durable"):
        given["UPSTREAM_STORE"] = str(store)
    return given


def outcomes_in(results: Path) -> dict[str, str]:
    """Read how each test ended from pytest's own file; empty if it did not come to write one."""
    if not results.exists():
        return {}
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        ended = {child.tag for child in case}
        found[name] = next((word for word in ("error", "failure", "skipped") if word in ended), "passed")
    return found


def names_in(outcomes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the tests of all sides."""
    return sorted({name for ended in outcomes.values() for name in ended})


def differing(outcomes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the tests that ended differently on two sides, or were not run on one of them."""
    return [name for name in names_in(outcomes) if len({ended.get(name) for ended in outcomes.values()}) > 1]


def reason_of(name: str, decided: Mapping[str, str]) -> str | None:
    """Return why a test may end differently: with any parameters, or with those that a name with a `*` matches."""
    test = name.rpartition("::")[2]
    found = (reason for decision, reason in decided.items() if "*" in decision and fnmatch(test, decision))
    return decided.get(test.partition("[")[0]) or next(found, None)


def to_repeat(outcomes: Mapping[str, Mapping[str, str]], decided: Mapping[str, str]) -> list[str]:
    """Return the tests that every side has run, and that ended differently without a reason."""
    return [
        name
        for name in differing(outcomes)
        if reason_of(name, decided) is None and all(name in ended for ended in outcomes.values())
    ]


def address(name: str) -> str:
    """Return the words by which pytest finds a test of its file of results: the module's name begins with `test_`."""
    path, _, test = name.partition("::")
    words = path.split(".")
    module = next(place for place, word in enumerate(words) if word.startswith("test_")) + 1
    return "::".join(["/".join(words[:module]) + ".py", *words[module:], test])


def report(outcomes: Mapping[str, Mapping[str, str]], decided: Mapping[str, str]) -> int:
    """Print the counts of each side and every test that ended differently on two of them."""
    for side, ended in outcomes.items():
        words = sorted(set(ended.values()))
        print(f"{side}: " + (", ".join(f"{list(ended.values()).count(word)} {word}" for word in words) or "no result"))
    names = names_in(outcomes)
    different = differing(outcomes)
    unexplained = 0
    for name in different:
        reason = reason_of(name, decided)
        unexplained += reason is None
        print(f"  {name}: " + ", ".join(f"{side} {ended.get(name, 'not run')}" for side, ended in outcomes.items()))
        if reason:
            print(f"    decided: {reason}")
    print(f"{len(different)} of {len(names)} tests ended differently, {unexplained} of them without a decided reason")
    return int(bool(unexplained) or not names)
