"""Masks the passwords in settings that are shown, by `inspect conf` and `stats`, or in a bug report.

Celery masks a setting by its name: the name `sidejob_direct_url` does not suggest a password, and of several URLs
Celery masks only the first. Here a value is masked by its contents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from celery.app.utils import HIDDEN_SETTINGS
from kombu.utils.encoding import safe_repr

from ..model.settings import SETTINGS
from ..model.store_url import are_clear_for_broker

MASK = "********"

_USER = re.compile(r"(?<=://)(?:(?![;,\s][\w+.-]*://)[^\n])*@")
"""From a URL's scheme to the last @ before the next URL: an unescaped password may contain anything."""
_MASKED = re.compile(r"[^:@/]*:\*+@")
"""A user and a password after Celery's masking."""
_PARAMETER = re.compile(r"(?i)([\w-]*(?:pass|pwd|secret|token|api_?key|credential)[\w-]*\s*=\s*)('[^']*'|[^&;,\s]+)")
_SECRET = tuple(setting.key for setting in SETTINGS if setting.kind.secret)
_BROKERS = ("broker_url", "broker_read_url", "broker_write_url")
_PLAIN = (bool, int, float, datetime, timedelta, type(None))


def masked(value: Any, key: Any = None) -> Any:
    """Return a setting's value in a form that may be shown."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(key, str) and (key.lower().endswith(_SECRET) or HIDDEN_SETTINGS.search(key)):
        return MASK
    if isinstance(value, str) and str(key).lower().endswith(_BROKERS) and not are_clear_for_broker(value):
        return MASK
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, bytes):
        return masked_text(value.decode(errors="replace"))
    if isinstance(value, Mapping):
        return {masked(name): masked(one, name) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(one) for one in value]
    shown = safe_repr(value)
    return value if masked_text(shown) == shown else masked_text(shown)


def masked_text(text: str) -> str:
    """Return a text without the users and passwords of its URLs; parts masked by Celery stay as they are."""
    return _PARAMETER.sub(rf"\1{MASK}", _USER.sub(_masked_user, text))


def _masked_user(found: re.Match[str]) -> str:
    return found.group() if _MASKED.fullmatch(found.group()) else f"{MASK}@"
