"""Prints results: tables and texts for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from threading import Timer
from typing import Any, Literal

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ..jobs.job import Job
from ..model.printable import cut, plain
from ..model.printable import duration as duration  # the commands import it from here
from ..model.printable import lasting as lasting
from ..model.printable import one_line as one_line
from ..model.printable import printable as printable
from ..model.status import Status

STYLES: dict[str, str] = {
    Status.QUEUED: "cyan",
    Status.RUNNING: "bold blue",
    Status.SUSPENDED: "yellow",
    Status.COMPLETED: "green",
    Status.FAILED: "bold red",
    Status.TERMINATING: "magenta",
    Status.TERMINATED: "bright_black",
}
LONGEST_VALUE = 200
"""The most characters of a value in a table; `--json` shows all of them."""
LONGEST_ERROR = 60
"""The most characters of an error in a list; `--json` shows all of them."""
PROGRESS_AFTER_S = 0.3
"""Shorter work shows no progress."""


class Output:
    """Prints to the standard output of a command."""

    def __init__(self, *, coloured: bool, for_program: bool = False) -> None:
        self._coloured = coloured
        self.for_program = for_program

    def answer(self, document: Any, *parts: RenderableType | None) -> None:
        """Print the document for a program (--json), or the parts for a person.

        In the document times are ISO 8601, and values that JSON lacks are texts. A part that is a `str` is one line.
        """
        if self.for_program:
            click.echo(json.dumps(document, default=plain, indent=2))  # escapes terminal controls too
        else:
            self.show(*(part for part in parts if part is not None))

    def answer_with_list(
        self, documents: Iterable[Any], columns: Sequence[str], rows: Iterable[Iterable[Any]], *, more: str | None
    ) -> None:
        """Print documents for a program, or a table for a person, with a note on how to see more.

        Reads only one of the two, so both may be generators.
        """
        if self.for_program:
            self.answer([*documents])
            return
        self.show(table(*columns, rows=rows))
        if more is not None:
            self.note(more)

    def show(self, *parts: RenderableType) -> None:
        """Print texts, tables and trees with a blank line between them; to a file or a pipe in their full width."""
        parts = tuple(line(part) if isinstance(part, str) else part for part in parts)
        colours: Literal["auto"] | None = "auto" if self._coloured else None
        console = _Terminal(file=sys.stdout, color_system=colours, markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = max(
                [80, *(console.measure(part, options=console.options.update(width=10_000)).maximum for part in parts)]
            )
        for place, part in enumerate(parts):
            if place:
                console.print()
            console.print(part, soft_wrap=isinstance(part, Text))

    def note(self, message: str) -> None:
        """Print a message that is not part of the result."""
        click.echo(one_line(message), err=True)

    @contextmanager
    def progress(self, doing: str) -> Iterator[Callable[[int], None]]:
        """While the block runs, show on a terminal the work in progress and its duration; show a program nothing.

        Gives a callable that adds to the number of items done.
        """
        if self.for_program or not sys.stderr.isatty():
            yield lambda _: None
            return
        # Imported here because every `celery` command imports this file.
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr, color_system="auto" if self._coloured else None)
        columns = SpinnerColumn(), TextColumn("{task.description} {task.fields[done]}"), TimeElapsedColumn()
        shown = Progress(*columns, console=console, transient=True)
        task = shown.add_task(f"{printable(doing)} …", total=None, done="")
        count = 0

        def add(number: int) -> None:
            nonlocal count
            count += number
            shown.update(task, done=f"{count:,}")

        begin = Timer(PROGRESS_AFTER_S, shown.start)
        begin.start()
        try:
            yield add
        finally:
            begin.cancel()
            begin.join()
            shown.stop()


class _Terminal(Console):
    """Every text of a command passes here on its way to the terminal, and loses its control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Adds to rich's: only rich itself moves the cursor, or breaks a line."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))


def table(*columns: str, title: str | None = None, rows: Iterable[Iterable[Any]] = ()) -> Table:
    """Return a table; `text` renders cells that are not texts."""
    made = FittingTable(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
    )
    for column in made.columns:
        column.overflow = "fold"
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in row))
    return made


def table_if_any(*columns: str, title: str | None = None, rows: Sequence[Iterable[Any]]) -> Table | None:
    """Return a table, or None if it would have no rows."""
    return table(*columns, title=title, rows=rows) if rows else None


def facts(rows: Mapping[str, Any]) -> Table:
    """Return a list of names and values without a frame; rows without a value are left out."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bright_black", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None and value != "":
            made.add_row(name, value if isinstance(value, Text) else text(value))
    return made


def text(value: Any) -> Text:
    """Return a value for a cell, on one line and harmless: a time by `moment`, other values as JSON."""
    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(moment(value))
    return line(value if isinstance(value, str) else shortened(value))


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """Return a text on one line; a part may have a style, as ("Job 7", "bold")."""
    return Text.assemble(*(part if isinstance(part, Text) else _harmless(part) for part in parts))


def _harmless(part: str | tuple[str, str]) -> str | tuple[str, str]:
    return printable(part) if isinstance(part, str) else (printable(part[0]), part[1])


def at_least(count: int, more: bool) -> str:
    """Return a number, with a mark if it is only a lower bound."""
    return f"{count:,}+" if more else str(count)


def moment(at: datetime) -> str:
    """Return a time as people read it, in the time zone of their machine."""
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def paused(at: datetime | None, reason: str | None) -> str:
    """Return since when a queue or a schedule is paused, and why; nothing if it is not."""
    return "" if at is None else f"paused {moment(at)}{f': {reason}' if reason else ''}"


def status(name: str) -> Text:
    """Return a status in its colour."""
    return Text(name, style=STYLES.get(name, ""))


def job_or_task(one: Any) -> str:
    """Return the name of a job, or of the result of a durable task."""
    return f"{'job' if isinstance(one, Job) else 'task'} {one.id}"


def shortened(value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    return cut(printable(json.dumps(value, default=plain, ensure_ascii=False)), LONGEST_VALUE)


def in_short(error: str) -> str:
    """Return an error for a list, on one line and cut where it is long."""
    return cut(printable(error), LONGEST_ERROR)


UNBROKEN = frozenset({"Job", "Entry", "Task id", "Took"})
"""The columns whose values are never broken into lines."""
LEAST = {
    "Status": max(map(len, Status)) + 1,  # the reason for waiting may go to the next line
    **dict.fromkeys(("Created", "Last run", "Died"), len("2026-11-28")),  # and so may the time of day
}
"""The least widths of columns whose values are best broken between two words."""
NARROWEST = 6
"""The least width of any other column."""


class FittingTable(Table):
    """A table whose widest columns get further lines where the terminal is too narrow; rich would cut columns off.

    Its cells are texts.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Set the widths of the columns, and render the table."""
        excess = Measurement.get(console, options.update(width=10_000), self).maximum - options.max_width
        widths = [_width(column) for column in self.columns]
        least = [_least(column) for column in self.columns]
        while excess > 0 and widths != least:
            widest = max(range(len(widths)), key=lambda place: widths[place] - least[place])
            widths[widest] -= 1
            self.columns[widest].width = widths[widest]
            excess -= 1
        yield from super().__rich_console__(console, options)


def _width(column: Column) -> int:
    """Return the width of the longest line in a column."""
    cells = (column.header, *column.cells)
    return max(cell_len(line) for cell in cells for line in (str(cell) or " ").splitlines())


def _least(column: Column) -> int:
    name = str(column.header)
    return _width(column) if name in UNBROKEN else min(_width(column), LEAST.get(name, NARROWEST))
