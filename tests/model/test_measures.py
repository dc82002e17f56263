"""What a process counts is stored once: by the process that counted it, as often as it happened."""

from __future__ import annotations

import os
import threading

import pytest

from celery_sidejob.model.statistics import COUNTED, Measures, counts, durations
from celery_sidejob.model.statistics import TIMED_BOUNDS_S as BOUNDS_S


@pytest.fixture
def measures() -> Measures:
    made = Measures()
    made.begin()
    return made


def test_nothing_is_kept_where_nobody_stores_it() -> None:
    measures = Measures()
    measures.count("runs_lost")
    measures.time("claim", 0.1)

    assert not any(measures.take())


def test_what_is_taken_is_forgotten_and_what_is_given_back_is_kept(measures: Measures) -> None:
    measures.count("runs_lost")
    measures.count("runs_lost", amount=2)
    measures.count("leases_lost", amount=0)
    taken = measures.take()
    measures.count("runs_lost")
    measures.give_back(taken)

    assert taken.totals == {("runs_lost", ""): 3}
    assert measures.take().totals == {("runs_lost", ""): 4}
    assert not any(measures.take())


def test_threads_lose_nothing(measures: Measures) -> None:
    def work() -> None:
        for _ in range(2000):
            measures.count("status_changes", "queued")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert measures.take().totals == {("status_changes", "queued"): 8000}


def test_a_forked_process_does_not_store_what_its_parent_counted(measures: Measures) -> None:
    measures.count("runs_lost")
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        measures.count("leases_lost")
        os.write(writable, repr(measures.take().totals).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(readable, 1000).decode() == "{('leases_lost', ''): 1.0}"
    assert measures.take().totals == {("runs_lost", ""): 1}


def test_counts_are_complete_and_by_label() -> None:
    found = counts(
        {("runs_lost", ""): 3.0, ("status_changes", "queued"): 2.0, ("of a later version", ""): 1.0}, COUNTED
    )

    assert found == {
        **dict.fromkeys(COUNTED, 0), "runs_lost": 3, "jobs_buried": {}, "tasks_buried": {},
        "status_changes": {"queued": 2},
    }  # fmt: skip


def test_durations_are_cumulated_with_quantiles(measures: Measures) -> None:
    for seconds in [0.001] * 50 + [0.004] * 49 + [60.0]:
        measures.time("claim", seconds)
    found = durations(measures.take().totals)

    claim = found["claim"]
    assert (claim["count"], claim["sum_s"]) == (100, pytest.approx(60.246))
    assert dict(claim["buckets"]) == {
        **dict.fromkeys(BOUNDS_S, 99), 0.001: 50, 0.0025: 50,
    }  # fmt: skip
    assert (claim["p50_s"], claim["p99_s"]) == (0.001, 0.005)
    assert found["end"] == {
        "count": 0, "sum_s": 0.0, "p50_s": None, "p99_s": None, "buckets": [(bound, 0) for bound in BOUNDS_S],
    }  # fmt: skip


def test_what_takes_longer_than_the_last_bound_is_at_most_that(measures: Measures) -> None:
    measures.time("end", 100.0)

    assert durations(measures.take().totals)["end"]["p50_s"] == BOUNDS_S[-1]
