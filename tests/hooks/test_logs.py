"""Log records know their job, are one line of JSON where that is wanted, and show nothing that is to be hidden."""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from celery_sidejob import JSONFormatter, RunFilter, RunningJob
from celery_sidejob.hooks import logs
from tests.tools.in_process import Stage


class Kept(logging.Handler):
    """Keeps the records it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(RunFilter())
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def only_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own log lines are redacted by every app of the process, and those of other tests may still be there."""
    monkeypatch.setattr(logs, "_known", weakref.WeakSet())


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What is logged by anybody in this process."""
    handler = Kept()
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def facts(record: logging.LogRecord) -> tuple[Any, Any, Any]:
    return record.job_id, record.run_no, record.__dict__.get("task_id")  # type: ignore[attr-defined]


def test_records_carry_the_run_they_were_logged_in(stage: Stage, kept: Kept) -> None:
    def body(job: RunningJob) -> None:
        logging.getLogger("mine").info("inside")
        logging.getLogger("mine").info("given", extra={"job_id": 77, "task_id": "theirs"})

    job = stage.inside(body)
    logging.getLogger("mine").info("outside")

    inside, given, outside = (record for record in kept.records if record.name == "mine")
    assert facts(inside) == (job.id, 1, job.task_id)
    assert facts(given) == (77, None, "theirs"), "what a record was given stays, and is not mixed with ours"
    assert facts(outside) == (None, None, None)


def test_status_changes_are_events(stage: Stage, kept: Kept) -> None:
    def body(job: RunningJob) -> None:
        job.enqueue("stage.idle", child_name="kid")
        job.checkpoint()

    job = stage.inside(body)
    child = job.child("kid")
    assert child is not None

    events = [record for record in kept.records if record.name == "celery_sidejob.events"]
    assert [(*facts(record)[:2], record.before, record.after) for record in events] == [  # type: ignore[attr-defined]
        (job.id, None, None, "queued"),
        (job.id, 1, "queued", "running"),
        (child.id, None, None, "queued"),
        (job.id, 1, "running", "completed"),
    ]
    assert facts(events[1])[2] == facts(events[3])[2] == job.task_id
    assert events[0].getMessage() == f"Job {job.id} (stage.call): new -> queued"


def test_a_record_as_json() -> None:
    try:
        raise ValueError("no\nmoney")
    except ValueError:
        caught = sys.exc_info()
    record = logging.LogRecord("shop", logging.ERROR, __file__, 1, "paid %s", ("é",), caught)
    record.__dict__.update(job_id=7, run_no=2, task_id="???", before=None, after="failed", other=object())

    text = JSONFormatter().format(record)
    found = json.loads(text)

    assert "\n" not in text
    assert "Traceback" in found.pop("exception")
    assert found.pop("at").endswith("+00:00")
    assert found == {
        "level": "ERROR", "logger": "shop", "message": "paid é", "job_id": 7, "run_no": 2, "after": "failed",
    }  # fmt: skip


EVIL = "\x1b[2J\u202e\u200b\nWARNING forged"
ESCAPED = r"\x1b[2J\u202e\u200b\nWARNING forged"


@pytest.mark.parametrize("logger", ["celery_sidejob", "celery_sidejob.transport.redis.dead", "celery.worker.strategy"])
@pytest.mark.parametrize(
    ("message", "args", "shown"),
    [
        ("task %s:\n%r", (EVIL, ValueError(EVIL)), f"task {ESCAPED}:\nValueError('{ESCAPED}')"),
        ("task %(name)s, %(number)d times", ({"name": EVIL, "number": 7},), f"task {ESCAPED}, 7 times"),
        ("%.9s, %5.1f %s", (EVIL, 2.25, 1), r"\x1b[2J\u,   2.2 1"),
        (EVIL, (), ESCAPED.replace(r"\n", "\n")),
        ("%s done", ("é\u3000漢",), "é\u3000漢 done"),
    ],
)
def test_a_record_of_others_text_steers_no_terminal_and_forges_no_line(
    kept: Kept, logger: str, message: str, args: tuple[Any, ...], shown: str
) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger(logger).exception(message, *args)

    (record,) = kept.records
    assert record.getMessage() == shown
    text = logging.Formatter().format(record) + JSONFormatter().format(record)
    assert "Traceback" in text
    assert text.replace("\n", "").replace("\u3000", "").isprintable()


def test_a_record_of_the_users_own_is_left_alone(kept: Kept) -> None:
    logging.getLogger("shop").warning("\x1b[32mgreen\x1b[0m %s", "\n")
    assert kept.records[0].getMessage() == "\x1b[32mgreen\x1b[0m \n"


# -- redaction -------------------------------------------------------------------------------------------------------


def hide(value: Any) -> Any:
    return json.loads(json.dumps(value).replace("hunter2", "[hidden]"))


def fail(job: RunningJob) -> None:
    raise ValueError("hunter2")


@pytest.fixture
def discreet(database_url: str) -> Iterator[Stage]:
    """An app that hides a word."""
    stage = Stage(database_url, sidejob_redact=hide)
    yield stage
    stage.close()


def test_info_and_the_dead_set_are_redacted(discreet: Stage) -> None:
    job = discreet.job(fail, kwargs=None)
    with pytest.raises(ValueError, match="hunter2"):
        discreet.run(job)

    info = job.refresh().info
    assert (info["error"]["message"], info["error"]["type"]) == ("[hidden]", "ValueError")
    assert "hunter2" not in json.dumps(info, default=str)
    (entry,) = discreet.sidejob.dead
    assert entry.error == "ValueError: [hidden]"
    assert "[hidden]" in str(entry.traceback)
    assert "hunter2" not in str(entry.traceback)


def test_info_hides_arguments_and_attributes_do_not(discreet: Stage) -> None:
    @discreet.task(name="say")
    def say(job: RunningJob, *words: str, **named: str) -> None:
        pass

    job = say.enqueue(("hunter2",), {"a": "hunter2"})

    assert (job.info["args"], job.info["kwargs"]) == (["[hidden]"], {"a": "[hidden]"})
    assert (list(job.args), job.kwargs) == (["hunter2"], {"a": "hunter2"}), "the job's own code needs them"


def test_what_redact_cannot_hide_is_not_shown_and_breaks_nothing(database_url: str) -> None:
    def refuse(value: Any) -> Any:
        raise RuntimeError("hunter2")

    stage = Stage(database_url, sidejob_redact=refuse)
    job = stage.job(fail)
    with pytest.raises(ValueError, match="hunter2"):
        stage.run(job)

    (entry,) = stage.sidejob.dead
    nothing = "(not shown: sidejob_redact raised RuntimeError)"
    assert (entry.error, entry.traceback) == (nothing, nothing)
    assert job.refresh().info["error"]["message"] == nothing
    assert job.info["args"] == nothing
    assert stage.sidejob.dead.retry(entry.id) == job
    stage.close()


def test_tracebacks_in_our_own_log_are_redacted(discreet: Stage, kept: Kept) -> None:
    job = discreet.job(fail)
    logger = logging.getLogger("celery_sidejob")
    try:
        raise RuntimeError("hunter2")
    except RuntimeError:
        logger.exception("The shutdown of job %d raised", job.id)

    (record,) = [record for record in kept.records if record.name == "celery_sidejob" and record.levelname == "ERROR"]
    shown = logging.Formatter().format(record)
    assert "RuntimeError: [hidden]" in shown
    assert "hunter2" not in shown + JSONFormatter().format(record)
