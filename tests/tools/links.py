"""Walks along the links and forms of a site, as a person may who clicks on everything."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

LINK = re.compile(r'(?:href|src|action|data-live)="([^"#]+)"')
FORM = re.compile(r'<form(?=[^>]*method="post")[^>]*action="([^"]+)"[^>]*>(.*?)</form>', re.DOTALL)
FIELD = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)"')


class Found(NamedTuple):
    """An answer."""

    status: int
    location: str | None
    text: str


Ask = Callable[[str, str, Mapping[str, str]], Found]
"""Sends a method, a path and the fields of a form."""


def walk(ask: Ask, prefix: str) -> tuple[set[str], list[str]]:
    """Follow all links, then send each kind of form; every link and redirect must stay below `prefix`.

    Of links that differ only in what they ask a page for, one is followed. Returns the paths that were read, and the
    places to which forms have led.
    """
    seen: dict[str, str] = {}
    forms: dict[str, dict[str, str]] = {}
    to_do = [f"{prefix}/"]
    while to_do:
        path = to_do.pop()
        shape = re.sub(r"=[^&]*", "", path)
        if shape in seen:
            continue
        seen[shape] = path
        found = ask("HEAD" if "/live/" in path else "GET", path, {})
        assert found.status < 400 or (found.status == 404 and path.endswith("/find")), (path, found)
        links = {html.unescape(link) for link in LINK.findall(found.text)}
        links |= {found.location} if found.location else set()
        assert all(link.startswith(f"{prefix}/") for link in links), (path, links)
        for action, inside in FORM.findall(found.text):
            forms[html.unescape(action)] = dict(FIELD.findall(inside))
        to_do += sorted(links - forms.keys()) if "/static/" not in path else ()
    kinds = {
        re.sub(r"\d+", "", action): (action, fields) for action, fields in forms.items() if "/logout" not in action
    }
    return set(seen.values()), [_sent(ask, prefix, action, fields) for action, fields in kinds.values()]


def unread(paths: Iterable[str], read: Collection[str], prefix: str) -> list[str]:
    """The paths, with names in braces for their parts, of which none was read below `prefix`."""
    patterns = {path: re.compile(re.escape(prefix) + re.sub(r"{[^}]*}", "[^/?]+", path) + r"(\?.*)?") for path in paths}
    return [path for path, pattern in patterns.items() if not any(map(pattern.fullmatch, read))]


def _sent(ask: Ask, prefix: str, action: str, fields: Mapping[str, str]) -> str:
    found = ask("POST", action, {**fields, "priority": "1", "tag": "a", "queue": "mail", "value": "7", "limit": "3"})
    assert found.status < 500, (action, found)
    assert found.location is None or found.location.startswith(f"{prefix}/"), (action, found)
    return found.location or ""
