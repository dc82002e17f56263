"""Unique keys: no two open jobs of a store have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from .checks import check_label, shown
from .errors import InvalidValueError

FOLLOWERS = ("link", "link_error", "chain", "chord")
"""Options whose signatures follow a call."""
WAITED_FOR = (*FOLLOWERS, "group_id")
"""Options by which other calls follow a call, or wait for its task id."""
COMPOSED = ("chain", "group", "chord")
"""Signatures that contain others."""

OnDuplicate = Literal["return", "refuse", "replace"]


@dataclass(frozen=True, slots=True)
class Unique:
    """The unique key of a new job, and what happens if an open job already has it."""

    key: str
    on_duplicate: OnDuplicate = "return"

    @classmethod
    def take(cls, options: dict[str, Any]) -> Unique | None:
        """Take `unique` and `on_duplicate` out of the options of a call, and check them; None if no key is given.

        A call with followers is refused: they would be lost if an open job or task were used instead. A follower can
        have no key itself: a worker calls it, and no caller would learn that an open job has the key.
        """
        for name in FOLLOWERS:
            if (given := options.get(name)) and (keyed := next(_with_keys(given), None)) is not None:
                raise InvalidValueError(
                    f"unique= of {keyed.get('task')} cannot be part of {name}=: a worker calls what follows another "
                    "call, and nobody would be told that an open one has the key. Call it in a task's body instead."
                )
        unique, on_duplicate = options.pop("unique", None), options.pop("on_duplicate", None)
        if on_duplicate is not None and on_duplicate not in get_args(OnDuplicate):
            raise InvalidValueError(
                f"on_duplicate= is one of {', '.join(map(repr, get_args(OnDuplicate)))}, not {shown(on_duplicate)}."
            )
        if unique is None:
            if on_duplicate is not None:
                raise InvalidValueError("on_duplicate= says what happens to a second job of a key: give unique=, too.")
            return None
        made = cls(check_label("unique", unique), cast(OnDuplicate, on_duplicate or "return"))
        lost = next((name for name in WAITED_FOR if options.get(name)), None)
        if lost is not None and made.on_duplicate == "return":
            raise InvalidValueError(
                f"unique= beside {lost}= needs on_duplicate='refuse' or 'replace': if the open one were used instead, "
                "what follows the call would be lost."
            )
        return made


def _with_keys(signatures: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the signatures that have a unique key, from one or several signatures, their followers and their parts."""
    for one in signatures if isinstance(signatures, list | tuple) else [signatures]:
        if not isinstance(one, Mapping):
            continue
        options = one.get("options") or {}
        if options.get("unique") is not None:
            yield one
        for name in FOLLOWERS:
            yield from _with_keys(options.get(name))
        if one.get("subtask_type") in COMPOSED:
            for name in ("tasks", "header", "body"):
                yield from _with_keys((one.get("kwargs") or {}).get(name))
