"""`transport`: what the broker at `sidejob://` holds; these commands need no store."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from ..transport.release import Released, release
from .command import Failed, as_json
from .output import Output, printable


@click.group()
def transport() -> None:
    """Look after the Redis transport sidejob://."""


@transport.command("release")
@click.option("--force", is_flag=True, help="Also what live workers hold: they run it twice. Stop them first instead.")
@as_json
@click.pass_obj
def release_command(celery: Any, force: bool, as_json: bool) -> None:
    """Give all that workers of sidejob:// hold back to the queues, for workers of redis://.

    Stop those workers first: what a worker that is stopped as usual holds goes back by itself, and what a killed one
    held is given back by this. Ends with 1 while there are live ones. The app's broker_url may be redis:// again.
    """
    output = Output(coloured=not celery.no_color)
    with celery.app.connection_for_write() as connection:
        if connection.transport.driver_type != "redis":
            raise Failed(f"The broker is {connection.as_uri()}, not Redis: there is nothing to release.")
        try:
            released = release(connection.default_channel, force=force)
        except connection.connection_errors as error:
            raise Failed(f"{connection.as_uri()} does not answer: {error}") from error
    if as_json:
        output.json(asdict(released))
    else:
        output.show(Text(_told(released)))
    sys.exit(1 if released.alive else 0)


def _told(released: Released) -> str:
    lines = [f"Given back: {released.messages} messages of {released.consumers} workers."]
    if released.alive:
        names = ", ".join(map(printable, released.alive))
        lines.append(f"{len(released.alive)} are alive and keep what they hold: {names}. Stop them, and do this again.")
    if released.dead:
        lines.append(f"{released.dead} messages stay in the dead list.")
    return "\n".join(lines)
