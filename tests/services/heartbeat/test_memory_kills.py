"""Kills for want of memory are read from the files of the kernel, the nearest first, and count for some seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from celery_sidejob.services.heartbeat import pool_processes
from celery_sidejob.services.heartbeat.pool_processes import MemoryKills, kill_counters, kills_in


def test_the_first_file_that_knows_a_number_counts(tmp_path: Path) -> None:
    version_1, version_2, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    version_1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    version_2.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n")
    other.write_text("low 0\nsomething oom_kill 9\noom_kill many\n")
    assert kills_in([version_1, version_2]) == 7
    assert kills_in([tmp_path / "nowhere", other, version_2]) == 2
    assert kills_in([tmp_path / "nowhere", tmp_path, other]) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0::/a/b\n", ["/sys/fs/cgroup/a/b/memory.events", "/sys/fs/cgroup/memory.events"]),
        (
            "5:cpu,memory:/c\n4:pids:/\n0::/\n",
            [
                "/sys/fs/cgroup/memory/c/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control",
                "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.events",
            ],
        ),
        ("0::/a:b\n", ["/sys/fs/cgroup/a:b/memory.events", "/sys/fs/cgroup/memory.events"]),
        ("nonsense", []),
    ],
)  # fmt: skip
def test_the_group_of_this_process_is_looked_up_in_both_versions(
    text: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_processes, "GROUP", tmp_path / "cgroup")
    assert kill_counters() == [pool_processes.HOST], "there are no control groups at all"
    (tmp_path / "cgroup").write_text(text)
    if found:
        assert list(map(str, kill_counters())) == [*found, str(pool_processes.HOST)]
    else:
        assert kill_counters() == [pool_processes.HOST]


def test_a_kill_counts_as_just_now_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int | None] = [5]
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kills = MemoryKills(lambda: numbers[0])
    assert kills.were_just_now() is False, "the five before this worker began are none of its own"
    numbers[0] = 6
    assert kills.were_just_now() is True
    now += pool_processes.WITHIN_S - 1
    assert kills.were_just_now() is True
    now += 2
    assert kills.were_just_now() is False

    numbers[0] = 0
    assert kills.were_just_now() is False, "another control group counts from its own beginning"
    numbers[0] = None
    assert kills.were_just_now() is None
    numbers[0] = 9
    assert kills.were_just_now() is False, "nobody knows how many of them are new"
