"""`transport`: the messages that `sidejob://` and `sidejobpg://` keep in the broker; no command needs a store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ..hooks.broker.view import dead_list_of
from ..model.printable import counted
from ..transport.dead_list import DeadList, DeadMessage
from ..transport.postgres.topology import overview_of
from .command import AppCommand, Failed, commands, nothing_matches, with_app
from .options import check_one_way, limit_option, queue_option, together, yes_option
from .output import Output, printable, table_if_any
from .selection import confirm

if TYPE_CHECKING:
    from ..transport.redis.records import Released

COLUMNS = {"Id": "id", "Died": "died_at", "Queue": "queue", "Task": "task", "Task id": "task_id", "Reason": "reason"}
"""The columns of the list: the heading, and the attribute of a message."""
SCHEMES = {"redis": "sidejob://", "postgres": "sidejobpg://"}
"""Our transports, by the family of their brokers."""
chosen_messages = together(
    click.argument("names", metavar="[ID_OR_TASK_ID]...", nargs=-1),
    click.option("--all", "everything", is_flag=True, help="All messages."),
    queue_option,
)


@commands.group()
def transport() -> None:
    """Manage the transports sidejob:// and sidejobpg://."""


@transport.command("release", cls=AppCommand)
@click.option("--force", is_flag=True, help="Also messages of live workers; they then run twice.")
def release_command(app: Any, output: Output, force: bool) -> None:
    """Give back to the queues all messages that workers of sidejob:// hold, for workers of redis://.

    Stop those workers first: a worker that stops as usual gives its messages back by itself, and this command gives
    back those of killed workers. Ends with 1 while some are alive. The app's broker_url may be redis:// again.
    """
    from ..transport.redis.records import release  # here: every `celery` command imports this file

    with _channel(app, ["redis"]) as channel:
        released = release(channel, force=force)
    output.answer(asdict(released), *_told(released))
    sys.exit(1 if released.alive else 0)


@transport.command("queues", cls=AppCommand)
def queues_command(app: Any, output: Output) -> None:
    """Show how many messages each queue of sidejobpg:// has: ready, held by workers, and waiting for their time.

    About 10,000 messages are counted, and no further.
    """
    with _channel(app, ["postgres"]) as channel:
        found = overview_of(channel.link).queues
    rows = [(queue.name, queue.ready, queue.held, queue.later) for queue in found]
    shown = table_if_any("Queue", "Ready", "Held", "Later", rows=rows)
    output.answer([queue._asdict() for queue in found], shown or "No queue was declared.")


@transport.group("dead")
def dead_list() -> None:
    """List messages that were given up, and retry or delete them.

    They belong to ordinary tasks. A message is given up if it came back too often after it had begun (delivery_limit),
    or if its text is not a message. The message of a durable task is in the dead set: see `celery -A app sidejob dead`.
    """


@dead_list.command("list", cls=AppCommand)
@queue_option
@limit_option
def list_dead(app: Any, output: Output, queue: str | None, limit: int) -> None:
    """List messages, oldest first; with --queue it reads the list until enough match."""
    with _channel(app) as channel, output.progress("Reading the dead list"):
        seen: set[str] = set()
        chosen = (one for one in _noting(dead_list_of(channel), seen) if queue in (None, one.queue))
        found = list(islice(chosen, limit + 1))
    documents = [_document(one) for one in found[:limit]]
    rows = ([document[key] for key in COLUMNS.values()] for document in documents)
    output.answer_with_list(
        documents, list(COLUMNS), rows, more="There are more: --limit." if len(found) > limit else None
    )
    if queue is not None and not found:
        output.note(nothing_matches("the dead list", sorted(seen), queue))


@dead_list.command("retry", cls=AppCommand)
@chosen_messages
def retry_dead(app: Any, output: Output, /, **chosen: Any) -> None:
    """Put messages back at the end of their queues: by id, by queue, or all."""

    def retry(dead: DeadList, one: DeadMessage) -> bool:
        try:
            return dead.deliver_again(one)
        except ValueError as error:
            if chosen["names"]:
                raise Failed(f"{error}. It can only be deleted.") from error
            return False

    _decide(app, output, "retried", retry, **chosen, yes=True)  # it takes nothing away, so nobody is asked


@dead_list.command("delete", cls=AppCommand)
@chosen_messages
@yes_option
def delete_dead(app: Any, output: Output, /, **chosen: Any) -> None:
    """Remove messages for good, after a question: by id, by queue, or all."""
    _decide(app, output, "deleted", lambda dead, one: dead.delete(one.text), **chosen)


def _decide(
    app: Any,
    output: Output,
    what: str,
    do: Callable[[DeadList, DeadMessage], bool],
    *,
    yes: bool,
    names: tuple[str, ...],
    everything: bool,
    queue: str | None,
) -> None:
    """Act on each chosen message, and report their number; unless `yes`, ask first whether to delete them."""
    check_one_way(
        bool(names),
        everything,
        queue is not None,
        say="Name messages by their ids or task ids, or choose by --queue, or all with --all.",
    )
    count = 0
    with _channel(app) as channel:
        dead = dead_list_of(channel)
        found = list(dead)
        chosen = [one for one in found if everything or one.queue == queue or {one.id, one.task_id} & {*names}]
        unknown = set(names) - {one.id for one in chosen} - {one.task_id for one in chosen}
        if unknown:
            raise Failed(f"The dead list has no message {', '.join(sorted(unknown))}: it was retried or deleted.")
        if chosen:
            confirm(f"Delete {counted(len(chosen), 'message', 'messages')} of the dead list for good?", yes=yes)
        with output.progress(f"Messages {what}") as add:
            for one in chosen:
                if do(dead, one):
                    count += 1
                    add(1)
    if queue is not None and not chosen:
        output.note(nothing_matches("the dead list", sorted({one.queue for one in found}), queue))
    output.answer({what: count}, f"{counted(count, 'message', 'messages')} {what}.")


def _noting(dead: DeadList, queues: set[str]) -> Iterator[DeadMessage]:
    """Yield the messages, and note their queues."""
    for one in dead:
        queues.add(one.queue)
        yield one


def _document(dead: DeadMessage) -> dict[str, Any]:
    return {
        "id": dead.id,
        "died_at": dead.at,
        "queue": dead.queue,
        "task": dead.headers.get("task"),
        "task_id": dead.task_id,
        "reason": dead.reason,
        "message": dead.message,
    }


@contextmanager
def _channel(app: Any, families: Collection[str] = ("redis", "postgres")) -> Iterator[Any]:
    """Open a channel to the app's broker, which must be of one of these families; a Redis may be kombu's."""
    with app.connection_for_write() as connection:
        if connection.transport.driver_type not in families:
            ours = " or ".join(SCHEMES[family] for family in families)
            raise Failed(f"The broker is {connection.as_uri()}; this command is for {ours}.")
        try:
            yield connection.default_channel
        except connection.connection_errors as error:
            raise Failed(f"{connection.as_uri()} does not answer: {error}") from error


def _told(released: Released) -> list[str]:
    lines = [f"Messages given back: {released.messages}. Workers that held them: {released.consumers}."]
    if released.alive:
        names = ", ".join(map(printable, released.alive))
        lines.append(
            f"{counted(len(released.alive), 'is alive and keeps its', 'are alive and keep their')} messages: {names}. "
            "Stop what is alive and run this again; a worker that was killed counts as alive for a few seconds more "
            "(consumer_timeout)."
        )
    if released.dead:
        dead = counted(released.dead, "message stays", "messages stay")
        lines.append(f"{dead} in the dead list: `celery -A <app> sidejob transport dead list`.")
    return list(map(with_app, lines))
