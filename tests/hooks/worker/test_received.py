"""A message that a worker has received is refused for what Celery would take in another way than anybody could mean."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import InvalidTaskError

from celery_sidejob.hooks.worker.received import check_request


def check(**options: Any) -> None:
    check_request({"id": "one"}, ([], {}, options), "sidejob", lambda value: None)


@pytest.mark.parametrize("name", ["callbacks", "errbacks", "chain"])
def test_calls_that_are_no_list_are_refused(name: str) -> None:
    """A text of 70,000 letters became as many messages."""
    for calls in ("x" * 70_000, b"x", {"task": "one", "args": []}):
        with pytest.raises(InvalidTaskError, match=f"{name} is no list"):
            check(**{name: calls})
    for calls in (None, [], [{"task": "one"}], ({"task": "one"},)):
        check(**{name: calls})
