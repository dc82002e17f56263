"""Everything that `doctor` finds: about the stores, the broker, the announcements and the app's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .diagnosis.diagnosis import Diagnosis
from .hooks import announcing, task_options
from .hooks.broker import broker_check
from .model.finding import Finding


def examine(sidejob: Any, *, thorough: bool) -> Iterator[Finding]:
    """Yield all findings, good and bad; the app's modules must be imported. `thorough` reads all jobs."""
    primary, *others = (Diagnosis(there, sidejob.owner) for there in sidejob.runtime.in_each_store())
    yield from primary.findings(thorough=thorough)
    for other in others:
        yield from other.of_further_store()
    yield from broker_check.findings(sidejob.app)
    yield from announcing.findings(sidejob.app)
    yield from task_options.findings(sidejob.app)
