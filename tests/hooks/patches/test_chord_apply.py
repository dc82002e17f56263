"""A chord, and a group with something after it, is called by `_chord.apply_async`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from celery import Celery, chord, group
from celery.canvas import _chord

from celery_sidejob.hooks.patches import app_methods
from celery_sidejob.hooks.tasks import present
from celery_sidejob.hooks.tasks.present import calling


class Uncopyable:
    """A transaction."""

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError("a transaction cannot be copied")


def test_what_a_chord_calls_finds_its_transaction(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(inspect.signature(_chord.apply_async).parameters)[:3] == ["self", "args", "kwargs"]
    before = inspect.unwrap(_chord.apply_async)
    monkeypatch.setattr(_chord, "apply_async", before)
    app_methods.lend_transactions(calling)
    app_methods.lend_transactions(calling)
    assert inspect.unwrap(_chord.apply_async, stop=lambda function: function is before) is before
    app.sidejob = object()
    lent: list[tuple[str, Any]] = []

    def send(name: str, *args: Any, **options: Any) -> Any:
        assert "transaction" not in options
        found: dict[str, Any] = {}
        if present.is_lending():
            with present.handed_over(found):
                assert not present.is_lending()
        lent.append((name, found.get("transaction")))
        return app.AsyncResult(str(len(lent)))

    monkeypatch.setattr(app, "send_task", send)
    part, body = (app.signature(f"contract.{name}") for name in ("part", "body"))
    transaction = Uncopyable()

    chord([part, part], body, app=app).apply_async(transaction=transaction)
    (group(part, part, app=app) | body).apply_async(transaction=transaction)
    chord([chord([part], body), part], body).apply_async(transaction=transaction)  # an app is at its body alone
    chord([part, part], body, app=app).apply_async()

    assert lent == [("contract.part", transaction)] * 6 + [("contract.part", None)] * 2
