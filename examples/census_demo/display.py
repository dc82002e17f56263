"""The demo's output: bars in a terminal, plain lines elsewhere, and the tables at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from census_demo.accidents import Loss

LINE_EVERY_S = 3.0


class Bars:
    """Progress bars; without a terminal, a line every few seconds. A context manager."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._totals = totals
        self._bars: dict[str, TaskID] = {}
        self._began_at = time.monotonic()
        self._line_at = self._began_at

    def __enter__(self) -> Self:
        for name, total in self._totals.items():
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, counts: Mapping[str, int]) -> None:
        """Show how far each bar is."""
        for name, count in counts.items():
            self._progress.update(self._bars[name], completed=count)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line_at >= LINE_EVERY_S:
            self._line_at = now
            shown = ", ".join(f"{name} {count:,} of {self._totals[name]:,}" for name, count in counts.items())
            self.say(shown)

    def say(self, text: str) -> None:
        """Write a line above the bars, with the time since they began."""
        at = f"{time.monotonic() - self._began_at:6.1f} s"
        if not self._console.is_terminal:
            self._console.print(f"{at}  {text}", soft_wrap=True)
            return
        line = Table.grid(padding=(0, 2, 0, 0))  # so that a second line begins below the first one's text
        line.add_row(at, text)
        self._console.print(line)


def write(console: Console, text: str, style: str | None = None) -> None:
    """Write a sentence, wrapped between words; without a terminal, on one line."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)


def results_table(by_jobs: Mapping[str, int], plainly: Mapping[str, int]) -> Table:
    """Return the totals of both counts, side by side."""
    table = Table("counted", title="The census", title_justify="left")
    table.add_column("by jobs", justify="right")
    table.add_column("by one plain loop", justify="right")
    for what in ("files", "lines", "functions", "classes", "imports", "unparsable"):
        ours, theirs = by_jobs.get(what, 0), plainly.get(what, 0)
        style = "" if ours == theirs else "red"
        table.add_row(what, f"{ours:,}", f"{theirs:,}", style=style)
    return table


def recovery_table(losses: Sequence[Loss]) -> Table:
    """Return the table of losses, with the seconds until the lost runs were queued again, and ran."""
    table = Table(
        title="Recovery: seconds until what was lost was queued again, and ran",
        title_justify="left",
        caption="What is queued again waits behind what was queued before it.",
        caption_justify="left",
    )
    for heading in ("what happened", "lost"):
        table.add_column(heading, no_wrap=True)
    for heading in ("all queued", "first ran", "last ran"):
        table.add_column(heading, justify="right")
    for loss in losses:
        moments = [_shown(max, loss.announced), _shown(min, loss.back), _shown(max, loss.back)]
        table.add_row(loss.what, loss.extent, *moments)
    return table


def _shown(which: Callable[[Iterable[float]], float], seconds: Mapping[int, float]) -> str:
    return f"{which(seconds.values()):.1f}" if seconds else "-"
