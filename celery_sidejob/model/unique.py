"""Keys that hold while a job is open: no two open jobs of a store have the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from .checks import check_label, shown
from .errors import InvalidValueError

FOLLOWERS = ("link", "link_error", "chain", "chord", "group_id")
"""Options by which something follows a call, or waits for its task id."""

OnDuplicate = Literal["return", "refuse", "replace"]


@dataclass(frozen=True, slots=True)
class Unique:
    """The key that a new job is to have, and what happens if an open job has it."""

    key: str
    on_duplicate: OnDuplicate = "return"

    @classmethod
    def take(cls, options: dict[str, Any]) -> Unique | None:
        """Take `unique` and `on_duplicate` out of the options of a call, and check them; None if no key is given.

        What follows the call, or waits for its task id, would be lost if an open job or task were used instead.
        """
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
        lost = next((name for name in FOLLOWERS if options.get(name)), None)
        if lost is not None and made.on_duplicate == "return":
            raise InvalidValueError(
                f"unique= beside {lost}= needs on_duplicate='refuse' or 'replace': if the open one were used instead, "
                "what follows the call would be lost."
            )
        return made
