"""Statistics for Prometheus. Needs the extra `prometheus`; nothing else of the package imports this.

Serve it from a process that Prometheus scrapes, or write it for the node exporter with
``celery -A app sidejob stats --prometheus``:

    prometheus_client.REGISTRY.register(SideJobCollector(sidejob))
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from .inspection.statistics import COUNTED, GAUGES, LIVES, Amounts, StatisticsViews, added, life_of, of_each
from .model.errors import MissingLibraryError
from .model.printable import printable
from .model.statistics import COUNTED_BY, Amount, Durations, Statistics, Tally
from .model.status import UNFINISHED, Status

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingLibraryError(
        f"Metrics for Prometheus need prometheus-client ({error}). Install it with: "
        'pip install "celery-sidejob[prometheus]".'
    ) from error


T = TypeVar("T")

MOST = 500
"""The most queues, tasks in queues, steps of these, and groups of the dead set in a scrape; the rest of each is summed
up as `OTHER`."""
OTHER = "other"


class SideJobCollector(Collector):
    """Reads `sidejob.stats()` at each scrape; if the store cannot be read, the only metric is `sidejob_up 0`."""

    def __init__(self, sidejob: Any) -> None:
        self._sidejob = sidejob

    def describe(self) -> Iterable[Metric]:
        """Open no connection at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        try:
            found = _read(self._sidejob)
        except Exception:  # the scrape must show `sidejob_up 0`, and the process's other metrics
            found = None
        yield from _metrics(found)


def exposition(sidejob: Any) -> str:
    """Return the metrics in Prometheus' text format; raises the errors of `stats`. None: a store that was not read."""
    found = None if sidejob is None else _read(sidejob)

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return _metrics(found)

    registry = CollectorRegistry()
    registry.register(Once())
    return generate_latest(registry).decode()


def _read(sidejob: Any) -> Mapping[str, Any]:
    """Read `stats`, and the tallies of all runs and steps since the schema was made."""
    views = StatisticsViews(sidejob.runtime)
    return {**views.stats(), "tallies": views.tallies_ever()}


def _metrics(found: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Yield the numbers of `stats` as metrics; an age of None has no sample. With None, the store could not be read."""
    yield GaugeMetricFamily("sidejob_up", "Whether the store could be read.", value=int(found is not None))
    if found is None:
        return
    yield _gauge(
        "sidejob_jobs",
        "Jobs that are not finished; failed ones rest in the dead set.",
        ["status"],
        {(str(status),): found["jobs"].get(status, 0) for status in (*UNFINISHED, Status.FAILED)},
    )
    queues = _queues(found["queues"])
    for name, key, meaning in QUEUE:
        yield _gauge(name, meaning, ["queue"], {label: row[key] for label, row in queues.items()})
    for gauge in GAUGES:
        yield _gauge(gauge.metric, gauge.meaning, [], {(): gauge.of(found)})
    yield _gauge(
        "sidejob_dead_group_entries",
        "The newest entries of the dead set by task, failure group and reason.",
        ["task", "group", "reason"],
        _by_label(
            {(row["task"], row["group"], row["reason"]): row["entries"] for row in found["dead"]["groups"]},
            lambda entries: entries,
            operator.add,
        ),
    )
    lives = Counter(map(life_of, found["workers"]))
    yield _gauge(
        "sidejob_workers", "Workers that the store knows.", ["state"], {(life,): lives[life] for life in LIVES}
    )
    yield _gauge(
        "sidejob_failover_stores",
        "Further stores of durable tasks.",
        ["state"],
        {
            (state,): sum(one["answers"] is answers for one in found["stores"])
            for state, answers in (("up", True), ("away", False))
        },
    )
    for name, meaning in COUNTED.items():
        yield CounterMetricFamily(f"sidejob_{name}", meaning, value=found["counters"][name])
    for name, (label, meaning) in COUNTED_BY.items():
        counts = (([printable(value)], count) for value, count in found["counters"][name].items())
        yield _filled(CounterMetricFamily(f"sidejob_{name}", meaning, labels=[label]), counts)
    taken = HistogramMetricFamily(
        "sidejob_transaction_duration_seconds",
        "How long the store took for a run's claim, its checkpoints and its end.",
        labels=["operation"],
    )
    for operation, one in found["durations"].items():
        buckets = [(f"{bound:g}", count) for bound, count in one["buckets"]]
        taken.add_metric([operation], [*buckets, ("+Inf", one["count"])], sum_value=one["sum_s"])
    yield taken
    for of_step, (labels, *metrics) in ((False, TASKS), (True, STEPS)):
        amounts = [item for item in found["tallies"] if bool(item[0].step) is of_step]
        yield from _of_tasks(of_each(_labelled(amounts, *labels), {}, None), labels, *metrics)


QUEUE = (
    ("sidejob_queue_depth", "depth", "Runs that are due and that no worker has begun."),
    ("sidejob_queue_running", "running", "Runs in progress."),
    ("sidejob_queue_scheduled", "scheduled", "Durable tasks that wait for their eta."),
    ("sidejob_queue_delayed", "delayed", "Runs that wait for the end of a retry's backoff."),
    ("sidejob_queue_parked", "parked", "Runs whose task no worker of the queue knows."),
    ("sidejob_queue_unpublished", "unpublished", "Runs that are due and that the broker has not been given."),
    ("sidejob_queue_oldest_due_age_seconds", "oldest_due_s", "How long the oldest due run has waited."),
    (
        "sidejob_queue_oldest_unpublished_age_seconds",
        "oldest_unpublished_s",
        "How long the oldest unpublished run has waited.",
    ),
    ("sidejob_queue_workers", "workers", "Live workers that serve the queue."),
    ("sidejob_queue_paused", "paused", "Whether the queue is paused."),
    ("sidejob_queue_limit", "limit", "How many runs of the queue may be in progress at once."),
)


def _by_label(
    found: Mapping[tuple[str, ...], T], rank: Callable[[T], Any], together: Callable[[T, T], T]
) -> dict[tuple[str, ...], T]:
    """Return the values by label: a name without hidden characters, or `OTHER` if `MOST` names rank higher."""
    kept = set(sorted(found, key=lambda names: rank(found[names]), reverse=True)[:MOST])
    shown: dict[tuple[str, ...], T] = {}
    for names, one in found.items():
        label = tuple(map(printable, names)) if names in kept else (OTHER,) * len(names)
        shown[label] = together(shown[label], one) if label in shown else one
    return shown


def _queues(found: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return the statistics of queues by label: managed and served queues rank first, then those with most work."""

    def together(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        served = max(ours["workers"], theirs["workers"])
        return {**added(ours, theirs), "workers": served, "paused": None, "limit": None}

    return _by_label(
        {(name,): row for name, row in found.items()},
        lambda row: (row["managed"], row["workers"] > 0, row["depth"] + row["running"]),
        together,
    )


def _labelled(found: Amounts, *names: str) -> Iterator[tuple[Tally, Amount]]:
    """Yield tallies with their labels in these fields: tasks in queues with most runs rank first, or their steps."""
    amounts: dict[tuple[str, ...], Amounts] = {}
    for tally, amount in found:
        amounts.setdefault(tuple(getattr(tally, name) for name in names), []).append((tally, amount))
    ranked = _by_label(amounts, lambda of_one: sum(amount.number for _, amount in of_one), operator.iadd)
    for label, of_one in ranked.items():
        shown: dict[str, Any] = dict(zip(names, label, strict=True))
        yield from ((tally._replace(**shown), amount) for tally, amount in of_one)


def _gauge(name: str, meaning: str, labels: list[str], values: Mapping[tuple[str, ...], float | None]) -> Metric:
    known = ((label, value) for label, value in values.items() if value is not None)
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), known)


def _filled(family: Any, samples: Iterable[tuple[Any, ...]]) -> Metric:
    """Return a family of metrics with samples: their labels, and the further arguments of `add_metric`."""
    for sample in samples:
        family.add_metric(*sample)
    filled: Metric = family
    return filled


def _of_tasks(found: Sequence[Statistics], labels: Sequence[str], taken: Named, happened: Named) -> Iterator[Metric]:
    labelled = [([str(getattr(one, label)) for label in labels], one) for one in found]
    for name, meaning, part in taken:
        histograms = ((label, *_histogram(getattr(one, part))) for label, one in labelled)
        yield _filled(HistogramMetricFamily(name, meaning, labels=labels), histograms)
    for name, meaning, part in happened:
        counts = ((label, getattr(one, part)) for label, one in labelled)
        yield _filled(CounterMetricFamily(name, meaning, labels=labels), counts)


def _histogram(durations: Durations) -> tuple[list[tuple[str, int]], float]:
    """Return the numbers of durations up to each bound, and their sum."""
    bounds = [f"{bound:g}" for bound, _ in durations.histogram[:-1]]
    cumulated = accumulate(count for _, count in durations.histogram)
    return [*zip((*bounds, "+Inf"), cumulated, strict=True)], durations.sum_s


Named = Sequence[tuple[str, str, str]]
"""Metrics: for each its name, its meaning, and its attribute of `Statistics`."""
TASKS: tuple[Sequence[str], Named, Named] = (
    ("queue", "task"),
    (
        ("sidejob_task_wait_seconds", "How long runs waited from when they were due to their beginning.", "waits"),
        ("sidejob_task_run_seconds", "How long runs took, however they ended.", "runs"),
    ),
    (
        ("sidejob_task_failures", "Runs with which their job or durable task failed.", "failures"),
        ("sidejob_task_retries", "Runs that are tried again.", "retries"),
        ("sidejob_task_losses", "Runs that were lost with their worker.", "losses"),
    ),
)
"""The labels of the metrics of tasks, what they have taken, and what has happened."""
STEPS: tuple[Sequence[str], Named, Named] = (
    ("queue", "task", "step"),
    (("sidejob_step_seconds", "How long steps took, however they ended.", "runs"),),
    (
        ("sidejob_step_failures", "Steps that failed, without a further try.", "failures"),
        ("sidejob_step_retries", "Steps that are tried again.", "retries"),
    ),
)
