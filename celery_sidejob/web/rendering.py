"""From templates to pages: texts of others are escaped, and harmless as on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..jobs.job import Job
from ..model.printable import cut, duration, is_visible, lasting, plain, printable
from .words import REASONS, STATUSES, WORDS

LONGEST_VALUE = 20_000
"""The most characters of a value on a page; the command `show --json` shows all of them."""


def environment() -> Environment:
    """Return the environment of all templates."""
    made = Environment(
        loader=PackageLoader("celery_sidejob.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        ago=ago, at=at, moment=moment, duration=duration, lasting=lasting, number=number, value=value, path=path,
        query=query, exact=exact, line=line, short=cut, tail=tail, percent=percent,
    )  # fmt: skip
    made.tests["job"] = lambda one: isinstance(one, Job)
    made.globals.update(words=WORDS, statuses=STATUSES, reasons=REASONS)
    return made


def ago(moment: datetime | None) -> Markup:
    """Return how long ago a moment was, or how far ahead it is; the moment itself is shown on hover."""
    if moment is None:
        return Markup("")
    away_s = (datetime.now(UTC) - moment).total_seconds()
    shown = f"{duration(away_s)} ago" if away_s >= 1 else f"in {duration(-away_s)}" if away_s <= -1 else "now"
    return _time(moment, shown, "ago")


def at(moment: datetime | None) -> Markup:
    """Return a moment, in UTC where no script shows it in the reader's time zone."""
    return Markup("") if moment is None else _time(moment, f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}")


def moment(given: datetime, unit: str) -> Markup:
    """Return the beginning of a chart: a day, or the time of a day."""
    if unit == "day":
        return Markup("{}").format(given.date())
    return _time(given, f"{given.astimezone(UTC):%H:%M} UTC", "clock")


def number(count: float | None, estimated: bool = False) -> str:
    """Return a number with separators, and a mark if it is an estimate."""
    return "" if count is None else f"{'~' if estimated else ''}{count:,}"


def percent(part: float, whole: float) -> float:
    """Return a share in per cent, at most 100."""
    return round(min(100.0, 100 * part / whole), 2) if whole else 0.0


def value(given: Any) -> str:
    """Return a value as indented JSON, cut where it is very long."""
    return cut(json.dumps(given, default=plain, ensure_ascii=False, indent=2), LONGEST_VALUE)


def line(given: Any) -> str:
    """Return a value as JSON in one line, cut where it is long."""
    return cut(json.dumps(given, default=plain, ensure_ascii=False), 300)


def tail(text: Any, most: int) -> str:
    """Return a dotted name, cut from its beginning where it is long."""
    shown = str(text)
    return shown if len(shown) <= most else f"…{shown[1 - most :]}"


def path(part: Any) -> str:
    """Return a name as one part of a path."""
    return quote(str(part), safe="")


def exact(given: Any) -> Markup:
    """Return what a form sends back as it is: its invisible characters are references in the page, not escapes.

    HTML takes references to C1 controls for other characters: those controls stay.
    """
    shown = "" if given is None else str(escape(given))
    return Markup("".join(one if is_visible(one) or "\x80" <= one <= "\x9f" else f"&#{ord(one)};" for one in shown))


def query(given: Mapping[str, Any], **changed: Any) -> str:
    """Return the query of a URL; parameters without a value are left out."""
    kept = {name: value for name, value in {**given, **changed}.items() if value not in (None, "", (), [])}
    return f"?{urlencode(kept, doseq=True)}" if kept else "?"


def _time(moment: datetime, shown: str, kind: str = "at") -> Markup:
    whole = moment.astimezone(UTC)
    return Markup('<time class="{}" datetime="{}" title="{}">{}</time>').format(
        kind, whole.isoformat(), f"{whole:%Y-%m-%d %H:%M:%S} UTC", shown
    )


def _harmless(shown: Any) -> Any:
    """Replace invisible characters of every text that a template shows; what is Markup was escaped before."""
    if shown is None:
        return ""
    return shown if isinstance(shown, Markup) else escape(printable(str(shown), keep="\n\t"))
