"""The check of `broker_transport_options`, and the options that both transports have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kombu

from ..model.checks import MOST_S, SLIP, Form, is_number, is_seconds, nearest

DEFAULTS: Mapping[str, Any] = {
    "loop_timeout": 30.0,
    "delivery_limit": 20,
    "dead_list_limit": 10_000,
    "dead_list_days": 90,
}
"""The defaults of both transports for options that are not given."""

SHARED: Mapping[str, Form] = {
    "consumer_timeout": (f"a number of seconds above 0, {MOST_S}", lambda value: is_seconds(value) and value > 0),
    "loop_timeout": (
        f"a number of seconds above 0, {MOST_S}, or None",
        lambda value: value is None or (is_seconds(value) and value > 0),
    ),
    "delivery_limit": ("a whole number above 0, or None", lambda value: value is None or is_number(value, least=1)),
    "dead_list_limit": ("a whole number above 0, or None", lambda value: value is None or is_number(value, least=1)),
    "dead_list_days": (
        f"a number of days above 0, {MOST_S}, or None",
        lambda value: value is None or (is_seconds(value) and value > 0),
    ),
}
"""The options that both transports have, each with its values."""


def require_kombu(scheme: str) -> None:
    """Raise ImportError if kombu is too old for our transports."""
    if tuple(kombu.VERSION[:2]) < (5, 7):
        raise ImportError(f"{scheme}:// needs kombu 5.7 or newer; this is {kombu.__version__}")


def check_options(given: Mapping[str, Any], ours: Mapping[str, Form]) -> None:
    """Refuse an invalid value before a live consumer is declared dead because of it.

    Also refuses a name that nearly matches one of `ours`; other names belong to kombu or another transport.
    """
    for name in given.keys() - ours.keys():
        meant = nearest(name, ours, like=SLIP)  # `connect_timeout` and `consumer_timeout` have a similarity of 0.77
        if meant is not None:
            raise ValueError(f"{name} is not a transport option. Did you mean {meant}?")
    for name, (meaning, fits) in ours.items():
        if name in given and not fits(given[name]):
            raise ValueError(f"The transport option {name} is {meaning}, not {given[name]!r}.")
