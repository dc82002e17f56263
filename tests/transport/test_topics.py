"""Patterns of topic exchanges are compared as kombu compares them, and in a bounded time."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace

import pytest
from kombu.transport.virtual.exchange import TopicExchange

from celery_sidejob.transport.topics import matches

KOMBUS = TopicExchange(SimpleNamespace())


def test_patterns_match_what_kombus_match() -> None:
    keys = [".".join(words) for size in (1, 2, 3) for words in product(("a", "bc", "d-1", ""), repeat=size)]
    patterns = [".".join(words) for size in (1, 2, 3) for words in product(("a", "bc", "*", "#", ""), repeat=size)]
    for pattern in patterns:
        compiled = re.compile(KOMBUS.key_to_pattern(pattern))
        assert [key for key in keys if matches(pattern, key)] == [key for key in keys if compiled.match(key)], pattern


@pytest.mark.timeout(20)
def test_no_pattern_takes_long() -> None:
    assert not matches(".".join("#" * 100) + ".x", ".".join("a" * 250))
    assert matches("**", "**"), "kombu's expression for it is none"
