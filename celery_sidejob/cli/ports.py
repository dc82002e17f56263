"""`write`, `peek` and `take`: packets of a job's port."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from ..inspection.jobs import JobViews
from ..jobs.job import Job
from ..jobs.port import Port
from ..model.printable import counted
from .command import Failed, commands, job_named, load_modules
from .options import AtLeast, job_argument, parsed
from .output import Output, shortened

port_argument = click.argument("name", metavar="PORT")
output_option = click.option(
    "--output", "is_output", is_flag=True, help="The output port of this name, instead of the input port."
)
COLUMNS = ("Written", "Value", "Context")


@commands.command(context_settings={"ignore_unknown_options": True})  # -5 is a value
@job_argument
@port_argument
@click.argument("given", metavar="VALUE...", nargs=-1, required=True)
@output_option
def write(sidejob: Any, output: Output, job_id: str, name: str, given: Sequence[str], is_output: bool) -> None:
    """Write values to a job's port: all of them, in order, or none. The job is asked to run, as by `port.write`.

    Each VALUE is JSON: 5, '"a text"', '{"page": 7}'. A single - reads them from the standard input, one in a line.
    """
    values = list(_values(_standard_input() if list(given) == ["-"] else None, given))
    load_modules(sidejob)
    port = _port(job_named(sidejob, job_id), name, is_output)
    port.write_many(values)
    number = counted(len(values), "value", "values")
    said = f"Wrote {number} to {port.direction}put port {port.name} of job {port.job.id}."
    document = {"job": port.job.id, "port": port.name, "direction": port.direction, "written": len(values)}
    output.answer(document, said)


@commands.command()
@job_argument
@port_argument
@output_option
@click.option("--limit", type=AtLeast(1), default=25, show_default=True, help="Show at most this many packets.")
def peek(sidejob: Any, output: Output, job_id: str, name: str, is_output: bool, limit: int) -> None:
    """Show the next packets of a job's port, the oldest first. They stay on the port."""
    port = _port(job_named(sidejob, job_id), name, is_output)
    found = JobViews(sidejob.runtime).packets(port, limit)
    rows = (
        (one["written_at"], shortened(one["value"]), shortened(one["context"]) if one["context"] else None)
        for one in found
    )
    output.answer_with_list(found, COLUMNS, rows, more="There may be more: --limit." if len(found) == limit else None)


@commands.command()
@job_argument
@port_argument
@output_option
@click.option("--limit", type=AtLeast(1), default=1, show_default=True, help="Take at most this many packets.")
def take(sidejob: Any, output: Output, job_id: str, name: str, is_output: bool, limit: int) -> None:
    """Take packets from a job's port, the oldest first, and print their values: they are gone from the port.

    Each value is printed whole, as JSON in a line of its own; `write` reads such lines.
    """
    load_modules(sidejob)
    values = _port(job_named(sidejob, job_id), name, is_output).read_many(limit)
    output.answer(values, *(json.dumps(value, default=str) for value in values))
    if not values:
        output.note("The port is empty.")


def _port(job: Job, name: str, is_output: bool) -> Port:
    if not is_output and name not in _names(job.inports) and name in _names(job.outports):
        raise Failed(f"Job {job.id} has no input port {name!r}, but an output port of this name: add --output.")
    return job.output(name) if is_output else job.input(name)


def _names(ports: Iterable[Port]) -> set[str]:
    return {port.name for port in ports}


def _standard_input() -> Iterator[str]:
    """Yield the lines of the standard input; a usage error if it is closed, or is no text."""
    if sys.stdin is None:
        raise click.UsageError("The standard input is closed.")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The standard input is no text: {error}.") from error


def _values(lines: Iterable[str] | None, given: Sequence[str]) -> Iterator[Any]:
    """Read each value; a usage error names an invalid value by its position."""
    where = "VALUE" if lines is None else "line"
    for number, text in enumerate(given if lines is None else lines, 1):
        if lines is not None and not text.strip():
            continue
        try:
            yield parsed(text.strip())
        except ValueError as error:
            raise click.UsageError(f"{where} {number}: {error}") from error
