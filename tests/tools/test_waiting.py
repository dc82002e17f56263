"""wait_until returns facts and explains their absence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.waiting import wait_until


def test_returns_the_first_truthy_value() -> None:
    values: Iterator[object] = iter([None, 0, [], "found", "later"])

    assert wait_until(lambda: next(values), interval=0) == "found"


def test_asks_at_least_once_even_without_time() -> None:
    assert wait_until(lambda: 7, timeout=0) == 7


def test_an_exception_is_not_yet() -> None:
    answers = iter([ValueError, KeyError, None])

    def asked() -> bool:
        error = next(answers)
        if error:
            raise error
        return True

    assert wait_until(asked, interval=0)


def test_timeout_says_what_was_waited_for_and_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEJOB_TEST_PATIENCE", "4")
    with pytest.raises(TimeoutError, match=r"not within 0.2 s: rows to appear \(last returned 0\)"):
        wait_until(lambda: 0, timeout=0.05, message="rows to appear")


def test_timeout_is_caused_by_the_last_exception() -> None:
    with pytest.raises(TimeoutError, match=r"last raised LookupError\('no such row'\)") as caught:
        wait_until(_raise_lookup_error, timeout=0.05)

    assert isinstance(caught.value.__cause__, LookupError)
    assert "_raise_lookup_error" in str(caught.value)


def _raise_lookup_error() -> bool:
    raise LookupError("no such row")
