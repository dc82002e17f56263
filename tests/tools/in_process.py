"""Runs of jobs in the process of the test, one step at a time: what a worker does, without a worker."""

from __future__ import annotations

import itertools
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import psycopg
import pytest
from celery.app.task import Context
from celery.exceptions import Ignore, Retry

from celery_sidejob import Job, RunningJob
from celery_sidejob.hooks.jobs.run import run_claimed
from celery_sidejob.hooks.worker import pool_process
from celery_sidejob.model.crash_points import reach
from celery_sidejob.model.errors import LeaseLostError
from celery_sidejob.operations.changes.follow_up import apply_due
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import run_pages, runs
from celery_sidejob.store import workers
from celery_sidejob.store.claims import Owed
from celery_sidejob.store.connection.own_executor import Idle, OwnExecutor
from celery_sidejob.store.outbox import doorbells
from celery_sidejob.store.outbox.arming import DUE
from celery_sidejob.store.results import Ended
from celery_sidejob.testing.databases import declare_dead
from tests.tools.apps import make_app
from tests.tools.databases import SCHEMA, Databases
from tests.tools.pgbouncer import direct
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until

ALL_PORTS = {"inports": ["*"], "outports": ["*"]}


class Stage:
    """An app with a store, whose jobs run when the test says so.

    The broker is kombu's in memory unless a URL is given: nobody listens to it, and `drain` finds what is due in the
    store, as a worker would in the broker. Where something stands between it and its store, `outside` is the URL by
    which the test looks on. It does so on a connection of its own, or on `looking`, which is its caller's.
    """

    def __init__(
        self, database_url: str, *, broker: str = "memory://", outside: str | None = None,
        looking: psycopg.Connection[Any] | None = None, idle: Idle | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.database_url = database_url
        self._outside = direct(outside or database_url)
        self.app = make_app("stage", broker=broker, sidejob_database_url=database_url, **settings)
        self.sidejob = self.app.sidejob
        self.raised: dict[int, BaseException] = {}
        """What bodies raised last, by the job's id."""
        self.ignored: dict[int, str] = {}
        """Why the last run was nothing that Celery is to tell of, by the job's id: it is suspended, or was refused."""
        self.holds: dict[int, Hold] = {}
        """What was claimed last, by the job's id."""
        self.missed: list[str] = []
        """What has not come true in time, to the test's end."""
        self._bodies: dict[int, Callable[..., Any]] = {}
        self._disproved: BaseException | None = None
        self._numbers = itertools.count(1)
        self._tables: list[str] = []
        self._looking = looking or self.connect()
        self._shares = looking is not None
        self.call = self.sidejob.task(self._call, name="stage.call", **ALL_PORTS)
        self.idle = self.sidejob.task(self._idle, name="stage.idle", **ALL_PORTS)
        self.runtime = self.sidejob.runtime
        if idle is not None:
            self.runtime.connections._idle = idle
        self.worker_id = self.new_worker()

    def close(self) -> None:
        """Close what is open."""
        if not self._shares:
            self._looking.close()
        self.sidejob.close()
        self.app.close()  # a pickled handle must not find it among the apps of this process

    # -- making and running jobs ---------------------------------------------------------------------------------

    def task(self, function: Any = None, **options: Any) -> Any:
        """`@sidejob.task` of this app."""
        return self.sidejob.task(function, **options)

    def job(self, body: Callable[[RunningJob], Any] | None = None, **options: Any) -> Job:
        """Make a job with this body, which may have any port; without a body one that does nothing."""
        if body is None:
            return self.sidejob.enqueue(self.idle, **options)
        number = next(self._numbers)
        self._bodies[number] = body
        return self.sidejob.enqueue(self.call, (number,), **options)

    def inside(self, body: Callable[[RunningJob], Any], **options: Any) -> Job:
        """Run `body` as a run of a job of its own, raise what it raised, and return its job."""
        job = self.job(body, **options)
        self.run(job)
        return job.refresh()

    def run(self, job: Job) -> str:
        """Do the run that the job's message announces, raise what its body raised, and return the job's status."""
        hold = self.claim(job)
        assert hold is not None, f"{job!r} has no message whose run could begin"
        self.perform(hold)
        if job.id in self.raised:
            raise self.raised[job.id]
        return str(job.refresh().status)

    def claim(
        self, job: Job, *, worker_id: int | None = None, for_run: int | None = None, in_page: bool = False
    ) -> Hold | None:
        """Begin a run as a worker does; by default the one that is owed now.

        `in_page`: it is claimed, and perhaps ended, as by the main process of a worker, where that is possible.
        """
        if for_run is None:
            due = doorbells.waiting(self.runtime.connections, [job.id])
            if not due:
                return None
            for_run = due[0].for_run
        worker_id = worker_id or self.worker_id
        hold = self._claim_in_page(Owed(job.id, for_run, job.task), worker_id) if in_page else None
        if hold is None:
            hold = runs.claim(self.runtime, job.id, task=job.task, for_run=for_run, worker_id=worker_id)
        if hold is not None:
            self.holds[job.id] = hold
        return hold

    def _claim_in_page(self, owed: Owed, worker_id: int) -> Hold | None:
        found, _ = run_pages.claim_page(self.runtime, [owed], worker_id=worker_id, over=())
        for claimed in found.values():
            return run_pages.begin(self.runtime, pickle.loads(pickle.dumps(claimed)))
        return None

    def perform(self, hold: Hold) -> Any:
        """Run what was claimed and return the body's value; what it raised is in `raised`."""
        value, *left = pool_process.trace_leaving(lambda: (self._perform(hold),))
        for over in left:
            self._end_in_page(hold, over)
        return value

    def _end_in_page(self, hold: Hold, over: Ended) -> None:
        _, ended = run_pages.claim_page(self.runtime, (), worker_id=hold.worker_id, over=[over])
        if ended:
            reach("end:after-commit")
            run_pages.follow_end(self.runtime, hold, ended[0])
            return
        try:
            run_pages.end_alone(self.runtime, hold, over.run[2], is_unknown=False)
        except LeaseLostError as error:
            self.ignored[hold.job_id] = str(error)

    def leave(self, hold: Hold) -> list[Ended]:
        """Run what was claimed, and return the run's end if its process leaves that to the worker."""
        return list(pool_process.trace_leaving(lambda: (self._perform(hold),))[1:])

    def _perform(self, hold: Hold) -> Any:
        """Run a body. What it asserts is the test's: it is raised here, for the package would see a run that fails."""
        self.raised.pop(hold.job_id, None)
        self.ignored.pop(hold.job_id, None)
        task = self.app.tasks[hold.row.task]
        try:
            return run_claimed(task, self.runtime, hold, Context({"id": str(uuid.uuid4()), "called_directly": False}))
        except (Ignore, Retry) as reason:
            self.ignored[hold.job_id] = str(reason)
            return None
        except Exception as error:
            self.raised[hold.job_id] = error
            return None
        finally:
            disproved, self._disproved = self._disproved, None
            if disproved is not None:
                raise disproved

    def drain(self, most: int = 1000) -> int:
        """Run whatever is due until nothing is, and return how many runs that took."""
        done = 0
        while True:
            apply_due(self.runtime, 100)
            due = self.sql(f"SELECT job_id FROM messages m WHERE locked_by IS NULL AND {DUE} ORDER BY due_at")
            if not due:
                return done
            for (job_id,) in due:
                hold = self.claim(Job(job_id, runtime=self.runtime))
                if hold is not None:
                    self.perform(hold)
                    done += 1
                assert done <= most, "this does not come to rest"

    def outside(self, call: Callable[[], Any]) -> None:
        """Have `call` done by another thread, and wait: what it asks is no part of the run that is under way here."""
        with in_thread(call):
            pass

    def new_worker(self) -> int:
        """Enter a worker, and return the identity under which it claims."""
        return workers.register(self.runtime.connections, f"test:{uuid.uuid4()}")

    def declare_dead(self, worker_id: int) -> None:
        """Declare a worker dead, as the sweeper does when it was suspected and silent for long enough."""
        declare_dead(self._outside, SCHEMA, worker_id)

    # -- looking at the store ------------------------------------------------------------------------------------

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in our schema on a connection of its own and return the rows."""
        cursor = self._looking.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """A connection of the test's own, past any proxy, in autocommit, to be closed by it (`with` does)."""
        return connect(self._outside, **options)

    def waiters(self) -> int:
        """How many backends wait for a lock."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(self.sql(waiting)[0][0])

    def wait_for_waiters(self, count: int = 1) -> None:
        """Return once so many backends wait for a lock."""
        self.wait_until(lambda: self.waiters() >= count, message=f"{count} backends to wait for a lock")

    def wait_until(self, fact: Callable[[], bool], *, message: str) -> None:
        """Wait in the middle of a transaction: what does not come true fails the test, whoever handles the error.

        The package would take a TimeoutError for an outage, and Postgres ends a session that has waited for so long.
        """
        try:
            wait_until(fact, message=message)
        except TimeoutError as late:
            self.missed.append(str(late))
            raise

    def row_counts(self) -> dict[str, int]:
        """How many rows each of our tables has."""
        if not self._tables:
            found = self.sql("SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1", SCHEMA)
            self._tables = [name for (name,) in found]
        counts = ", ".join(f'(SELECT count(*) FROM "{name}")' for name in self._tables)
        return dict(zip(self._tables, self.sql(f"SELECT {counts}")[0], strict=True))

    def everything(self, *, without: Sequence[str] = ()) -> dict[str, list[str]]:
        """Every row of every table as text: what must not change where nothing may happen.

        Left out are who is alive, the counters, to which a later call adds what earlier ones counted, and the columns
        `without` of messages.
        """
        left_out = {"workers", "leases", "counters", "tallies", "task_history"}
        rows = dict.fromkeys((name for name in self.row_counts() if name not in left_out), "t")
        if without:
            kept = ", ".join(f"t.{name}" for name in self._columns_of_messages if name not in without)
            rows["messages"] = f"ROW({kept})"
        read = ", ".join(f'ARRAY(SELECT {row}::text FROM "{name}" t ORDER BY 1)' for name, row in rows.items())
        return dict(zip(rows, self.sql(f"SELECT {read}")[0], strict=True))

    @cached_property
    def _columns_of_messages(self) -> list[str]:
        return [
            name
            for (name,) in self.sql(
                "SELECT column_name::text FROM information_schema.columns"
                " WHERE table_schema = %s AND table_name = 'messages' ORDER BY ordinal_position", SCHEMA,
            )
        ]  # fmt: skip

    def broken_rules(self) -> list[str]:
        """Which rules of the protocol that span several rows are broken; none, whenever it is asked."""
        each = (f"SELECT %s::text WHERE EXISTS ({statement})" for statement in RULES.values())
        return [name for (name,) in self.sql(" UNION ALL ".join(each), *RULES)]

    # -- bodies --------------------------------------------------------------------------------------------------

    def _call(self, job: RunningJob, number: int) -> Any:
        try:
            return self._bodies[number](job)
        except (AssertionError, pytest.fail.Exception) as error:
            self._disproved = error
            raise

    @staticmethod
    def _idle(job: RunningJob) -> None:
        pass


RULES = {
    "a run in progress has a message, locked by the same worker": """
        SELECT j.id FROM jobs j LEFT JOIN messages m ON m.job_id = j.id
        WHERE j.unit_no IS NOT NULL AND m.locked_by IS DISTINCT FROM j.worker_id""",
    "a queued job without a run has a message or a timer": """
        SELECT id FROM jobs j WHERE status = 'queued' AND unit_no IS NULL
          AND NOT EXISTS (SELECT FROM messages m WHERE m.job_id = j.id)
          AND NOT EXISTS (SELECT FROM timers t WHERE t.job_id = j.id)""",
    "a terminating job without a run has a message": """
        SELECT id FROM jobs j WHERE status = 'terminating' AND unit_no IS NULL
          AND NOT EXISTS (SELECT FROM messages m WHERE m.job_id = j.id)""",
    "a job at rest has no message": """
        SELECT j.id FROM jobs j JOIN messages m ON m.job_id = j.id
        WHERE j.status IN ('suspended', 'completed', 'failed', 'terminated')""",
    "a terminated job has no timer that was accepted": """
        SELECT j.id FROM jobs j JOIN timers t ON t.job_id = j.id WHERE j.status = 'terminated' AND t.accepted""",
    "a message that no run holds is for the next run": """
        SELECT j.id FROM jobs j JOIN messages m ON m.job_id = j.id
        WHERE m.locked_by IS NULL AND m.for_run <> j.run_no + 1""",
    "a message that a run holds is for that run": """
        SELECT j.id FROM jobs j JOIN messages m ON m.job_id = j.id
        WHERE m.locked_by IS NOT NULL AND m.for_run <> j.run_no""",
    "an owed run's task id is that of the open asking": """
        SELECT j.id FROM jobs j JOIN messages m ON m.job_id = j.id JOIN askings a ON a.job_id = j.id
        WHERE a.closed_at IS NULL AND j.status <> 'terminating' AND a.task_id <> m.task_id""",
    "a blocked job waits for another, or is to be looked at": """
        SELECT id FROM jobs j WHERE blocked AND NOT EXISTS (SELECT FROM dependencies d WHERE d.job_id = j.id)""",
    "only a blocked job depends on others": """
        SELECT d.job_id FROM dependencies d JOIN jobs j ON j.id = d.job_id WHERE j.blocked IS NOT TRUE""",
    "a dependency that is confirmed is open, and knows it": """
        SELECT d.job_id FROM dependencies d LEFT JOIN jobs j ON j.id = d.depends_on
        WHERE d.state = 'kept' AND (j.id IS NULL OR j.status = 'completed' OR j.has_dependents IS NULL)""",
    "a failed job is in the dead set": """
        SELECT id FROM jobs j WHERE status = 'failed' AND NOT EXISTS (SELECT FROM dead d WHERE d.job_id = j.id)""",
}
"""What no CHECK can say, because it spans rows; from the protocol's section 3."""


EMPTY = """
    DO $$ BEGIN IF pg_relation_size('jobs') + pg_relation_size('packets') + pg_relation_size('messages') > 2e6 THEN
      TRUNCATE jobs, messages, publications CASCADE; END IF; END $$;
    DELETE FROM jobs; DELETE FROM messages; DELETE FROM dead; DELETE FROM workers; DELETE FROM registry;
    DELETE FROM askings; DELETE FROM counters; DELETE FROM tallies; DELETE FROM publications;
    DELETE FROM tree_terminations; DELETE FROM dependencies; DELETE FROM tree_deletions;
    DELETE FROM queues; DELETE FROM limit_keys;
    DELETE FROM capacity_pools; DELETE FROM tags; DELETE FROM tracked;
    DELETE FROM schedules; DELETE FROM batches; DELETE FROM run_history; DELETE FROM job_log;
    DELETE FROM progress; DELETE FROM task_history; DELETE FROM steps; DELETE FROM results;
    DELETE FROM web_tokens; DELETE FROM web_answers; DELETE FROM run_samples;
    UPDATE leases SET holder = NULL, expires_at = now(); ALTER SEQUENCE jobs_id_seq RESTART;
    RESET ALL; UNLISTEN *; SELECT pg_advisory_unlock_all()"""
"""What leaves the database, and the connection on which it is executed, as a test must find them.

After a test with thousands of rows a TRUNCATE takes a tenth of a DELETE's time, and leaves no dead rows to later tests.
"""


def connect(database_url: str, **options: Any) -> psycopg.Connection[Any]:
    """A connection past any proxy, in our schema and in autocommit."""
    defaults: dict[str, Any] = {"autocommit": True, "options": f"-c search_path={SCHEMA}"}
    return psycopg.connect(direct(database_url), **{**defaults, **options})


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Does something in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture(scope="session")
def stage_database_url(databases: Databases, database_template: str) -> Iterator[str]:
    """One database for all tests with a `stage`: emptying it takes a hundredth of the time that cloning takes."""
    with databases.fresh(template=database_template) as name:
        yield databases.url_of(name)


@pytest.fixture(scope="session")
def stage_looking(stage_database_url: str) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    """Returns the connection on which all tests with a `stage` look on: what a backend has learnt of tables it keeps.

    Another one follows where a test has ended it.
    """
    made: list[psycopg.Connection[Any]] = []

    def looking() -> psycopg.Connection[Any]:
        if not made or made[-1].closed:
            # No statement is prepared: a test may change a table.
            made.append(connect(stage_database_url, prepare_threshold=None))
        return made[-1]

    yield looking
    for connection in made:
        connection.close()


@pytest.fixture(scope="session")
def stage_connections() -> Iterator[dict[str, OwnExecutor]]:
    """The connection to the store of each URL that tests with a `stage` hand on to each other.

    To plan our statements anew, a backend takes as long as for all else in most tests.
    """
    left: dict[str, OwnExecutor] = {}
    yield left
    for executor in left.values():
        executor.close()


@pytest.fixture
def stage(
    stage_database_url: str, store_url: Callable[[str], str], stage_looking: Callable[[], psycopg.Connection[Any]],
    stage_connections: dict[str, OwnExecutor],
) -> Iterator[Stage]:  # fmt: skip
    """An app of this test's own, whose jobs run in this process when the test says so; its rows keep the rules."""
    url = store_url(stage_database_url)
    idle = Idle()
    if (left := stage_connections.pop(url, None)) is not None:
        idle.give_back(left)
    made = Stage(url, looking=stage_looking(), idle=idle)
    handed_on = idle.take()  # none that the test opens: it may do so while the server has other defaults
    if handed_on is not None:
        idle.give_back(handed_on)
    try:
        yield made
        assert made.missed == []
        assert made.broken_rules() == []
    finally:
        made.sql(EMPTY)
        made.runtime.connections.write_behind_now()  # as the close would, on another connection
        while (left := idle.take()) is not None:
            if left is handed_on:
                stage_connections[url] = left
            else:
                left.close()
        made.close()
