"""Tests with the marker `first` come before the others, whose order stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.tools.first import pytest_collection_modifyitems


@dataclass
class Item:
    name: str

    def get_closest_marker(self, name: str) -> object | None:
        return True if name == "first" and self.name.startswith("first") else None


def test_they_come_before_all_others() -> None:
    items: list[Any] = [Item(name) for name in ("b", "first b", "a", "first a", "c")]
    pytest_collection_modifyitems(items)
    assert [item.name for item in items] == ["first b", "first a", "b", "a", "c"]
