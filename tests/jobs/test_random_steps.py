"""Random bodies of steps, calls, sleeps, receives, errors and loops, killed anywhere, against the same run plainly.

In the end the result is the same, and what each function has done is there exactly once: rows of its own, packets and
state. A kill is a death at one of the points around commits or in a function, a run that is taken for dead and goes on,
an answer of the store that is lost, or somebody who asks the job while it runs. After each death the steps have new
names. Once in a while somebody has the job begin anew, or forks it: then what there was is there once more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st

from celery_sidejob import NO_DATA, ChildFailedError, Job, RunningJob, StepFailedError
from celery_sidejob.model.crash_points import AnswerLost, Died, acting
from celery_sidejob.operations.changes.follow_up import apply_due
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import EMPTY, Stage

EXAMPLES = int(os.environ.get("SIDEJOB_STEPS_EXAMPLES", "25"))
MOST_RUNS = 300
COMMITS = ("step", "end", "checkpoint")
"""Transactions whose answers may be lost."""
POINTS = (*COMMITS, "unit")
"""Points at which a run may die: others depend on threads."""

Statement = tuple[Any, ...]
Block = Sequence[Statement]
Other = tuple[str, int, int]
"""What somebody else does, in which call of a function, and about which step."""


class Broken(Exception):
    """What functions and bodies raise."""


# -- bodies -----------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.just(("write",)),
    st.just(("set",)),
    st.just(("raise",)),
    st.just(("sleep",)),
    st.just(("receive",)),
    st.tuples(st.just("since"), st.sampled_from("xy")),
    st.tuples(st.just("again"), st.sampled_from(["a", "c"]), st.booleans()),
    st.tuples(st.just("step"), st.sampled_from("ab"), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("step"), st.sampled_from("ab"), st.just(False), st.just(0)),
    st.tuples(st.just("row"), st.sampled_from("cd"), st.booleans()),
    st.tuples(st.just("row"), st.sampled_from("cd"), st.just(False)),
    st.tuples(st.just("call"), st.booleans()),
    st.tuples(st.just("calls"), st.lists(st.booleans(), min_size=1, max_size=3), st.sampled_from([None, 1, 2])),
)


def blocks(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Statements that have statements in them."""
    block = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("loop"), st.integers(1, 3), block),
        st.tuples(st.just("try"), block, st.lists(inner, max_size=2)),
    )


bodies = st.lists(st.recursive(leaves, blocks, max_leaves=5), min_size=1, max_size=5)
kills = st.lists(
    st.tuples(st.sampled_from(["die", "die", "die", "zombie", "lost", "ask"]), st.integers(1, 12)), max_size=5
)
others = st.one_of(st.none(), st.tuples(st.sampled_from(["fresh", "fork"]), st.integers(1, 6), st.integers(0, 5)))
"""What somebody else does once."""


@dataclass
class Plain:
    """What a body does if it is run once, with nothing in between."""

    packets: list[int]
    values: list[Any] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    failed: bool = False

    def run(self, body: Block) -> Plain:
        """Run it."""
        try:
            self._block(body, "")
        except Broken as error:
            self.failed = True
            self.values, self.outside = [f"{error}"], []
            self.state.pop("outside", None)
        return self

    def turns(self, block: Block) -> Plain:
        """Run it for each packet."""
        for packet in self.packets:
            self.values = []
            self._block(block, f"@{packet}")
            self.outside.append(f"{self.values}")
        self.packets = []
        return self

    def _block(self, block: Block, path: str) -> None:
        for place, statement in enumerate(block):
            self._do(statement, f"{path}.{place}")

    def _do(self, statement: Statement, path: str) -> None:
        match statement:
            case ["write"]:
                self.outside.append(path)
            case ["set"]:
                self.state["outside"] = path
            case ["raise"]:
                raise Broken(path)
            case ["sleep"]:
                self.values.append("slept")
            case ["receive"]:
                self.values.append(self.packets.pop(0) if self.packets else "nothing")
            case ["since", _]:
                self.values.append(True)
            case ["step", _, fails, _]:
                self.values.append(self._step(path, fails))
            case ["row", _, fails]:
                self.values.append(self._row(path, fails))
            case ["again", name, fails]:
                once = self._step if name == "a" else self._row
                once(path, False)
                self.values.append(once(f"{path}~", fails))
            case ["call", fails]:
                self._child(path, fails)
                if fails:
                    raise Broken("child")
                self.values.append(path)
            case ["calls", fail, _]:
                paths = [f"{path}/{number}" for number in range(len(fail))]
                for one, fails in zip(paths, fail, strict=True):
                    self._child(one, fails)
                if any(fail):
                    raise Broken("child")
                self.values.append(paths)
            case ["loop", times, block]:
                for time in range(times):
                    self._block(block, f"{path}:{time}")
            case ["try", block, handler]:
                try:
                    self._block(block, path)
                except Broken as error:
                    self.values.append(f"{error}")
                    self._block(handler, f"{path}!")

    def _step(self, path: str, fails: bool) -> Any:
        if fails:
            raise Broken(path)
        self.inside.append(path)
        self.state["inside"] = path
        return [path]

    def _row(self, path: str, fails: bool) -> Any:
        if fails:
            raise Broken(path)
        self.rows.append(path)
        return path

    def _child(self, path: str, fails: bool) -> None:
        if not fails:
            self.rows.append(path)


# -- the same as a job ------------------------------------------------------------------------------------------------


class Real:
    """The same body as that of a job, whose runs are killed as the plan says."""

    def __init__(self, stage: Stage, plan: Sequence[tuple[str, int]], other: Other | None) -> None:
        self.stage = stage
        self.plan = list(plan)
        self.other = other
        self.values: dict[int, list[Any]] = {}
        """What the last run of each job's body has made."""
        self.holds: list[Any] = []
        self.deaths = 0
        self.job: Job
        self.fork: Job | None = None
        self.copied: list[Any] = []
        """The values that the fork has from the job."""
        self.before: Done | None = None
        """What was there when the job began anew."""

    # What may happen.

    def reach(self, point: str) -> None:
        """A point around a commit: the run may die, or an answer be lost."""
        name = point.partition(":")[0]
        if name.partition("[")[0] not in POINTS:
            return
        if self._is_next("die"):
            raise Died(point)
        if name in COMMITS and self._is_next("lost", counts=False):
            raise AnswerLost(point)

    def in_function(self) -> None:
        """A function of the body: here also others may act."""
        if self.other is not None:
            what, left, which = self.other
            self.other = (what, left - 1, which) if left > 1 else None
            if left == 1:
                self.stage.outside(self._begin_anew if what == "fresh" else lambda: self.fork_it(which))
        if self._is_next("die"):
            raise Died("in a function")
        if self._is_next("zombie", counts=False):
            hold = self.holds[-1]
            self.stage.outside(lambda: self._rescue(hold))
        elif self._is_next("ask", counts=False):
            job = Job(self.holds[-1].job_id, runtime=self.stage.runtime)
            self.stage.outside(job.run)

    def _is_next(self, kind: str, *, counts: bool = True) -> bool:
        if not self.plan:
            return False
        what, left = self.plan[0]
        if counts:
            self.plan[0] = what, max(left - 1, 0)
        if what != kind or left > 1:
            return False
        del self.plan[0]
        return True

    def _rescue(self, hold: Any) -> None:
        recovery.rescue(self.stage.runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)

    def _begin_anew(self) -> None:
        if self.job.run(fresh=True) is not None:
            self.before = Done()

    def fork_it(self, which: int) -> None:
        """Fork the job, before one of its steps or behind all of them; nobody forks it again."""
        self.other = None
        done = [str(step) for step in self.job.steps if step.done and step.kind != "since"]
        self.fork = self.stage.sidejob.fork(self.job, before=done[which] if which < len(done) else None)
        self.copied = [step.value for step in self.fork.steps]

    def settle(self) -> None:
        """Run whatever is due, and let time pass where nothing is, until nothing waits."""
        for _ in range(MOST_RUNS):
            apply_due(self.stage.runtime, 100)
            due = self.stage.sql(
                "SELECT job_id FROM messages WHERE locked_by IS NULL AND due_at <= now() ORDER BY due_at, job_id"
            )
            if due:
                self._run(Job(due[0][0], runtime=self.stage.runtime))
            elif not self._pass_time():
                return
        pytest.fail("this does not come to rest")

    def _run(self, job: Job) -> None:
        hold = self.stage.claim(job, worker_id=self.stage.new_worker())
        if hold is None:
            return
        self.holds.append(hold)
        try:
            with acting(self.reach):
                self.stage.perform(hold)
        except Died:
            self.deaths += 1
        if self.stage.sql("SELECT 1 FROM jobs WHERE id = %s AND worker_id = %s", job.id, hold.worker_id):
            self._rescue(hold)
        self.holds.pop()
        if self.before is not None and not self.before.is_seen:
            self.before.see(self.stage, self.job)

    def _pass_time(self) -> bool:
        """Have the next timer be due; whether there was one."""
        self.stage.sql("UPDATE steps SET due_at = due_at - interval '1 year' WHERE due_at > now()")
        self.stage.sql("UPDATE messages SET due_at = now() WHERE locked_by IS NULL AND due_at > now()")
        return bool(self.stage.sql("UPDATE timers SET due_at = now() WHERE due_at > now() RETURNING 1"))

    # What the body does.

    def body(self, job: RunningJob, block: Block) -> None:
        """Do it as the body of a job."""
        values: list[Any] = []
        self._block(job, block, "", values)
        self.values[job.id] = values

    def turns(self, job: RunningJob, block: Block, every: int) -> None:
        """Do it in turns of the packets, so many in a unit."""
        for packet in job.for_inputs("packets", commit_every=every):
            values: list[Any] = []
            self._block(job, block, f"@{packet}", values)
            job.output("outside").write(f"{values}")

    def _block(self, job: RunningJob, block: Block, path: str, values: list[Any]) -> None:
        for place, statement in enumerate(block):
            self._do(job, statement, f"{path}.{place}", values)

    def _do(self, job: RunningJob, statement: Statement, path: str, values: list[Any]) -> None:
        match statement:
            case ["write"]:
                job.output("outside").write(path)
            case ["set"]:
                job.set(outside=path)
            case ["raise"]:
                raise Broken(path)
            case ["sleep"]:
                job.sleep("sleep", days=3)
                values.append("slept")
            case ["receive"]:
                value = job.receive("packets", timeout=3600)
                values.append("nothing" if value is NO_DATA else value)
            case ["since", name]:
                values.append(job.since(f"since {name}"))
            case ["step", name, fails, retries]:
                values.append(self._kept(job, name, path, fails, retries=retries, backoff=60))
            case ["row", name, fails]:
                values.append(self._row(job, name, path, fails))
            case ["again", name, fails]:
                once = self._kept if name == "a" else self._row
                value = once(job, name, path, False)
                if value in (path, [path]):
                    job.forget(self._names(name)[0])
                    value = once(job, name, f"{path}~", fails)
                values.append(value)
            case ["call", fails]:
                values.append(job.call("child", "random.child", (path, fails)))
            case ["calls", fail, limit]:
                calls = [("random.child", (f"{path}/{number}", fails)) for number, fails in enumerate(fail)]
                signatures = [self.stage.app.tasks[task].s(*given) for task, given in calls]
                values.append(job.call_all("children", signatures, limit=limit))
            case ["loop", times, inner]:
                for time in range(times):
                    self._block(job, inner, f"{path}:{time}", values)
            case ["try", inner, handler]:
                try:
                    self._block(job, inner, path, values)
                except (Broken, StepFailedError, ChildFailedError) as error:
                    values.append(told(error))
                    self._block(job, handler, f"{path}!", values)

    def _names(self, name: str) -> list[str]:
        """The name of a step, and those that it had before."""
        return [f"{name} {number}" for number in range(self.deaths, -1, -1)]

    def _kept(self, job: RunningJob, name: str, path: str, fails: bool, **tries: Any) -> Any:
        name, *was = self._names(name)
        return job.step(name, self._step, job, path, fails, was=was, **tries)

    def _step(self, job: RunningJob, path: str, fails: bool) -> Any:
        job.output("inside").write(path)
        self.in_function()
        job.set(inside=path)
        if fails:
            raise Broken(path)
        return (path,)

    def _row(self, job: RunningJob, name: str, path: str, fails: bool) -> Any:
        with self.stage.connect(autocommit=False) as connection:
            name, *was = self._names(name)
            with job.step(name, transaction=connection, was=was) as step:
                if step.is_new:
                    connection.execute("INSERT INTO own VALUES (%s)", [path])
                    self.in_function()
                    if fails:
                        raise Broken(path)
                    step.value = path
            connection.commit()
        return step.value

    def child(self, job: RunningJob, path: str, fails: bool) -> str:
        """The body of a child."""
        self.in_function()
        if fails:
            raise Broken(path)
        self._row(job, "own", path, False)
        return path


@dataclass
class Done:
    """What a job has done by the end of a run."""

    rows: list[str] = field(default_factory=list)
    """Also those that its children will still enter."""
    inside: list[Any] = field(default_factory=list)
    outside: list[Any] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    is_seen: bool = False
    has_failed: bool = False
    """Whether the job failed in that run: then it did not begin anew."""

    def see(self, stage: Stage, job: Job) -> None:
        """Look at it."""
        self.is_seen = True
        self.rows = [path for (path,) in stage.sql("SELECT path FROM own")]
        children = stage.sql("SELECT args FROM jobs WHERE task = 'random.child' AND status <> 'completed'")
        self.rows += [path for ((path, fails),) in children if not fails and path not in self.rows]
        self.inside, self.outside = packets_on(job.output("inside")), packets_on(job.output("outside"))
        self.left, self.state = packets_on(job.input("packets")), job.state
        self.has_failed = job.refresh().status == "failed"


def packets_on(port: Any) -> list[Any]:
    """Return the values on a port."""
    return [packet.value for packet in port.peek(limit=1000)]


def told(error: BaseException) -> str:
    """Return what the plain body says of this error."""
    return "child" if isinstance(error, ChildFailedError) else f"{error}"


@contextmanager
def own_table(stage: Stage) -> Iterator[None]:
    """Have a table for rows of functions' own."""
    stage.sql("CREATE TABLE own (path text NOT NULL)")
    try:
        yield
    finally:
        stage.sql("DROP TABLE own")


def test_a_killed_body_does_what_it_does_plainly(stage: Stage) -> None:
    deaths = Counter[bool]()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        print_blob=False,
    )  # fmt: skip
    @given(block=bodies, packets=st.integers(0, 3), plan=kills, every=st.sampled_from([None, None, 1, 2]), other=others)
    @example(block=[("call", False), ("row", "c", False)], packets=0, plan=[("die", 3)], every=None, other=None)
    @example(block=[("row", "c", False), ("row", "c", True)], packets=0, plan=[], every=None, other=("fork", 3, 0))
    @example(block=[("receive",), ("call", True)], packets=2, plan=[], every=None, other=("fresh", 1, 0))
    @example(
        block=[("try", [("again", "a", True)], [("since", "x")]), ("try", [("row", "c", True)], []), ("sleep",)],
        packets=0,
        plan=[("die", 11)],
        every=None,
        other=None,
    )
    def compare(
        block: Block,
        packets: int,
        plan: Sequence[tuple[str, int]],
        every: int | None,
        other: Other | None,
    ) -> None:
        forks = other is not None and other[0] == "fork"
        assume(
            not (
                forks
                and (every is not None or "receive" in f"{block}" or "calls" in f"{block}" or "again" in f"{block}")
            )
        )
        assume(every is None or "receive" not in f"{block}")
        plain = plainly(block, every, list(range(packets)))
        stage.sql(f"{EMPTY.partition('UPDATE leases')[0]} DELETE FROM own")
        real = Real(stage, plan, other)
        running[:] = [real]
        real.job = job = body.enqueue((block, every))
        if packets:
            job.input("packets").write_many(range(packets))
        real.settle()
        if forks and real.fork is None and job.refresh().status == "failed":
            real.fork_it(other[2])  # type: ignore[index]
            real.settle()

        before = real.before or Done()
        if before.is_seen and not before.has_failed:
            plain = plainly(block, every, before.left)
        judge(real, job, plain, every, before)
        rows = Counter([*plain.rows, *before.rows])
        if real.fork is not None:
            copied = [path for value in real.copied for path in (value if isinstance(value, list) else [value])]
            copied += [path[:-1] for path in copied if f"{path}".endswith("~")]
            forked = plainly(block, every, [])
            forked.inside = [path for path in forked.inside if path not in copied]
            forked.rows = [path for path in forked.rows if path not in copied]
            judge(real, real.fork, forked, every, Done())
            rows += Counter(forked.rows)
        assert Counter(path for (path,) in stage.sql("SELECT path FROM own")) == rows
        assert stage.broken_rules() == []
        deaths[len(real.plan) < len(plan)] += 1

    def plainly(block: Block, every: int | None, packets: list[int]) -> Plain:
        if every is None:
            return Plain(packets).run(block)
        try:
            return Plain(packets).turns(block)
        except Broken:  # how far it has come would depend on the units
            reject()

    def judge(real: Real, job: Job, plain: Plain, every: int | None, before: Done) -> None:
        job.refresh()
        assert job.status == ("failed" if plain.failed else "completed")
        assert packets_on(job.output("inside")) == before.inside + plain.inside
        assert packets_on(job.output("outside")) == before.outside + plain.outside
        assert packets_on(job.input("packets")) == plain.packets
        assert job.state == before.state | plain.state
        if plain.failed:
            error = job.info["error"]
            assert ("child" if error["type"] == "ChildFailedError" else error["message"]) == plain.values[0]
        else:
            assert every is not None or real.values[job.id] == plain.values
            assert stage.sql("SELECT count(*) FROM steps WHERE job_id = %s AND number > 0", job.id) == [(0,)]

    running: list[Real] = []

    @stage.task(name="random.body", inports=["*"], outports=["*"], max_losses=1000)
    def body(job: RunningJob, block: Block, every: int | None) -> None:
        if every is None:
            running[0].body(job, block)
        else:
            running[0].turns(job, block, every)

    @stage.task(name="random.child", inports=["*"], outports=["*"], max_losses=1000)
    def child(job: RunningJob, path: str, fails: bool) -> str:
        return running[0].child(job, path, fails)

    with own_table(stage):
        compare()
    assert deaths[True]
