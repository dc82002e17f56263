"""What a soak measures: of the store, of its processes, of what was lost and rescued."""

from __future__ import annotations

import contextlib
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Any

import psutil
import psycopg

from proofs.soak.judge import Tally
from proofs.trial.faults import Happening, Loss
from proofs.trial.fleet import LEASE_S, Fleet

SAMPLE_S = 2.0
SETTLE_S = 3.0
"""Postgres' processes report what they did with a delay of up to a second."""
WARM_S = 20.0
"""When a process is old enough to be weighed for the first time."""
MEGABYTE = 1_000_000
GIVEN_UP = "given up by the run itself: the store was away"
HEADS = ("asked", "promised", "unknown", "done")
_STORE = """
SELECT (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'sidejob'),
  (SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
   WHERE dbid = (SELECT oid FROM pg_database WHERE datname = 'sidejob')),
  (SELECT count(*) FROM pg_stat_activity WHERE datname = 'sidejob')"""
_UNSETTLED = """
SELECT coalesce(extract(epoch FROM max(now() - due_at))::float, 0) FROM sidejob.messages
WHERE due_at <= now() AND gate <= 1"""
_TABLES = """
SELECT relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup, n_tup_upd, n_tup_hot_upd
FROM pg_stat_user_tables WHERE schemaname = 'sidejob' ORDER BY 2 DESC"""
_DELAYS = "SELECT what, value, extract(epoch FROM at)::float FROM ledger WHERE what IN ('single', 'note', 'news')"


@dataclass
class Rate:
    """What the store was asked, per second, over some time; counters that a crash of Postgres has reset begin anew."""

    seconds: float = 0.0
    transactions: int = 0
    statements: int = 0
    connections: list[int] = field(default_factory=list)
    _last: tuple[float, int, int] | None = None

    def sample(self, aside_url: str) -> None:
        """Read the counters."""
        with psycopg.connect(aside_url, autocommit=True, connect_timeout=5) as connection:
            row = connection.execute(_STORE).fetchone()
        assert row is not None
        now, (transactions, statements, connections) = time.monotonic(), row
        self.connections.append(connections)
        if self._last is not None:
            then, transactions_then, statements_then = self._last
            if transactions >= transactions_then and statements >= statements_then:
                self.seconds += now - then
                self.transactions += transactions - transactions_then
                self.statements += statements - statements_then
        self._last = (now, transactions, statements)

    def as_row(self) -> dict[str, float]:
        """Per second, and connections."""
        seconds = self.seconds or float("nan")
        return {
            "statements_per_s": round(self.statements / seconds, 1),
            "transactions_per_s": round(self.transactions / seconds, 1),
            "connections_median": median(self.connections) if self.connections else 0,
            "connections_most": max(self.connections, default=0),
        }


@dataclass
class Weight:
    """The memory of one process with its children: when it was warm, and last."""

    place: str
    age_s: float
    first_mb: float
    last_mb: float


class Figures:
    """Samples while the soak runs, and is a report at its end."""

    def __init__(self, *, broker: str, seed: int, rate: float, pools: list[str]) -> None:
        self.begun = datetime.now(UTC)
        self.load = Rate()
        self.idle = Rate()
        self.setting = {"broker": broker, "seed": seed, "asks_per_s": rate, "pools": pools, "machine": machine()}
        self.unsettled_s: list[float] = []
        self.weights: dict[int, Weight] = {}
        self.report: dict[str, Any] = {}
        self._sampled_at = 0.0

    def tick(self, fleet: Fleet, *, store: bool) -> None:
        """Sample, if it is time; the store only if it can be asked."""
        now = time.monotonic()
        if now - self._sampled_at < SAMPLE_S:
            return
        self._sampled_at = now
        self._weigh(fleet)
        if store:
            self.load.sample(fleet.ground.aside_url)
            with psycopg.connect(fleet.ground.database_url, autocommit=True) as connection:
                row = connection.execute(_UNSETTLED).fetchone()
                assert row is not None
                self.unsettled_s.append(row[0])

    def measure_idle(self, aside_url: str, seconds: float) -> None:
        """Watch a store of which nothing is asked but what workers and beat ask by themselves."""
        time.sleep(SETTLE_S)
        until = time.monotonic() + seconds
        self.idle.sample(aside_url)
        while time.monotonic() < until:
            time.sleep(1.0)
        self.idle.sample(aside_url)

    def finish(
        self, fleet: Fleet, *, minutes: float, quiet_s: float | None, history: list[Happening], losses: list[Loss],
        kinds: Mapping[str, Tally], lines: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        """Put the report together."""
        with psycopg.connect(fleet.ground.database_url, autocommit=True) as connection:
            rescues = connection.execute(
                "SELECT extract(epoch FROM at)::float, pid, lost FROM soak.rescues ORDER BY at"
            )
            freed = rescues.fetchall()
            tables = connection.execute(_TABLES).fetchall()
            made = connection.execute("SELECT last_value FROM sidejob.jobs_id_seq").fetchone()
            statuses = connection.execute("SELECT status, count(*) FROM sidejob.jobs GROUP BY 1").fetchall()
            delays = connection.execute(_DELAYS).fetchall()
        self.report = {
            "begun": self.begun.isoformat(timespec="seconds"),
            "minutes": round(minutes, 1),
            **self.setting,
            "jobs_made": made[0] if made else 0,
            "jobs_at_the_end": dict(sorted(statuses)),
            "kinds": {name: vars(tally) for name, tally in sorted(kinds.items())},
            "faults": dict(Counter(fault.name for fault in history).most_common()),
            "runs_lost": sum(lost for _, _, lost in freed),
            "runs_given_back": sum(not lost for _, _, lost in freed),
            "rescues_s": rescue_times(freed, losses, history),
            "from_promise_to_effect_s": _spread(_delays(delays, lines)),
            "longest_unsettled_s": round(max(self.unsettled_s, default=0.0), 1),
            "quiet_after_s": round(quiet_s, 1) if quiet_s is not None else None,
            "warm_stops_s": _spread(fleet.stops_s),
            "store_under_load": self.load.as_row(),
            "store_idle": self.idle.as_row(),
            "memory_mb": [vars(weight) for weight in self._oldest()],
            "tables": {
                name: {"kB": size // 1000, "live": live, "dead": dead, "hot_share": _share(hot, updates)}
                for name, size, live, dead, updates, hot in tables
            },
            "processes_ended_by_themselves": dict(fleet.ended.most_common()),
            "warm_stops_that_hung": len(fleet.hung),
        }  # fmt: skip

    def _weigh(self, fleet: Fleet) -> None:
        for place in fleet.places:
            if place.process is None:
                continue
            age_s = time.monotonic() - place.since
            weight = _memory_mb(place.process.pid)
            if age_s < WARM_S or weight is None:
                continue
            known = self.weights.get(place.process.pid)
            first = known.first_mb if known is not None else weight
            self.weights[place.process.pid] = Weight(place.name, round(age_s), first, weight)

    def _oldest(self) -> list[Weight]:
        """Of each place the process that lived longest."""
        oldest: dict[str, Weight] = {}
        for weight in self.weights.values():
            if weight.place not in oldest or oldest[weight.place].age_s < weight.age_s:
                oldest[weight.place] = weight
        return [oldest[name] for name in sorted(oldest)]

    # -- as text ---------------------------------------------------------------------------------------------------

    def as_markdown(self) -> str:
        """The report as tables."""
        report = self.report
        idle, load = report["store_idle"], report["store_under_load"]
        pools = ", ".join(report["pools"])
        setting = (
            f"{report['minutes']} minutes on {report['begun'][:10]}; {report['broker']}; workers: {pools}; "
            f"seed {report['seed']}; {report['machine']}."
        )
        parts = [
            setting,
            _table(
                ("what was asked", "asked", "promised", "answer lost", "done"),
                [(name, *(of[head] for head in HEADS)) for name, of in report["kinds"].items()],
            ),
            _table(("fault", "times"), report["faults"].items()),
            _table(
                ("seconds from the fault to the rescue", "runs", "median", "most"),
                [(name, times["n"], times["median"], times["most"]) for name, times in report["rescues_s"].items()],
            ),
            _table(
                ("the store", "idle", "under load"),
                [(key.replace("_", " "), idle[key], load[key]) for key in idle],
            ),
            _table(
                ("memory, the oldest of each place", "age in s", "MB when warm", "MB at its end"),
                [(of["place"], of["age_s"], of["first_mb"], of["last_mb"]) for of in report["memory_mb"]],
            ),
            _table(
                ("table at the end", "kB with indexes", "live rows", "dead rows", "HOT updates"),
                [(name, *of.values()) for name, of in report["tables"].items() if of["kB"] > 100],
            ),
            _table(("further", ""), self._further()),
        ]  # fmt: skip
        return "\n\n".join(parts) + "\n"

    def _further(self) -> Iterable[tuple[str, Any]]:
        report = self.report
        for key in (
            "jobs_made", "jobs_at_the_end", "runs_lost", "runs_given_back", "from_promise_to_effect_s",
            "longest_unsettled_s", "quiet_after_s", "warm_stops_s", "warm_stops_that_hung",
        ):  # fmt: skip
            value = report[key]
            shown = ", ".join(f"{name} {of}" for name, of in value.items()) if isinstance(value, dict) else value
            yield key.replace("_", " "), shown
        for how, count in report["processes_ended_by_themselves"].items():
            yield f"{how}".replace("|", "/"), count


def rescue_times(
    freed: Iterable[tuple[float, int | None, bool]], losses: list[Loss], history: list[Happening]
) -> dict[str, dict[str, float]]:
    """How long runs waited for their rescue, by what their worker had suffered last; the rest gave up by themselves."""
    times: dict[str, list[float]] = {}
    for at, pid, lost in freed:
        if not lost:
            continue
        before = [loss for loss in losses if pid in loss.pids and loss.at <= at <= loss.until + LEASE_S]
        if before:
            loss = before[-1]
            others = [fault for fault in history if fault is not loss.during and fault.overlaps(loss.at, at)]
            name = loss.during.name + (", beside other faults" if others else "")
            times.setdefault(name, []).append(at - loss.at)
        else:
            times.setdefault(GIVEN_UP, []).append(0.0)
    return {name: _spread(found) for name, found in sorted(times.items())}


def machine() -> str:
    """What this ran on."""
    memory_gb = psutil.virtual_memory().total / 1e9
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{psutil.cpu_count()} cores, {memory_gb:.0f} GB, {system}"


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 2) if whole else None


def _delays(entries: Iterable[tuple[str, int, float]], lines: list[dict[str, Any]]) -> list[float]:
    promised = {line["key"]: line["at"] for line in lines if line["event"] == "promised"}
    return [max(0.0, at - promised[key]) for _, key, at in entries if key in promised]


def _spread(times: list[float]) -> dict[str, float]:
    found = sorted(times)
    if not found:
        return {"n": 0, "median": 0.0, "p99": 0.0, "most": 0.0}
    p99 = quantiles(found, n=100, method="inclusive")[98] if len(found) > 1 else found[0]
    return {"n": len(found), "median": round(median(found), 2), "p99": round(p99, 2), "most": round(found[-1], 2)}


def _memory_mb(pid: int) -> float | None:
    """Unshared memory of a process and its children."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        total = sum(member.memory_full_info().uss for member in (process, *process.children(recursive=True)))
        return round(total / MEGABYTE, 1)
    return None


def _table(heads: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
