"""Text as people read it: numbers with nouns, and text of others, in which nothing moves a cursor or hides a line."""

from __future__ import annotations

import re
from collections.abc import Iterable

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters without a width, or that look like a blank, though Python calls them printable: default-ignorable ones."""
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""Other blanks than a space, which Python does not call printable."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with an escape, such as ``\x1b``, in the place of each character that does not show itself.

    These are control characters, line breaks, characters without a width, those that turn the direction of writing,
    and lone surrogates; `keep` has those that stay.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(
        one if one in keep or is_visible(one) else one.encode("unicode_escape").decode() for one in text
    )  # fmt: skip


def is_visible(character: str) -> bool:
    """Tell whether a character shows itself, if only as a blank."""
    if not character.isprintable():
        return _BLANKS.match(character) is not None
    return not _INVISIBLE.match(character)


def one_line(message: str) -> str:
    """Return a message as one line."""
    return printable(" ".join(message.split()))


class Shown:
    """A value that may stand in a format: its texts are printable, however it is formatted."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def counted(count: int, one: str, many: str) -> str:
    """Return a number with its noun, or its verb."""
    return f"{count:,} {one if count == 1 else many}"


def first_of(texts: Iterable[str], *, most: int = 5, separator: str = ", ") -> str:
    """Return the first texts, and how many more there are."""
    every = list(texts)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(every[:most]) + more
