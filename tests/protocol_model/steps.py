"""Every interleaving of the runs of a job whose body has durable steps, and of all that may come between.

The store has a record of each step that has finished. A run reads the records of its job, begins at the top of the
body, and passes each step that has a record. A step that has none is a commit of its own: its effects and its record,
and nothing of what the body did outside of steps (`body`). A step that waits ends the run and throws that away.

There is a small body for each thing that a body can do (`PROGRAMS`). In each, processes die or freeze between any two
commits, answers are lost, and people act at any instant. Each of `MISTAKES` is a simpler rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.protocol_model.walk import replace

PROGRAMS: dict[str, tuple[str, ...]] = {
    "waits": ("do b", "step a", "receive", "step c", "end"),
    "sleeps": ("step a", "sleep", "do b", "end"),
    "calls": ("call", "do b", "end"),
    "fails": ("do b", "step a", "step f", "step c", "end"),
    "saga": ("do b", "step a", "try f", "step c", "end", "step undo", "raise"),
    "turns": ("read", "step x", "pass on"),
    "forgets": ("loop x", "use x", "loop x", "use x", "end"),
    "forks": ("step a", "call", "step c", "end"),
    "asked": ("step a", "do b", "step c", "end"),
    "changes": ("step z", "step a", "step old", "receive", "end"),
    "changed": ("step a", "since", "receive", "end"),
}
"""What each body does, in its order. `changes` is deployed as `changed`; `f` may fail, and is tried twice."""
EFFECTS = {
    "waits": ("a", "b", "c", "got"),
    "sleeps": ("a", "b"),
    "calls": ("child", "b"),
    "fails": ("a", "b", "c", "f"),
    "saga": ("a", "b", "c", "f"),
    "turns": ("x 1", "x 2", "out 1 1", "out 2 2"),
    "forgets": ("x", "use new", "use kept"),
    "forks": ("c",),
    "asked": ("a", "b", "c"),
    "changes": ("a",),
}
"""What must be there once for each time that a body has completed; of a packet unless somebody has taken it away."""
HANDLER = 5
"""Where the body of the saga goes on when `f` has failed."""

MISTAKES = {
    # what is committed when
    "a record comes after its effects": "waits",
    "a record comes before its effects": "waits",
    "a step commits what the body did": "waits",
    "a wait commits what the body did": "waits",
    "a failure commits what the body did": "fails",
    "a receive leaves the packet to the body": "waits",
    "a receive takes the packet first": "waits",
    "a child is made before its record": "calls",
    "the records go after the completion": "asked",
    # who may write
    "a zombie may write": "waits",
    "the fence has no unit number": "waits",
    "a lost answer counts as done": "waits",
    "records are read before the claim": "waits",
    # what asks a job
    "a wait forgets an ask": "waits",
    "a run completes although it was asked": "waits",
    "a late packet asks a completed job": "waits",
    "a called child asks a completed job": "calls",
    "a sleep begins anew in each run": "sleeps",
    "a wake takes the timer": "sleeps",
    # failures
    "tries are counted in memory": "fails",
    "a failure is kept at once": "fails",
    "a failure is never kept": "saga",
    "a failure is kept with the next step": "saga",
    "a failed run forgets its failure": "saga",
    # turns
    "a record of a turn has no packet": "turns",
    "the numbers go on from turn to turn": "turns",
    "a step commits the packet of its turn": "turns",
    "the records of a turn stay": "turns",
    # people
    "a fresh run removes the records as it is asked": "asked",
    "a fresh run removes the records with its first step": "asked",
    "a forgotten step takes a new number": "forgets",
    "a fork takes a call in progress": "forks",
    "a fork takes every record": "forks",
    "since is not kept": "changes",
    "since looks at every record": "changes",
}
"""Each mistake, and the body in which it ends in a trace."""

Record = tuple[str, str]
"""The key of a step, and its value: `open` (a call in progress), `failed`, `tried`, until (a sleep's), or what it
returned. An empty value removes the record."""


class Commit(NamedTuple):
    """What one transaction of a run writes."""

    effects: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    reads: tuple[int, ...] = ()
    """The packets that leave the port."""
    clears: tuple[str, ...] = ()
    """The records that go."""
    ends: str = ""
    """How the run ends with it: rests, again (a backoff), completed, failed. Empty: it goes on."""
    moves: int = 1
    """How many places further the body goes on."""
    of_body: bool = False
    """Whether it has what the body did outside of steps, which then begins its next unit."""
    makes_child: bool = False
    receives: bool = False
    """It is a receive: from now on the port is one of answers."""
    until: int = 0
    """When the timer of a rest fires."""
    then: Commit | None = None
    """By mistake: what is written after it, in a transaction of its own."""
    is_fenced: bool = True


class Run(NamedTuple):
    """A run in its process: what it knows, and how far it is."""

    no: int
    records: tuple[Record, ...]
    is_new: bool = False
    """Whether its worker has the new code."""
    place: int = 0
    unit_no: int = 0
    body: tuple[str, ...] = ()
    """What the body did outside of steps, and has not committed."""
    read: tuple[int, ...] = ()
    """The packets that the body has read outside of steps; the last one is that of the turn."""
    calls: int = 0
    """The turns that the run has begun, or the calls of the step in a loop."""
    pending: tuple[Record, ...] = ()
    """What is to be recorded before the next step begins: a failure that the body has caught."""
    passed: int = 0
    """How many of the records the body has passed, in the order of their commits."""
    tries: int = 0
    """By mistake: how often it has tried `f`."""
    sends: Commit | None = None
    in_doubt: bool = False
    """The answer to what it sends is lost."""


@dataclass(frozen=True)
class World:
    """What is committed, and where everybody stands."""

    program: str = ""
    status: str = "queued"
    asked: bool = False
    """It was asked since the claim of its run."""
    run_no: int = 0
    current: int = 0
    """The run in progress, if there is one."""
    unit_no: int = 0
    records: tuple[Record, ...] = ()
    port: tuple[int, ...] = ()
    receives: bool = False
    """A step has received from the port."""
    timer: int = 0
    time: int = 0
    child: str = ""
    """The child that was called: runs, ended (it failed, or completed), again (somebody has retried it), gone."""
    is_fresh: bool = False
    """The next run is to begin anew."""
    is_new: bool = False
    """The new code is deployed: `f` does not fail any more, or it is another body."""
    early: tuple[Record, ...] | None = None
    """By mistake: the records as somebody has read them before a claim."""
    every: int = 1
    """The turns of a unit."""
    runs: tuple[Run, ...] = ()
    """The processes: one has the run in progress, and others are taken for dead."""
    # What people will do, and what may yet happen.
    writes: int = 0
    removals: int = 0
    asks: int = 0
    freshes: int = 0
    retries: int = 0
    deploys: int = 0
    troubles: int = 2
    # What was promised; no rule looks at these.
    done: tuple[str, ...] = ()
    """Each effect that was committed."""
    askings: int = 1
    written: int = 0
    fresh_after: int = -1
    """The last run before the one that is to begin anew."""
    done_fresh: tuple[str, ...] = ()
    """The effects of the later runs."""
    may_fail: int = 2
    """How often `f` may yet fail: twice, and once more for each death and each retry by a person."""
    removed: tuple[int, ...] = ()
    undoes: bool = False
    """The function that undoes was called: nobody can take back what it did outside of the store."""
    must_be_new: bool = False
    broken: str | None = None


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next: at first one of the bodies, and what people will do."""
    if not world.program:
        yield from (start for start in _starts(mistake) if mistake is None or start.program == MISTAKES[mistake])
        return
    if world.broken:
        return
    for run in world.runs:  # what happens in its process alone: whether others act before or after makes no difference
        following = [] if run.sends is not None else list(_goes_on(world, run, mistake))
        if len(following) == 1 and _words(world, run) != "read" and _by_no(following[0], run).sends is None:
            yield following[0]
            return
    yield from _people(world, mistake)
    yield from _nature(world, mistake)
    if world.status == "queued" and not world.current:
        yield _claimed(world, mistake)
    if mistake == "records are read before the claim" and world.early is None:
        yield replace(world, early=world.records)
    for run in world.runs:
        if world.troubles:
            yield from _disasters(world, run)
        if run.sends is None:
            yield from _goes_on(world, run, mistake)
        else:
            yield from _commits(world, run, run.sends, mistake)


def _starts(mistake: str | None) -> Iterator[World]:
    yield World("waits", writes=2)
    yield World("asked", freshes=1)
    for asks in (0, 1):
        troubles = 2 - asks  # more would be millions of worlds
        yield World("waits", writes=1, asks=asks, troubles=troubles)
        yield World("sleeps", asks=asks, troubles=troubles)
        yield World("calls", asks=asks, troubles=troubles)
        yield World("asked", asks=asks, freshes=asks, troubles=troubles)
    for retries in (0, 2):
        yield World("fails", retries=retries, deploys=1)
        yield World("saga", retries=retries, deploys=1)
    for every in (1, 2):
        yield World("turns", port=(1, 2), every=every)
        yield World("turns", port=(1, 2), every=every, removals=1)
    yield World("forgets", records=(("x", "bad"), ("x#2", "kept")))
    yield World("changes", writes=1, deploys=1)
    a, c = ("a", "a"), ("c", "c")
    for original in ((a,), (a, ("call", "open")), (a, ("call", "child")), (a, ("call", "child"), c)):
        yield World("forks", records=_forked(original, "c", mistake))


def _forked(records: tuple[Record, ...], before: str, mistake: str | None) -> tuple[Record, ...]:
    """Return what a fork takes from its original: what had finished before a step."""
    keys = [key for key, _ in records]
    if before in keys and mistake != "a fork takes every record":
        records = records[: keys.index(before)]
    takes_open = mistake == "a fork takes a call in progress"
    return tuple((key, value) for key, value in records if value != "open" or takes_open)


# -- what comes from outside -------------------------------------------------------------------------------------------


def _people(world: World, mistake: str | None) -> Iterator[World]:
    if world.writes:
        port = (*world.port, 3 - world.writes)
        written = replace(world, writes=world.writes - 1, written=world.written + 1, port=port)
        late = mistake == "a late packet asks a completed job"
        yield _ask(written, asks_completed=not world.receives or late)
    if world.removals and world.port:
        first, *others = world.port
        yield replace(world, removals=0, port=tuple(others), removed=(first,))
    if world.asks:
        opens = world.status == "completed"
        yield _ask(replace(world, asks=0, askings=world.askings + opens), asks_completed=True)
    if world.freshes:
        fresh = replace(world, freshes=0, askings=world.askings + 1, fresh_after=world.run_no, done_fresh=())
        if mistake == "a fresh run removes the records as it is asked":
            yield _ask(replace(fresh, records=()), asks_completed=True)
        else:
            yield _ask(replace(fresh, is_fresh=True), asks_completed=True)
    if world.retries and world.status == "failed":
        yield replace(world, retries=world.retries - 1, status="queued", may_fail=world.may_fail + 1)
    if world.deploys:
        yield replace(world, deploys=0, is_new=True)


def _nature(world: World, mistake: str | None) -> Iterator[World]:
    if world.timer > world.time:
        yield replace(world, time=world.timer)
    elif world.timer:
        yield _ask(replace(world, timer=0))
    if world.child in ("runs", "again"):
        asks_completed = mistake == "a called child asks a completed job"
        after = "ended" if world.child == "runs" else "gone"
        yield _ask(replace(world, child=after), asks_completed=asks_completed)
    if world.child == "ended" and world.program == "calls" and ("call", "open") not in world.records:
        yield replace(world, child="again")


def _ask(world: World, *, asks_completed: bool = False) -> World:
    if world.current:
        return replace(world, asked=True)
    if world.status == "suspended" or (world.status == "completed" and asks_completed):
        return replace(world, status="queued")
    return world


def _disasters(world: World, run: Run) -> Iterator[World]:
    """The process dies, or is taken for dead and lives."""
    happened = replace(world, troubles=world.troubles - 1, may_fail=world.may_fail + 1)
    if run.no != world.current:
        yield _without(happened, run)
    else:
        yield _taken(_without(happened, run))
        yield _taken(happened)


def _taken(world: World) -> World:
    return replace(world, status="queued", current=0, asked=False)


# -- a run -------------------------------------------------------------------------------------------------------------


def _claimed(world: World, mistake: str | None) -> World:
    """Begin a run, which knows the records as of its claim: no other run can write any more."""
    known = () if world.is_fresh else world.records
    if world.early is not None:
        known = world.early
    late = mistake == "a fresh run removes the records with its first step"
    run = Run(world.run_no + 1, known, world.is_new)
    must_be_new = world.program == "changes" and world.is_new and "old" not in world.done
    return replace(
        world, status="running", run_no=run.no, current=run.no, unit_no=0, asked=False, timer=0, is_fresh=False,
        records=world.records if late else () if world.is_fresh else world.records, early=None,
        runs=(*world.runs, run), must_be_new=world.must_be_new or must_be_new,
    )  # fmt: skip


def _goes_on(world: World, run: Run, mistake: str | None) -> Iterator[World]:
    """The body does what comes next, up to a commit that is to be sent."""
    what, _, name = _words(world, run).partition(" ")
    match what:
        case "do":
            yield _with(world, _next(run, body=(*run.body, name)))
        case "step" if world.program == "turns":
            yield _step_of_turn(world, run, mistake)
        case "step" | "try":
            yield from _step(world, run, name, mistake, handles=what == "try")
        case "loop":
            yield _step_of_loop(world, run, name, mistake)
        case "use":
            yield _use(world, run, name)
        case "receive":
            yield _receive(world, run, mistake)
        case "sleep":
            yield _sleep(world, run, mistake)
        case "call":
            yield _call(world, run, mistake)
        case "since":
            yield _since(world, run, mistake)
        case "read":
            yield _turn(world, run)
        case "pass":
            yield _turn_over(world, run, mistake)
        case "raise":
            yield _raise(world, run, mistake)
        case "end":
            yield _end(world, run, mistake)


def _words(world: World, run: Run) -> str:
    program = "changed" if world.program == "changes" and run.is_new else world.program
    return PROGRAMS[program][run.place]


def _step(world: World, run: Run, name: str, mistake: str | None, *, handles: bool) -> Iterator[World]:
    """Pass a step that has a record; otherwise call its function, which may fail."""
    value = dict(run.records).get(name)
    if value == "failed":
        yield _fail(world, _passed(run, name), mistake, handles=handles)
        return
    if value not in (None, "tried"):
        yield _with(world, _next(_passed(run, name)))
        return
    if run.pending and mistake != "a failure is kept with the next step":
        yield _send(world, run, Commit(records=run.pending, moves=0))
        return
    world = replace(world, undoes=world.undoes or name == "undo")
    yield _send(world, run, _of_step(world, run, (name, name), (name,), mistake))
    if name != "f" or run.is_new:
        return
    world = replace(world, may_fail=world.may_fail - 1)
    if world.may_fail < 0:
        yield replace(world, broken="it is tried more often than it may")
    elif mistake == "tries are counted in memory" and run.tries == 0:
        yield _with(world, run._replace(tries=1))
    elif value is None and not run.tries:
        yield _send(world, run, Commit(records=(*run.pending, (name, "tried")), ends="again"))
    elif mistake == "a failure is kept at once":
        yield _send(world, run, Commit(records=((name, "failed"),), moves=0))
    else:  # it is committed before the body begins another step, and forgotten if the run ends before
        kept = () if mistake == "a failure is never kept" else ((name, "failed"),)
        yield _fail(world, run._replace(pending=(*run.pending, *kept)), mistake, handles=handles)


def _fail(world: World, run: Run, mistake: str | None, *, handles: bool) -> World:
    return _with(world, run._replace(place=HANDLER)) if handles else _raise(world, run, mistake)


def _raise(world: World, run: Run, mistake: str | None) -> World:
    effects = run.body if mistake == "a failure commits what the body did" else ()
    forgets = mistake == "a failed run forgets its failure"
    return _send(world, run, Commit(effects=effects, ends="failed", clears=("f",) if forgets else ()))


def _end(world: World, run: Run, mistake: str | None) -> World:
    ends = Commit(effects=run.body, reads=run.read, ends="completed", clears=_keys(world.records))
    if mistake == "the records go after the completion":
        ends = ends._replace(clears=(), then=Commit(clears=ends.clears, is_fenced=False))
    return _send(world, run, ends)


def _of_step(world: World, run: Run, record: Record, effects: tuple[str, ...], mistake: str | None) -> Commit:
    """Return the commit of a step: its effects and its record, with what is pending."""
    records = (*run.pending, record)
    if mistake == "a record comes after its effects":
        return Commit(effects=effects, moves=0, then=Commit(records=records))
    if mistake == "a record comes before its effects":
        return Commit(records=records, moves=0, then=Commit(effects=effects))
    if mistake == "a step commits what the body did":
        effects = (*run.body, *effects)
    reads = run.read if mistake == "a step commits the packet of its turn" else ()
    late = mistake == "a fresh run removes the records with its first step" and not run.records
    return Commit(effects=effects, records=records, reads=reads, clears=_keys(world.records) if late else ())


def _rest(world: World, run: Run, mistake: str | None, **changes: Any) -> World:
    effects = run.body if mistake == "a wait commits what the body did" else ()
    return _send(world, run, Commit(effects=effects, ends="rests")._replace(**changes))


def _receive(world: World, run: Run, mistake: str | None) -> World:
    """Take the next packet, which leaves the port with the record of its value."""
    if "receive" in dict(run.records):
        return _with(world, _next(_passed(run, "receive")))
    if not world.port:
        return _rest(world, run, mistake)
    packet = world.port[0]
    took = Commit(effects=("got",), records=(*run.pending, ("receive", "got")), reads=(packet,), receives=True)
    if mistake == "a receive leaves the packet to the body":
        return _send(world, run._replace(read=(packet,)), took._replace(reads=()))
    if mistake == "a receive takes the packet first":
        return _send(world, run, took._replace(records=(), moves=0, then=Commit(records=took.records)))
    return _send(world, run, took)


def _sleep(world: World, run: Run, mistake: str | None) -> World:
    """Rest until the time that the first look has recorded."""
    until = int(dict(run.records).get("sleep", "0"))
    if until and world.time >= until:
        return _with(world, _next(_passed(run, "sleep")))
    if not until:
        return _send(world, run, Commit(records=(*run.pending, ("sleep", f"{world.time + 1}")), moves=0))
    if mistake == "a sleep begins anew in each run":
        return _rest(world, run, mistake, until=until, clears=("sleep",))
    if mistake == "a wake takes the timer" and run.unit_no == 0:
        return _rest(world, run, mistake)
    return _rest(world, run, mistake, until=until)


def _call(world: World, run: Run, mistake: str | None) -> World:
    """Make the child with the record of the call, rest until it has ended, and record its value."""
    value = dict(run.records).get("call")
    if value is None:
        records = (*run.pending, ("call", "open"))
        if mistake == "a child is made before its record":
            then = Commit(records=records, moves=0)
            return _send(world, run, Commit(effects=("child",), makes_child=True, moves=0, then=then))
        return _send(world, run, Commit(effects=("child",), records=records, makes_child=True, moves=0))
    if value != "open":
        return _with(world, _next(_passed(run, "call")))
    if world.child == "ended":
        return _send(world, run, Commit(records=(*run.pending, ("call", "child"))))
    return _rest(world, run, mistake)


def _step_of_loop(world: World, run: Run, name: str, mistake: str | None) -> World:
    """Do a step in a loop. The new code does not understand the value of the first one, and forgets it."""
    run = run._replace(calls=run.calls + 1)
    key = _numbered(name, run)
    value = dict(run.records).get(key)
    if value is None:
        return _send(world, run, Commit(effects=(name,), records=((key, "new"),)))
    if value != "bad":
        return _with(world, _next(run))
    left = tuple(record for record in run.records if record[0] != key)
    takes_new = mistake == "a forgotten step takes a new number"
    return _with(world, run._replace(records=left, calls=run.calls - (not takes_new)))


def _use(world: World, run: Run, name: str) -> World:
    value = dict(run.records)[_numbered(name, run)]
    if value != ("new", "kept")[len(run.body)]:
        return replace(world, broken="a step of a loop has the value of another")
    return _with(world, _next(run, body=(*run.body, f"use {value}")))


def _numbered(name: str, run: Run) -> str:
    return name if run.calls == 1 else f"{name}#{run.calls}"


def _since(world: World, run: Run, mistake: str | None) -> World:
    """Go the new way unless a record lies behind the last one that the body has passed; keep that with the next."""
    known = dict(run.records)
    behind = run.records[run.passed :]
    if mistake == "since looks at every record":
        behind = tuple(record for record in run.records if record[0] != "a")
    goes_new = "since" in known or not behind
    way = "new" if goes_new else "old"
    if way in known:
        return _with(world, _next(_passed(run, way)))
    mark = (("since", "yes"),) if goes_new and mistake != "since is not kept" else ()
    return _send(world, run, Commit(effects=(way,), records=(*mark, (way, way))))


def _turn(world: World, run: Run) -> World:
    """Read the next packet, or end: the last turns are committed with the end."""
    left = [packet for packet in world.port if packet not in run.read]
    if left:
        return _with(world, _next(run, read=(*run.read, left[0]), calls=run.calls + 1))
    return _end(world, run, None)


def _step_of_turn(world: World, run: Run, mistake: str | None) -> World:
    """Do the step of a turn; its record has the packet of the turn in its key."""
    key, packet = f"x@{run.read[-1]}", run.read[-1]
    if mistake == "a record of a turn has no packet":
        key = f"x#{len(run.read)}"
    elif mistake == "the numbers go on from turn to turn":
        key = f"x#{run.calls}"
    value = dict(run.records).get(key)
    if value is None:
        return _send(world, run, _of_step(world, run, (key, f"{packet}"), (f"x {packet}",), mistake)._replace(moves=0))
    return _with(world, _next(run, body=(*run.body, f"out {packet} {value}")))


def _turn_over(world: World, run: Run, mistake: str | None) -> World:
    """Begin the next turn; if the unit has its turns, commit it before, and the records of its turns go."""
    if len(run.read) < world.every:
        return _with(world, run._replace(place=0))
    clears = () if mistake == "the records of a turn stay" else _keys(run.records)
    return _send(world, run, Commit(effects=run.body, reads=run.read, clears=clears, moves=-run.place, of_body=True))


# -- its commits -------------------------------------------------------------------------------------------------------


def _commits(world: World, run: Run, commit: Commit, mistake: str | None) -> Iterator[World]:
    """A commit is applied or refused, or its answer is lost: then the run looks whether it was applied."""
    is_current = world.current == run.no
    if run.in_doubt:
        if mistake == "a lost answer counts as done" or (is_current and world.unit_no > run.unit_no):
            yield _answered(world, run, commit)
        else:
            yield _with(world, run._replace(in_doubt=False)) if is_current else _without(world, run)
        return
    stands = is_current and (world.unit_no == run.unit_no or mistake == "the fence has no unit number")
    if commit.is_fenced and not stands and (mistake != "a zombie may write" or commit.ends):
        yield _without(world, run)  # it is no longer the current run
        return
    if not set(commit.reads) <= set(world.port):
        yield _taken(_without(world, run))  # another reader took what it had read: it begins again
        return
    applied = _applied(world, run, commit, mistake)
    yield _answered(applied, run, commit)
    if world.troubles and commit.is_fenced:
        lost = run._replace(in_doubt=mistake != "the fence has no unit number")
        yield _with(replace(applied, troubles=world.troubles - 1), lost)
        yield _with(replace(world, troubles=world.troubles - 1), lost)


def _answered(world: World, run: Run, commit: Commit) -> World:
    """The run goes on behind its commit, or is over."""
    if commit.then is None and (commit.ends or not commit.is_fenced):
        return _without(world, run)
    after = run._replace(
        sends=commit.then, in_doubt=False, unit_no=run.unit_no + 1, place=run.place + commit.moves,
        records=_put(run.records, commit), pending=() if commit.records else run.pending,
    )  # fmt: skip
    if commit.of_body:
        after = after._replace(body=(), read=())
    return _with(world, _passed(after, commit.records[-1][0]) if commit.records and commit.moves else after)


def _applied(world: World, run: Run, commit: Commit, mistake: str | None) -> World:
    """Return the store after a commit."""
    may_complete = not world.asked or world.program == "turns" or mistake == "a run completes although it was asked"
    if commit.ends == "completed" and not may_complete:
        commit = Commit(ends="rests")  # it begins again, and the next run passes all that is done
    is_fresh = 0 <= world.fresh_after < run.no
    after = replace(
        world, unit_no=world.unit_no + (world.current == run.no), records=_put(world.records, commit),
        port=tuple(packet for packet in world.port if packet not in commit.reads),
        receives=world.receives or commit.receives, child="runs" if commit.makes_child else world.child,
        done=tuple(sorted((*world.done, *commit.effects))),
        done_fresh=tuple(sorted((*world.done_fresh, *commit.effects))) if is_fresh else (),
    )  # fmt: skip
    return _judged(_ended(after, commit, mistake) if commit.ends else after, run, commit)


def _ended(world: World, commit: Commit, mistake: str | None) -> World:
    status = {"rests": "suspended", "again": "queued"}.get(commit.ends, commit.ends)
    if world.asked and not (commit.ends == "rests" and mistake == "a wait forgets an ask"):
        status = "queued"
    return replace(world, status=status, current=0, asked=False, timer=commit.until)


def _judged(world: World, run: Run, commit: Commit) -> World:
    """Say what must not be, as soon as it is."""
    done, broken = world.done, None
    if any(done.count(effect) > world.askings for effect in commit.effects):
        broken = "an effect is there twice"
    elif world.undoes and "c" in done:
        broken = "what was undone goes on"
    elif "old" in done and "new" in done:
        broken = "it has gone the old way and the new one"
    elif commit.ends == "failed" and run.is_new and not world.undoes:
        broken = "the mended body fails as the old one did"
    elif any(effect.startswith("out") and effect[4] != effect[6] for effect in commit.effects):
        broken = "a packet has the value of another"
    elif commit.of_body and world.records:
        broken = "the records of an endless job grow"
    elif commit.until > world.askings:
        broken = "it sleeps longer than it was told to"
    return replace(world, broken=broken)


def _put(records: tuple[Record, ...], commit: Commit) -> tuple[Record, ...]:
    kept = {key: value for key, value in records if key not in commit.clears}
    return tuple((kept | dict(commit.records)).items())


def _keys(records: tuple[Record, ...]) -> tuple[str, ...]:
    return tuple(key for key, _ in records)


def _passed(run: Run, key: str) -> Run:
    return run._replace(passed=max(run.passed, _keys(run.records).index(key) + 1))


def _next(run: Run, **changes: Any) -> Run:
    return run._replace(place=run.place + 1, **changes)


def _send(world: World, run: Run, commit: Commit) -> World:
    return _with(world, run._replace(sends=commit))


def _by_no(world: World, run: Run) -> Run:
    return next(one for one in world.runs if one.no == run.no)


def _with(world: World, run: Run) -> World:
    return replace(world, runs=tuple(run if one.no == run.no else one for one in world.runs))


def _without(world: World, run: Run) -> World:
    return replace(world, runs=tuple(one for one in world.runs if one.no != run.no))


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    count = world.done.count
    if world.status == "failed":
        has_undone = world.program == "fails" or count("undo")
        return None if has_undone and not count("b") + count("c") else "it failed with half of its effects"
    waits_again = world.status == "suspended" and world.program == "waits" and world.askings == 2 and not world.port
    if world.status != "completed" and not waits_again:
        return f"it is {world.status} for ever"
    if world.records and not waits_again:
        return "records are left behind"
    if world.program == "waits" and count("got") + len(world.port) != world.written:
        return "a packet is lost"
    if world.must_be_new and not count("new"):
        return "it has gone the old way, and had not come there before"
    if world.fresh_after >= 0:
        return None if {*EFFECTS["asked"]} <= {*world.done_fresh} else "it did not begin anew"
    gone = {f"{packet}" for packet in world.removed}
    missing = [one for one in EFFECTS[world.program] if one[-1] not in gone and count(one) < world.askings]
    return f"{missing[0]} is lost" if missing and not waits_again else None
