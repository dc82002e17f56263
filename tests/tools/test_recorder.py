"""A record keeps the lines of several writers apart and survives their death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.recorder import Record
from tests.tools.workers import python_path

WRITER = """
import os, signal, sys
from tests.tools.recorder import Record

record = Record.from_env()
for number in range(int(sys.argv[2])):
    record.note("line", writer=sys.argv[1], number=number, filling="x" * 500)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_reads_what_was_noted_in_order(record: Record) -> None:
    record.note("begin", job=1)
    record.note("end", job=1, result={"ok": True})

    begin, end = record.read()

    assert (begin["event"], begin["job"], begin["pid"]) == ("begin", 1, os.getpid())
    assert (end["event"], end["result"]) == ("end", {"ok": True})
    assert begin["at"] <= end["at"]


def test_is_empty_before_the_first_line(record: Record) -> None:
    assert record.read() == []


def test_finds_lines_by_event_and_data(record: Record) -> None:
    record.note("turn", job=1)
    record.note("turn", job=2)
    record.note("end", job=1)

    assert len(record.of("turn")) == 2
    assert len(record.of("turn", job=2)) == 1
    assert record.of("turn", job=3) == []


def test_waits_for_lines(record: Record) -> None:
    record.note("turn", job=1)

    assert record.wait_for("turn", job=1)[0]["job"] == 1
    with pytest.raises(TimeoutError, match=r"2 x 'turn'.*has \['turn'\]"):
        record.wait_for("turn", count=2, timeout=0.05)


def test_a_line_torn_by_a_kill_is_left_out(record: Record) -> None:
    record.note("whole")
    with record.path.open("ab") as file:
        file.write(b'{"event": "torn", "a')

    assert [line["event"] for line in record.read()] == ["whole"]


def test_writers_that_are_killed_leave_all_their_lines(record: Record, tmp_path: Path) -> None:
    env = {"PYTHONPATH": python_path(), **record.env}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, "50"], env=env, cwd=tmp_path) for name in ("a", "b", "c")
    ]

    assert [writer.wait(30) for writer in writers] == [-signal.SIGKILL] * 3
    for name in ("a", "b", "c"):
        assert [line["number"] for line in record.of("line", writer=name)] == list(range(50))
