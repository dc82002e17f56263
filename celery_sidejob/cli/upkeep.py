"""`poll`, `doctor` and `drain`: sweep once, find problems, wait until nothing is due. `db`: the schema in the store."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..examination import examine
from ..inspection.queues import QueueViews
from ..model.errors import SideJobError, StoreUnavailableError
from ..model.finding import Finding, Level
from ..model.printable import counted
from ..services.sweep.sweeper import COUNTS
from ..store import meta
from ..store.schema import schema_check
from ..store.schema.tables import write_grants
from .command import Failed, commands, load_modules, looks, unknown_name, with_app
from .options import SECONDS
from .output import Output, moment, printable, table, table_if_any


@commands.command()
def poll(sidejob: Any, output: Output) -> None:
    """Sweep once: publish what is due or missing, apply timers, rescue lost runs. Workers do this by themselves."""
    load_modules(sidejob)
    report = asdict(sidejob.poll())
    rows = [
        (COUNTS[what].meaning.rstrip("."), "yes" if found is True else found) for what, found in report.items() if found
    ]
    output.answer(report, table_if_any("", "", rows=rows) or "All is well: nothing was due, missing or lost.")


COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
CODES = {Level.OK: 0, Level.WARNING: 1, Level.ERROR: 2}


@commands.command()
@click.option("--thorough", is_flag=True, help="Also check every job for contradicting rows; reads all jobs.")
def doctor(sidejob: Any, output: Output, thorough: bool) -> None:
    """Find problems: schema, rights, queues, workers, broker, vacuum, clocks.

    Ends with 0 if all is well, 1 if there are warnings, 2 if there are errors. Takes up to half a second where there
    are millions of rows; with --thorough it reads all jobs, a million in some seconds.
    """
    load_modules(sidejob)
    with output.progress("Looking at every job" if thorough else "Looking"):
        found = list(examine(sidejob, thorough=thorough))
    found = [replace(one, found=with_app(one.found), remedy=with_app(one.remedy)) for one in found]
    worst = max((finding.level for finding in found), key=CODES.__getitem__)
    documents = [{key: value or None for key, value in asdict(finding).items()} for finding in found]
    output.answer({"level": worst, "findings": documents}, *_shown(found))
    sys.exit(CODES[worst])


def _shown(found: Sequence[Finding]) -> list[RenderableType]:
    rows = [(finding.check, Text(str(finding.level), COLOURS[finding.level]), finding.found) for finding in found]
    shown: list[RenderableType] = [table("Check", "", "Found", rows=rows)]
    for level in (Level.ERROR, Level.WARNING):
        for finding in found:
            if finding.level == level:
                head = (f"{level}: {finding.check}. ", COLOURS[level])
                rest = "\n  ".join(map(printable, (finding.found, finding.meaning, f"→ {finding.remedy}")))
                shown.append(Text.assemble(head, rest))
    count = Counter(finding.level for finding in found)
    if count[Level.OK] == len(found):
        shown.append(Text("All is well.", COLOURS[Level.OK]))
    else:
        shown.append(Text(f"Errors: {count[Level.ERROR]}. Warnings: {count[Level.WARNING]}."))
    return shown


RESTING = {
    "suspended": ("suspended job", "suspended jobs"),
    "timers": ("timer", "timers"),
    "results": ("result not sent yet", "results not sent yet"),
}


@commands.command()
@click.option("--queue", metavar="NAME", help="Wait for this queue only.")
@click.option(
    "--horizon",
    metavar="DURATION",
    type=SECONDS,
    help="Wait for runs that are due within this time; by default sidejob_timer_horizon. Later runs are only counted.",
)
@click.option("--timeout", metavar="DURATION", type=SECONDS, help="Wait no longer than this.")
def drain(sidejob: Any, output: Output, queue: str | None, timeout: float | None, horizon: float | None) -> None:
    """Wait until no run is due or in progress. Leave workers running, and have clients make no new calls.

    Suspended jobs, timers and later runs (their eta or retry is beyond the horizon) are counted and left as they are.
    Ends with 0 when it is done, with 1 when the time is up, with 2 if nobody knows the queue.
    """
    views = QueueViews(sidejob.runtime)
    if queue is not None and (said := unknown_name(sidejob, output, "queue", queue)):
        raise Failed(said, code=2)  # "nothing is left" would be misread as "all is done"
    horizon_s = sidejob.settings.timer_horizon if horizon is None else horizon
    left = _wait(partial(views.pending, queue, horizon_s=horizon_s), output, timeout)
    done = not left["queues"]
    output.answer({"done": done, **left}, _done(left) if done else f"The time is up. {_undone(left)}")
    sys.exit(0 if done else 1)


def _wait(pending: Callable[[], dict[str, Any]], output: Output, timeout: float | None) -> dict[str, Any]:
    """Wait until no work remains or the time is up, report each change, and return the remaining work."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    said = ""
    for left in looks(pending, output, deadline=deadline):
        if not left["queues"] or time.monotonic() >= deadline:
            break
        if (now := _undone(left)) != said:
            output.note(said := now)
    return left


def _undone(left: dict[str, Any]) -> str:
    queues = [
        f"{name} ({counts['queued']} queued, {counts['running']} running)" for name, counts in left["queues"].items()
    ]
    said = f"Not finished: {', '.join(queues)}."
    if left["unserved"]:
        said += f" No live worker serves {', '.join(left['unserved'])}: start one."
    return said


def _done(left: dict[str, Any]) -> str:
    rest = [counted(left[what], one, many) for what, (one, many) in RESTING.items() if left[what]]
    if left["parked"]:
        parked = counted(left["parked"], "parked run", "parked runs")
        rest.insert(0, f"{parked} (no worker of the queue knows the task)")
    if left["later"]:
        later = counted(left["later"], "run for later", "runs for later")
        rest.insert(0, f"{later} (the first at {moment(left['later_from'])})")
    return f"No run is due or in progress. Left: {', '.join(rest) or 'nothing'}."


# -- the schema --------------------------------------------------------------------------------------------------------


@commands.group()
def db() -> None:
    """Create, migrate and check the schema in the store."""


@db.command(has_json=False)
@click.option("--sql", is_flag=True, help="Print the SQL instead, for psql; opens no connection.")
@click.option(
    "--from", "since", metavar="REVISION", help="With --sql: upgrade from this revision, not from an empty schema."
)
def upgrade(sidejob: Any, output: Output, sql: bool, since: str | None) -> None:
    """Create the schema or upgrade it, and record its app and broker."""
    # Imported here because it needs Alembic and SQLAlchemy, and every `celery` command imports this file.
    from ..store.schema import migrate

    schema = sidejob.settings.schema
    if sql:
        migrate.upgrade_sql(schema, sys.stdout, owner=sidejob.owner, since=since)
        return
    if since is not None:
        raise click.UsageError("--from needs --sql: an upgrade finds its first revision by itself.")
    for store, url, setting in _to_change(sidejob, output):
        before = schema_check.current(url, schema, setting=setting)
        after = migrate.upgrade(url, schema, owner=sidejob.owner, setting=setting)
        if before == after:
            output.show(f"{_schema(store)} is up to date: revision {after}.")
        else:
            was = f"it was at {before}" if before else "it is new"
            output.show(f"{_schema(store)} is now at revision {after}; {was}.")


@db.command()
def current(sidejob: Any, output: Output) -> None:
    """Show the schema's revision, and the revision that this version needs; also for failover stores."""
    stores = _stores(sidejob)
    ways = [store.direct_url() for store in stores]
    found_at = [schema_check.current(url, sidejob.settings.schema, setting=setting) for url, setting in ways]
    found = {"schema": sidejob.settings.schema, "revision": found_at[0], "head": meta.REVISION}
    lines = [
        f"{_schema(store)} {'does not exist' if revision is None else f'is at revision {revision}'}; "
        f"this version works on revision {meta.REVISION}."
        for store, revision in zip(stores, found_at, strict=True)
    ]
    output.answer({**found, "failover": found_at[1:]} if found_at[1:] else found, Text("\n".join(lines)))


AWAY, BEHIND = 3, 4


@db.command()
def check(sidejob: Any, output: Output) -> None:
    """Check in each store that the schema exists, fits this version, and belongs to this app and broker.

    It also checks that the user has all rights that workers need. Ends with 0 if workers can start; 3 if the store
    cannot be reached, so that it is worth trying again; 4 if `db upgrade` is needed; 1 if a person must look.
    """
    schema = sidejob.settings.schema
    document = {"schema": schema, "ok": True, "error": None}
    fits: list[str] = []
    for store in _stores(sidejob):
        try:
            sidejob.check_store(store)
        except SideJobError as error:
            output.answer({**document, "ok": False, "error": str(error)}, Text("\n".join(fits)) if fits else None)
            raise Failed(f"{store.where}: {error}" if store.place else error, code=_code(error)) from error
        fits.append(f"{_schema(store)} fits.")
    output.answer(document, Text("\n".join(fits)))


@db.command(has_json=False)
@click.argument("role")
def grants(sidejob: Any, output: Output, role: str) -> None:
    """Print the GRANTs that ROLE needs for workers and clients; run them as the schema's owner. Opens no connection."""
    if printable(role) != role:
        raise Failed(f"{role!a} has characters that a terminal does not show; give the role a name without them.")
    write_grants(sidejob.settings.schema, role, sys.stdout)


@db.command(has_json=False)
@click.option("--beside", is_flag=True, help="Let workers of this broker run beside those of the recorded one.")
def reassign(sidejob: Any, output: Output, beside: bool) -> None:
    """Record this app and this broker as the schema's owner, after the app or the broker has moved.

    Stop the workers first. Messages that wait are published again.

    With --beside the recorded broker stays, its workers may run, and workers of this broker may run beside them. When
    you have stopped the workers of one broker, run the command without --beside, with the broker that stays.
    """
    from ..store.schema import migrate

    owner = sidejob.owner
    ours = f"the app {owner['app']!r} and the broker {owner['broker']!r}"
    for store, url, setting in _to_change(sidejob, output):
        if beside:
            recorded = migrate.admit(url, store.settings.schema, owner=owner, setting=setting)
            more = f", and workers of {owner['broker']!r} may run beside its own" if recorded != owner["broker"] else ""
            output.show(f"{_schema(store)} belongs to the broker {recorded!r}{more}.")
            continue
        before = migrate.reassign(url, store.settings.schema, owner=owner, setting=setting)
        theirs = f"; before: the app {before.get('app')!r} and the broker {before.get('broker')!r}"
        output.show(f"{_schema(store)} belongs to {ours}{theirs if before != owner else ''}.")


def _code(error: SideJobError) -> int:
    if isinstance(error, StoreUnavailableError):
        return AWAY
    return BEHIND if isinstance(error, schema_check.NotUpgraded) else 1


def _stores(sidejob: Any) -> list[Any]:
    """Return all stores, the primary first."""
    sidejob.settings.require_database_url()
    return list(sidejob.runtime.stores)


def _schema(store: Any) -> str:
    """Return the name of a store's schema, for messages."""
    named = f"Schema {store.settings.schema!r}"
    return f"{named} of store {store.place} of sidejob_failover_urls" if store.place else named


def _to_change(sidejob: Any, output: Output) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each store with the URL, and its setting, by which its schema is changed.

    Refuses the URL of another database than that of workers and clients.
    """
    for store in _stores(sidejob):
        settings = store.settings
        if settings.direct_url is not None:
            unknown = schema_check.check_urls(settings.require_database_url(), settings.direct_url)
            if unknown is not None:
                output.note(f"Could not check whether sidejob_database_url leads to the same database: {unknown}")
        yield store, *store.direct_url()
