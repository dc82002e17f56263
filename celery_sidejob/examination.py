"""Everything that `doctor` finds: about the stores, the broker, the announcements and the app's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .diagnosis.diagnosis import of_each_store
from .hooks import announcing, task_options
from .hooks.broker import broker_check
from .model.finding import Finding


def examine(sidejob: Any, *, thorough: bool) -> Iterator[Finding]:
    """Yield all findings, good and bad; the app's modules must be imported. `thorough` reads all jobs."""
    yield from of_each_store(sidejob.runtime, sidejob.owner, thorough=thorough)
    yield from broker_check.findings(sidejob.app)
    yield from announcing.findings(sidejob.app)
    yield from task_options.findings(sidejob.app)
