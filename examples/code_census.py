"""A census of Python code by durable jobs: how many lines, functions, classes and imports there are below a path.

A directory's job makes one child job for each of its sub-directories and files. A file's job parses the file and sends
its counts to its parent's port. A directory's job adds up the counts of its children and sends the sum to its own
parent, up to the root. Files that do not parse are announced on a channel, and one job collects them. Each file counts
once, even if workers or servers die meanwhile.

    export SIDEJOB_DATABASE_URL=postgresql:///census CELERY_BROKER_URL=sidejobpg://
    celery -A code_census sidejob db upgrade
    celery -A code_census worker --beat
    python -c "import code_census; root, _ = code_census.start({'/usr/lib/python3.11': 1}); print(root.wait().state)"
"""

from __future__ import annotations

import ast
import os
import warnings
from collections import Counter
from pathlib import Path
from zlib import crc32

from celery import Celery

from celery_sidejob import Job, RunningJob, SideJob, sidejob_task

app = Celery("census")
app.conf.task_default_queue = os.environ.get("CENSUS_QUEUE", "census")
sidejob = SideJob(app)

COUNTED: dict[str, tuple[type[ast.AST], ...]] = {
    "functions": (ast.FunctionDef, ast.AsyncFunctionDef),
    "classes": (ast.ClassDef,),
    "imports": (ast.Import, ast.ImportFrom),
}
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", ".git"})
UNPARSABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
"""The errors of `count` if a file cannot be read or does not parse."""
CHANNEL = "/census/unparsable"


def start(paths: dict[str, int]) -> tuple[Job, Job]:
    """Begin a census of the paths, each with the n of "one file in n is counted"; returns its root and its collector.

    When the root is completed, its state holds the totals. Then terminate the collector; once it is terminated, its
    state holds the files that could not be read.
    """
    collector = collect.enqueue()  # first, so that it is subscribed before the first announcement
    return census.enqueue((paths,)), collector


# -- the jobs ---------------------------------------------------------------------------------------------------------


@sidejob_task(inports=["counts"])
def census(job: RunningJob, paths: dict[str, int]) -> None:
    """Add up the counts of the paths' jobs; the root of all jobs."""
    add_up(job)


@census.on_startup
def _(job: RunningJob) -> None:
    split(job, [(Path(path), one_in) for path, one_in in job.args[0].items()])


@sidejob_task(inports=["counts"], priority=0)
def count_directory(job: RunningJob, path: str, one_in: int) -> None:
    """Add up the counts of the children, and send the sum to the parent."""
    add_up(job)


@count_directory.on_startup
def _(job: RunningJob) -> None:
    path, one_in = job.args
    split(job, [(entry, one_in) for entry in entries(path, one_in)])


@sidejob_task(priority=9)  # before further directories, so that the queue stays short
def count_file(job: RunningJob, path: str) -> None:
    """Count one file, and send the counts to the parent; announce the file if it cannot be read."""
    try:
        counts = count(path)
    except UNPARSABLE as error:
        counts = {"unparsable": 1}
        sidejob.publish(CHANNEL, {"path": path, "error": f"{type(error).__name__}: {error}"})
    send(job, {"files": 1, **counts})


@sidejob_task(inports={"unparsable": {"channels": [CHANNEL]}})
def collect(job: RunningJob) -> None:
    """Keep the files that were announced so far, and wait for more."""
    for found in job.for_inputs("unparsable"):
        job.set({found["path"]: found["error"]})
    job.suspend()


@collect.on_shutdown
def _(job: RunningJob) -> None:
    for found in job.input("unparsable"):  # announced between the last run and the termination
        job.set({found["path"]: found["error"]})


# -- common to the jobs -----------------------------------------------------------------------------------------------


def split(job: RunningJob, parts: list[tuple[Path, int]]) -> None:
    """Make a child job for each path, and note how many will send their counts. All are made by one commit."""
    children = []
    for path, one_in in parts:
        task, args = (count_directory, (str(path), one_in)) if os.path.isdir(path) else (count_file, (str(path),))
        name = path.name if job.parent else str(path)[-255:]
        children.append({"task": task, "args": args, "parent": job, "child_name": name})
    sidejob.enqueue_many(children)
    job.set(totals={}, waiting=len(children))
    if not children:
        send(job, {})


def add_up(job: RunningJob) -> None:
    """Add the counts that have come since the last run; suspend the job until the last child's counts are there.

    In each turn the packets read, the new totals and the packet for the parent are one commit. So each count is added
    exactly once, and the sum is sent exactly once: in the turn after which no child is missing.
    """
    state = job.state
    totals, waiting = Counter(state["totals"]), state["waiting"]
    for counts in job.for_inputs("counts", commit_every=50):
        totals.update(counts)
        waiting -= 1
        job.set(totals=totals, waiting=waiting)
        if not waiting:
            send(job, totals)
    if waiting:
        job.suspend()  # the next child's packet, or its end, asks for the next run


def send(job: RunningJob, counts: dict[str, int]) -> None:
    """Send counts to the parent's port; the root keeps its totals."""
    if job.parent:
        job.parent.input("counts").write(counts)


# -- reading code -----------------------------------------------------------------------------------------------------


def entries(directory: str | Path, one_in: int) -> list[Path]:
    """Return a directory's sub-directories and one in so many of its Python files, by name."""
    try:
        found = sorted(Path(directory).iterdir())
    except OSError:
        return []
    return [path for path in found if is_directory(path) or is_counted(path, one_in)]


def is_directory(path: Path) -> bool:
    """Tell whether a census goes into a directory; a link may lead in a circle."""
    # Where we may not look, os.path says no; a Path would raise.
    return path.name not in SKIPPED and os.path.isdir(path) and not os.path.islink(path) and is_text(path)


def is_counted(path: Path, one_in: int) -> bool:
    """Tell whether a path is a Python file and, if only one in so many is counted, among those: always the same."""
    counts = path.suffix == ".py" and os.path.isfile(path) and is_text(path)
    return counts and crc32(path.name.encode()) % one_in == 0


def is_text(path: Path) -> bool:
    """Tell whether the name is text, as a job's argument must be; a file's name may be any bytes."""
    return path.name.isprintable()


def count(path: str | Path) -> dict[str, int]:
    """Parse a file and count its lines, functions, classes and imports; raises one of `UNPARSABLE`."""
    source = Path(path).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on old code: invalid escapes
        nodes = Counter(map(type, ast.walk(ast.parse(source))))
    counts = {what: sum(nodes[kind] for kind in kinds) for what, kinds in COUNTED.items()}
    return {"lines": len(source.splitlines()), **counts}
