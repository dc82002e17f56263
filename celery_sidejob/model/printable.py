"""Text as people read it: numbers with nouns, and foreign text, made unable to move a cursor or hide a line."""

from __future__ import annotations

import re
from collections.abc import Iterable

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Default-ignorable characters: they have no width or look like a blank, though Python calls them printable."""
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""Blanks other than a space, which Python does not call printable."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with an escape, such as ``\x1b``, instead of each invisible character.

    Invisible are control characters, line breaks, characters without a width, characters that change the direction of
    writing, and lone surrogates; the characters in `keep` stay.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(one if one in keep or is_visible(one) else one.encode("unicode_escape").decode() for one in text)


def is_visible(character: str) -> bool:
    """Tell whether a character is visible, if only as a blank."""
    if not character.isprintable():
        return _BLANKS.match(character) is not None
    return not _INVISIBLE.match(character)


def one_line(message: str) -> str:
    """Return a message as one line."""
    return printable(" ".join(message.split()))


class Shown:
    """A value for use in a format: its texts become printable, in any format."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def counted(count: int, one: str, many: str) -> str:
    """Return a number with the right form of its noun or verb."""
    return f"{count:,} {one if count == 1 else many}"


def first_of(texts: Iterable[str], *, most: int = 5, separator: str = ", ") -> str:
    """Return the first texts, and the number of further ones."""
    every = list(texts)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(every[:most]) + more
