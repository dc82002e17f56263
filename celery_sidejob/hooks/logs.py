"""Log records with their job, one line of JSON for programs, and logs without secrets or forged lines."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from celery import signals

from ..model.printable import Shown, printable
from ..unit.open_unit import active
from .tasks.durable_task import DurableTask


class RunFilter(logging.Filter):
    """Gives every record `job_id` and `run_no` of the run in progress; None outside of runs.

    In a run it gives `task_id` too. Celery's own handlers in workers have it; put it on the handlers you configure
    yourself. Values from ``extra=`` stay as they are. Foreign text in the records of Celery, kombu and this package is
    escaped.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Complete the record, and let it pass."""
        unit = active()
        given = record.__dict__
        if unit is not None and given.get("job_id", unit.hold.job_id) == unit.hold.job_id:
            given.setdefault("job_id", unit.hold.job_id)
            given.setdefault("run_no", unit.hold.run_no)
            given.setdefault("task_id", unit.hold.row.task_id)
        else:
            given.setdefault("job_id", None)
            given.setdefault("run_no", None)
        return escape(record)


class JSONFormatter(logging.Formatter):
    """Makes of each record one JSON object on one line: time, level, logger, message, and the facts about its job."""

    FACTS = ("job_id", "run_no", "task_id", "task_name", "task", "before", "after")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        document: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {
            fact: value for fact in self.FACTS if (value := record.__dict__.get(fact)) is not None and value != "???"
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            document["exception"] = record.exc_text
        return json.dumps({fact: _plain(value) for fact, value in document.items()}, default=str, ensure_ascii=False)


class Redaction(logging.Filter):
    """Applies `sidejob_redact` to the errors, tracebacks and arguments that Celery and we log of our tasks."""

    SHOWN = ("exc", "traceback", "args", "kwargs")

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record if it is about a task of ours, and let it pass."""
        context = record.args if isinstance(record.args, Mapping) else None
        name = context.get("name") if context is not None else None
        for settings in _redacting(name, record.name):
            if isinstance(context, dict):  # the same dict is the record's `data`, for other formatters
                context.update({key: settings.redacted(context[key]) for key in self.SHOWN if context.get(key)})
            if record.exc_info and not record.exc_text:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            if record.exc_text:
                record.exc_text = str(settings.redacted(record.exc_text))
            record.exc_info = None  # a handler that formats it anew would show everything
        return True


FAMILIES = ("celery.app.", "celery.concurrency.", "celery.worker.", "celery_sidejob", "kombu.")
"""The loggers whose records contain text of messages, which any program may have sent. Other loggers' records stay."""


def escape(record: logging.LogRecord) -> bool:
    """Escape control characters and forged lines in a record of Celery, kombu or this package; a filter."""
    if record.name.startswith(FAMILIES):
        message = record.getMessage()
        if printable(message) != message:
            record.msg, record.args = printable(_with_escapes(record, message), keep="\n\t"), ()
        raised = record.exc_text or (record.exc_info and logging.Formatter().formatException(record.exc_info)) or ""
        if (shown := printable(raised, keep="\n\t")) != raised:
            record.exc_text = shown
    return True


def _with_escapes(record: logging.LogRecord, message: str) -> str:
    """Return a record's message with only its own author's line breaks."""
    given = record.args
    try:
        if isinstance(given, Mapping):
            return str(record.msg) % {key: _shown(value) for key, value in given.items()}
        return str(record.msg) % tuple(map(_shown, given)) if given else message
    except Exception:  # the format needs more than a text
        return message


def _shown(value: object) -> object:
    return value if isinstance(value, int | float) else Shown(value)


def _plain(value: Any) -> Any:
    return printable(value, keep="\n\t") if isinstance(value, str) else value


REDACTED = ("celery.app.trace", "celery_sidejob")
"""The loggers whose records may show the arguments or the error of a task of ours."""

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def install(sidejob: Any) -> None:
    """Add their job to records of workers, and redact log records; reads no configuration."""
    _known.add(sidejob)
    for name in REDACTED:
        logger = logging.getLogger(name)
        if not any(isinstance(known, Redaction) for known in logger.filters):
            logger.addFilter(Redaction())
            logger.addFilter(escape)
    uid = "celery_sidejob.logs"
    signals.after_setup_logger.connect(_complete_handlers, weak=False, dispatch_uid=f"{uid}.logger")
    signals.after_setup_task_logger.connect(_complete_handlers, weak=False, dispatch_uid=f"{uid}.task_logger")


def _complete_handlers(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        if not any(isinstance(known, RunFilter) for known in handler.filters):
            handler.addFilter(RunFilter())


def _redacting(task: object, logger: str) -> Iterator[Any]:
    """Yield the settings of apps with something to hide, if the record may be about one of their tasks.

    Settings that were not read before are not read for this: then this package has done nothing yet.
    """
    for sidejob in list(_known):
        runtime = sidejob._runtime
        if runtime is None or runtime.settings.redact is None:
            continue
        known = sidejob.app.tasks.get(task)
        if logger == "celery_sidejob" or getattr(known, "sidejob", False) or isinstance(known, DurableTask):
            yield runtime.settings
