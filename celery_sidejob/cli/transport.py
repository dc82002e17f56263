"""`transport`: the messages that `sidejob://` keeps in the broker; these commands need no store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

import click
from rich.text import Text

from ..transport.dead import DeadList, DeadMessage
from ..transport.release import Released, release
from .command import Failed, as_json, limit_option, nothing_matches, queue_option, with_app
from .output import Output, printable, table


@click.group()
def transport() -> None:
    """Manage the Redis transport sidejob://."""


@transport.command("release")
@click.option("--force", is_flag=True, help="Also messages of live workers; they then run twice.")
@as_json
@click.pass_obj
def release_command(celery: Any, force: bool, as_json: bool) -> None:
    """Give back to the queues all messages that workers of sidejob:// hold, for workers of redis://.

    Stop those workers first: what a worker that is stopped as usual holds goes back by itself, and what a killed one
    held is given back by this. Ends with 1 while there are live ones. The app's broker_url may be redis:// again.
    """
    output = Output(coloured=not celery.no_color)
    with _channel(celery) as channel:
        released = release(channel, force=force)
    if as_json:
        output.json(asdict(released))
    else:
        output.show(Text(_told(released)))
    sys.exit(1 if released.alive else 0)


@transport.group("dead")
def dead_list() -> None:
    """List messages that were given up, and retry or delete them.

    These are of ordinary tasks: such a message came back after it had begun, as often as delivery_limit says, or it is
    no message. That of a durable task is in the dead set: see `celery -A app sidejob dead`.
    """


@dead_list.command("list")
@queue_option
@limit_option
@as_json
@click.pass_obj
def list_dead(celery: Any, queue: str | None, limit: int, as_json: bool) -> None:
    """List messages, oldest first; with --queue it reads the list until enough match."""
    output = Output(coloured=not celery.no_color, for_program=as_json)
    with _channel(celery) as channel, output.progress("Reading the dead list"):
        chosen = (one for one in DeadList.of(channel) if queue in (None, one.queue))
        found = list(islice(chosen, limit + 1))
    more, found = len(found) > limit, found[:limit]
    if as_json:
        output.json([_document(one) for one in found])
        return
    rows = [(one.id, one.at, one.queue, one.headers.get("task"), one.task_id, one.reason) for one in found]
    output.show(table("Id", "Died", "Queue", "Task", "Task id", "Reason", rows=rows))
    if more:
        output.note("There are more: --limit.")


names = click.argument("names", metavar="[ID_OR_TASK_ID]...", nargs=-1)
everything = click.option("--all", "everything", is_flag=True, help="All messages.")


@dead_list.command("retry")
@names
@everything
@queue_option
@as_json
@click.pass_obj
def retry_dead(celery: Any, names: tuple[str, ...], everything: bool, queue: str | None, as_json: bool) -> None:
    """Put messages back at the end of their queues: by id, by queue, or all."""

    def retry(dead: DeadList, one: DeadMessage) -> bool:
        try:
            return dead.deliver_again(one)
        except ValueError as error:
            if names:
                raise Failed(f"{error}. It can only be deleted.") from error
            return False

    _decide(celery, names, everything, queue, as_json, "retried", retry)


@dead_list.command("delete")
@names
@everything
@queue_option
@as_json
@click.pass_obj
def delete_dead(celery: Any, names: tuple[str, ...], everything: bool, queue: str | None, as_json: bool) -> None:
    """Remove messages for good: by id, by queue, or all."""
    _decide(celery, names, everything, queue, as_json, "deleted", lambda dead, one: dead.delete(one.text))


def _decide(
    celery: Any, names: tuple[str, ...], everything: bool, queue: str | None, as_json: bool, what: str,
    do: Callable[[DeadList, DeadMessage], bool],
) -> None:  # fmt: skip
    if [bool(names), everything, queue is not None].count(True) != 1:
        raise Failed("Name messages by ID or task id, or choose by --queue, or all with --all.", code=2)
    output = Output(coloured=not celery.no_color, for_program=as_json)
    count = 0
    with _channel(celery) as channel, output.progress(f"Messages {what}") as add:
        dead = DeadList.of(channel)
        found = list(dead)
        chosen = [
            one for one in found
            if everything or one.queue == queue or one.id in names or (one.task_id is not None and one.task_id in names)
        ]  # fmt: skip
        unknown = set(names) - {one.id for one in chosen} - {one.task_id for one in chosen}
        if unknown:
            raise Failed(f"The dead list has no message {', '.join(sorted(unknown))}: it was retried or deleted.")
        for one in chosen:
            if do(dead, one):
                count += 1
                add(1)
    if queue is not None and not chosen:
        output.note(nothing_matches("the dead list", sorted({one.queue for one in found})))
    if as_json:
        output.json({what: count})
    else:
        output.show(Text(f"{count} {'message' if count == 1 else 'messages'} {what}."))


def _document(dead: DeadMessage) -> dict[str, Any]:
    return {
        "id": dead.id, "died_at": dead.at, "queue": dead.queue, "task": dead.headers.get("task"),
        "task_id": dead.task_id, "reason": dead.reason, "message": dead.message,
    }  # fmt: skip


@contextmanager
def _channel(celery: Any) -> Iterator[Any]:
    """Open a channel to the app's broker, which must be a Redis, with either transport."""
    with celery.app.connection_for_write() as connection:
        if connection.transport.driver_type != "redis":
            raise Failed(f"The broker is {connection.as_uri()}, not Redis: sidejob:// holds nothing there.")
        try:
            yield connection.default_channel
        except connection.connection_errors as error:
            raise Failed(f"{connection.as_uri()} does not answer: {error}") from error


def _told(released: Released) -> str:
    lines = [f"Messages given back: {released.messages}. Workers that held them: {released.consumers}."]
    if released.alive:
        names = ", ".join(map(printable, released.alive))
        lines.append(
            f"{len(released.alive)} are alive and keep their messages: {names}. Stop them and run this again; one that "
            "was killed counts as alive for a few seconds more (consumer_timeout)."
        )
    if released.dead:
        lines.append(f"{released.dead} messages stay in the dead list: `celery -A <app> sidejob transport dead list`.")
    return with_app("\n".join(lines))
