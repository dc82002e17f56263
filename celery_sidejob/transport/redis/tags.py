"""Delivery tags: a tag names the consumer that has the message, and the message's token in that consumer's record."""

from __future__ import annotations

from collections.abc import Iterable


def tag_of(consumer: str, token: str) -> str:
    """Return the tag of a delivery."""
    return f"{consumer}#{token}"


def parted(delivery_tag: str) -> tuple[str, str]:
    """Split a delivery tag into its consumer and the token in the record; no consumer if the tag is not ours."""
    consumer, _, token = str(delivery_tag).rpartition("#")
    return consumer, token


def tokens_of(consumer: str, tags: Iterable[str]) -> set[str]:
    """Return the tokens of the delivery tags that belong to this consumer."""
    return {token for owner, token in map(parted, tags) if owner == consumer}
