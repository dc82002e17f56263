"""Only what is plainly the first delivery of a message is warned of where its row is missing."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob.hooks.tasks.durable_run import is_first

FIRST: dict[str, Any] = {
    "sidejob_durable": {"v": 1, "n": 1}, "retries": 0, "eta": None, "properties": {"priority": 0},
    "delivery_info": {"redelivered": False},
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"sidejob_durable": {"v": 1, "n": 1, "s": "3fa9c2d1"}}, {"properties": None}])
def test_what_is_first(more: dict[str, Any]) -> None:
    assert is_first({**FIRST, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"sidejob_durable": None},
        {"sidejob_durable": {"v": 1, "n": 2}},
        {"sidejob_durable": {"v": 1, "n": 1, "c": "1", "u": True}},
        {"sidejob_durable": {"v": 1, "n": 1, "new": 1}},
        {"retries": 1},
        {"eta": "2026-11-22T12:00:00+00:00"},
        {"sidejob_republished": True},
        {"redelivered": True},
        {"x-delivery-count": 1},
        {"properties": {"delivery_count": 1}},
        {"delivery_info": {"redelivered": True}},
    ],
)  # fmt: skip
def test_what_is_not(more: dict[str, Any]) -> None:
    assert not is_first({**FIRST, **more})
