"""Text of others on its way to a terminal, a log or a page: nothing in it moves a cursor, hides or forges a line."""

from __future__ import annotations

import re

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
