"""What happened, written down by several processes so that it survives all of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.waiting import wait_until

VARIABLE = "SIDEJOB_TEST_RECORD"


class Record:
    """An append-only file of JSON lines; a line that `note` has returned for outlives a kill of its writer.

    A task body finds the file of its test by `Record.from_env()`; a test gives it to the process by `env`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def from_env(cls) -> Record:
        """The record this process was told to write to; KeyError if it was told of none."""
        return cls(os.environ[VARIABLE])

    @property
    def env(self) -> dict[str, str]:
        """The variable by which a process finds this record."""
        return {VARIABLE: str(self.path)}

    def note(self, event: str, **data: Any) -> None:
        """Append one line with the event, its data, the time (`at`) and the writer (`pid`), and fsync it."""
        line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **data}).encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # One write: with O_APPEND the lines of several writers do not mix.
            written = os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of the line for {event!r} were written")

    def read(self) -> list[dict[str, Any]]:
        """All lines in the order in which they were written.

        A last line without its end is left out: its writer was killed in the middle of it, or is still writing.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        complete, _, _unfinished = text.rpartition(b"\n")
        return [json.loads(line) for line in complete.splitlines()]

    def of(self, event: str, **data: Any) -> list[dict[str, Any]]:
        """The lines of one event, those that have all of `data`."""
        wanted = {"event": event, **data}
        return [line for line in self.read() if all(line.get(key) == value for key, value in wanted.items())]

    def wait_for(self, event: str, *, count: int = 1, timeout: float = 10.0, **data: Any) -> list[dict[str, Any]]:
        """Return the lines of an event once there are at least `count` of them."""

        def enough() -> list[dict[str, Any]]:
            lines = self.of(event, **data)
            if len(lines) < count:
                raise LookupError(f"the record has {[line['event'] for line in self.read()]}")
            return lines

        return wait_until(enough, timeout=timeout, message=f"{count} x {event!r} {data or ''} in the record")


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A record of this test's own; give `record.env` to the processes that are to write to it."""
    return Record(tmp_path / "record.jsonl")
