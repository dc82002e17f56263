"""Tables that fit a narrow terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

from ..model.status import Status

UNBROKEN = frozenset({"Job", "Entry", "Task id", "Took"})
"""The columns whose values are never broken into lines."""
LEAST = {
    "Status": max(map(len, Status)) + 1,  # what a job waits for may go to the next line
    **dict.fromkeys(("Created", "Last run", "Died"), len("2026-11-28")),  # and so may the time of a day
}
"""The least widths of columns whose values are best broken at one place."""
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
