"""What is read of a kept message, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_sidejob.model.durable import headers_of, key_of, why_no_header


@pytest.mark.parametrize("headers", [{"id": "one", "sidejob": {"n": 1}}, {}])
def test_the_headers_of_a_kept_message_are_shown(headers: Any) -> None:
    assert headers_of(json.dumps({"about": json.dumps({"headers": headers})})) == headers


@pytest.mark.parametrize(
    "publication",
    [
        "",
        "no JSON",
        "null",
        "[]",
        "{}",
        json.dumps({"about": None}),
        json.dumps({"about": "no JSON"}),
        json.dumps({"about": "[]"}),
        json.dumps({"about": "{}"}),
        *(
            json.dumps({"about": json.dumps({"headers": headers})})
            for headers in (None, [], [["id", 1]], "id", 1, True)
        ),
    ],
)
def test_what_this_version_cannot_read_has_no_headers(publication: str) -> None:
    assert headers_of(publication) == {}


def test_a_header_is_checked_also_where_it_equals_the_usual_one() -> None:
    assert (why_no_header({"v": 1, "n": 1}), key_of("one", {"v": 1, "n": 1})) == (None, ("one", 1))
    for header in ({"v": True, "n": 1}, {"v": 1, "n": True}, {"v": 1, "n": 1.0}):
        assert why_no_header(header), header
        assert key_of("one", header) is None
