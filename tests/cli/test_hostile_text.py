"""No command lets the text of others steer the terminal, where every column of text is hostile."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click
import psycopg
import pytest
from rich.text import Text

from celery_sidejob import RunningJob
from celery_sidejob.cli import sidejob as group
from celery_sidejob.cli.output import line
from celery_sidejob.store import registry
from tests.tools.commands import ask
from tests.tools.in_process import Stage
from tests.tools.versions import KOMBU_5_7

EVIL = "\x1b[2J\x9b31m\u202e\u200b\ufe0f\x7f\u2028\r\n\t"
"""What clears the screen, colours, turns the direction of writing, has no width, deletes, and breaks lines."""
HIDDEN = "\u034f\u115f\u1160\u3164\ufe0f"


def unshown(text: str, *, keep: str = "\n") -> set[str]:
    """The characters of a text that a terminal obeys, or that nobody sees."""
    return {
        one for one in text
        if one not in keep and (unicodedata.category(one)[0] == "C" or unicodedata.category(one) in ("Zl", "Zp")
                                or one in HIDDEN)
    }  # fmt: skip


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))
    else:
        yield path


@pytest.fixture
def hostile(database_url: str) -> Iterator[Stage]:
    """A stage whose store has a row of nearly every kind, with hostile text in each column that takes it."""
    stage = Stage(database_url, broker="sidejobpg://")
    sidejob = stage.sidejob

    def fail(job: RunningJob) -> None:
        job.set({"key" + EVIL: {EVIL: EVIL}})
        job.progress(1, 2, EVIL)
        job.log(EVIL, **{EVIL: EVIL})
        job.output("out").write(EVIL)
        raise ValueError(EVIL)

    parent = stage.job(fail, created_by=EVIL, tags=[EVIL], aliases=["alias" + EVIL], unique=EVIL, queue="maths" + EVIL)
    with pytest.raises(ValueError, match="2J"):
        stage.run(parent)
    child = stage.sidejob.enqueue(
        stage.call, (EVIL,), parent=parent, child_name=EVIL, depends_on=[parent], countdown=60
    )
    child.input("in").write(EVIL)
    child.input("in").channels = ["/channel" + EVIL]
    child.track()
    sidejob.schedule("daily" + EVIL, stage.idle, cron="0 4 * * *").pause(EVIL)
    sidejob.queue("maths" + EVIL).pause(EVIL)
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=[EVIL], tasks=[EVIL])
    stage.sql(
        """INSERT INTO dead (task_id, task, queue, reason, error, traceback, payload, body)
        VALUES ('t', 'mail', 'q', 'lost', %s, %s, '{"publication": "{\\"v\\": 2}", "generation": 1}', 'x')""",
        EVIL, EVIL,
    )  # fmt: skip
    stage.sql(
        """INSERT INTO broker_dead (queue, priority, reason, headers, properties, body)
        VALUES ('q', 0, %s, '{}', '{}', '')""",
        EVIL,
    )
    _spoil(stage)
    yield stage
    stage.close()


def _spoil(stage: Stage) -> None:
    """Add hostile text to every column of text, as far as the schema takes it."""
    columns = stage.sql(
        """SELECT table_name, column_name, data_type FROM information_schema.columns
        WHERE table_schema = current_schema() AND data_type IN ('text', 'ARRAY') AND is_generated = 'NEVER'
          AND table_name NOT IN ('meta', 'leases')
          AND column_name NOT IN ('cron', 'timezone', 'publication', 'headers', 'properties', 'body')"""
    )  # the others are formats, or the package's own words
    for table, column, kind in columns:
        for (place,) in stage.sql(f'SELECT ctid FROM "{table}" WHERE "{column}" IS NOT NULL'):
            more = f'"{column}" || %s' if kind == "text" else f'array_append("{column}", %s)'
            with suppress(psycopg.errors.IntegrityError, psycopg.errors.DataError):  # the schema has better ideas
                stage.sql(f'UPDATE "{table}" SET "{column}" = {more} WHERE ctid = %s', EVIL, place)


def test_a_line_breaks_nowhere_whatever_is_shown_in_it() -> None:
    assert not unshown(line(EVIL, (EVIL, "bold"), Text(" ")).plain, keep="")


@KOMBU_5_7
def test_no_command_shows_what_steers_the_terminal(hostile: Stage) -> None:
    ids = [str(job_id) for (job_id,) in hostile.sql("SELECT id FROM jobs ORDER BY id")]
    (entry,) = hostile.sql("SELECT id FROM dead WHERE job_id IS NULL")[0]
    ((schedule,),) = hostile.sql("SELECT name FROM schedules")
    ((queue,),) = hostile.sql("SELECT name FROM queues")
    ((message,),) = hostile.sql("SELECT id FROM broker_dead")
    ports = dict(hostile.sql("SELECT direction, name FROM ports"))
    words: dict[str, Sequence[Sequence[object]]] = {
        "show": [*([each, "--history"] for each in ids), [EVIL], ["t" + EVIL]],
        "tree": [[ids[0]]],
        "watch": [[ids[0]]],
        "enqueue": [["stage.idle", "--queue", EVIL, "--alias", "other" + EVIL]],
        "write": [[ids[1], ports["in"], '"x"']],
        "peek": [[ids[1], ports["in"]], [ids[0], ports["out"], "--output"]],
        "run": [[ids[0]], ["--task", EVIL]],
        "terminate": [[ids[1]], ["--queue", EVIL]],
        "delete": [[ids[0]], [EVIL]],
        "revoke": [[EVIL], ["--task", EVIL]],
        "pause": [[queue], [EVIL, "--reason", EVIL]],
        "resume": [[queue]],
        "unmanage": [[queue]],
        "schedules show": [[schedule], [EVIL]],
        "schedules pause": [[schedule]],
        "schedules resume": [[schedule]],
        "schedules run": [[schedule]],
        "schedules delete": [[schedule]],
        "tag": [[ids[0], "new" + EVIL]],
        "untag": [[ids[0], "new" + EVIL]],
        "track": [[ids[0]]],
        "untrack": [[ids[0]]],
        "stats": [[], ["--all"], ["--prometheus"], ["--day", "all"], ["--day", EVIL]],
        "doctor": [[], ["--thorough"]],
        "drain": [["--timeout", "0"]],
        "dead list": [[], ["--wide"], ["--task", EVIL]],
        "dead show": [[entry], [EVIL]],
        "dead retry": [[entry], [EVIL], ["--task", EVIL]],
        "dead delete": [[entry], [EVIL]],
        "dead purge": [["--older-than", "0"]],
        "db upgrade": [[], ["--sql"]],
        "db grants": [["ann"], [EVIL]],
        "transport dead retry": [[message], [EVIL]],
        "transport dead delete": [[message], [EVIL]],
    }
    known = {" ".join(path): path for path in commands(group)}
    assert words.keys() <= known.keys()
    last = "delete", "dead delete", "dead purge", "dead retry", "schedules delete", "transport dead delete", "poll"
    for name in sorted(known, key=lambda name: name in last):
        for given in words.get(name, [[]]):
            for as_json in (["--json"], []):
                said = ask(hostile.app, *known[name], *given, *as_json)
                shown = said.out + said.err
                assert not unshown(shown), (name, given, shown)
