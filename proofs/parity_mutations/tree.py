"""A copy of the tree, in which a file is broken and tests are run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .table import ROOT, Mutation

TEST_S = 60
"""How long one test may take; one that a mutation makes hang has failed."""
LONGEST_S = 600.0
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "site", "__pycache__", ".*_cache", ".hypothesis")
PYTEST = ("-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", "--no-header", "-rfE", f"--timeout={TEST_S}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of tests ended: `code` is pytest's, None if it had to be stopped."""

    code: int | None
    output: str
    took_s: float

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self.code == 0

    @property
    def verdict(self) -> str:
        """What became of a mutation; `invalid`: pytest could not even begin, so no test has told anything."""
        return {0: "survived", 1: "killed", None: "killed"}.get(self.code, "invalid")

    @property
    def why(self) -> str:
        """The line that names the first test that failed."""
        if self.code is None:
            return "the tests hung"
        told = re.search(r"^(?:FAILED|ERROR) \S+\.py.*", self.output, re.MULTILINE)
        return told[0][:200] if told else self.output.strip().rpartition("\n")[2]


class Tree:
    """A copy of the tree in a temporary folder, which `with` removes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="parity-mutations-")
        self._root = Path(self._folder.name) / "tree"

    def __enter__(self) -> Self:
        shutil.copytree(ROOT, self._root, ignore=LEFT_OUT, symlinks=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @contextmanager
    def broken_by(self, mutation: Mutation) -> Iterator[None]:
        """Have the copy with the mutation in the block."""
        file = self._root / mutation.file
        whole = file.read_text()
        try:
            self._write(file, mutation.applied(whole))
            yield
        finally:
            self._write(file, whole)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Its time may have the same second, and its size may be the same: then Python would take the compiled one.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)

    def run(self, tests: Sequence[str], *, timeout_s: float = LONGEST_S) -> Outcome:
        """Run tests until one fails."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            # In a session of its own, so that all it has started can be ended.
            pytest = subprocess.Popen(
                [sys.executable, "-m", "pytest", *PYTEST, *tests], cwd=self._root, stdout=output, stderr=output,
                env={**os.environ, "PYTHONPATH": str(self._root)}, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = pytest.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(pytest.pid, signal.SIGKILL)
                pytest.wait()
            output.seek(0)
            return Outcome(code, output.read(), time.monotonic() - began)
