"""Times the statements of our own connections."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_sidejob import store
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement


class Watch:
    """How long each statement took, by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._names = dict(_names())

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Time what is run in the block."""
        run = OwnExecutor.run

        def timed(executor: OwnExecutor, statement: Statement, /, **parameters: Any) -> list[Any]:
            begun = time.perf_counter()
            found = run(executor, statement, **parameters)
            self.seconds[self._names.get(id(statement), statement.text[:44])].append(time.perf_counter() - begun)
            return found

        OwnExecutor.run = timed  # type: ignore[method-assign]
        try:
            yield self
        finally:
            OwnExecutor.run = run  # type: ignore[method-assign]


def _names() -> Iterator[tuple[int, str]]:
    for module in pkgutil.iter_modules(store.__path__):
        for name, value in vars(importlib.import_module(f"{store.__name__}.{module.name}")).items():
            if isinstance(value, Statement):
                yield id(value), f"{module.name}.{name}"
