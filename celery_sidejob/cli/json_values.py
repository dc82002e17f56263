"""JSON values, as people give them to a command."""

from __future__ import annotations

import json
from typing import Any

import click

FORMS = {list: "a JSON list, such as '[1, \"a\"]'", dict: "a JSON object, such as '{\"page\": 7}'"}
"""How arguments look."""
MOST_SHOWN = 100
"""Characters of a text that an error shows."""


class JsonValue(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A JSON value; of one `kind`, if that is given: list or dict."""

    name = "json"

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]] | None = None) -> None:
        self._kind = kind

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        """Return the value that a JSON text stands for."""
        if not isinstance(value, str):
            return value  # a default
        try:
            found = parsed(value)
        except ValueError as error:
            self.fail(str(error), param, context)
        if self._kind is not None and not isinstance(found, self._kind):
            self.fail(f"{value!r} is not {FORMS[self._kind]}.", param, context)
        return found


def parsed(text: str) -> Any:
    """Return the value that a JSON text stands for; ValueError says what is wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        given = repr(text) if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]!r}…"
        quoted, hint = json.dumps(text), ""
        if text.isidentifier() and len(text) <= MOST_SHOWN:
            # A shell removes the outer quotes: who typed "a" has given a.
            hint = f" A text has double quotes: {quoted}. In a shell, type '{quoted}'."
        raise ValueError(f"{given} is no JSON value: {error}.{hint}") from error
