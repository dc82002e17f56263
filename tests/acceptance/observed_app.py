"""An app that is watched: its log, its events, its traces, its reports to Sentry."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.utils.log import get_task_logger

from celery_sidejob import JSONFormatter, RunningJob, SideJob, job_status_changed
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

SECRET = "hunter2"


def redact(value: Any) -> Any:
    """Hide the secret wherever it is."""
    return json.loads(json.dumps(value).replace(SECRET, "[hidden]"))


app = Celery("observed", set_as_current=False)
if "BROKER_URL" in os.environ:
    app.conf.update(Broker.from_env().configuration)
app.conf.update(
    task_default_queue="observed",
    task_send_sent_event=True,
    worker_log_format="LOG job=%(job_id)s run=%(run_no)s %(name)s %(message)s",
    worker_task_log_format="TASK job=%(job_id)s run=%(run_no)s id=%(task_id)s %(message)s",
    worker_redirect_stdouts=False,
)
if os.environ.get("REDACT"):
    app.conf.sidejob_redact = redact
sidejob = SideJob(app)
logger = get_task_logger(__name__)
library = logging.getLogger("a.library")


@signals.after_setup_logger.connect
def _events_as_json(**_: Any) -> None:
    """What the documentation tells users to do."""
    path = os.environ.get("EVENTS_LOG")
    if path:
        handler = logging.FileHandler(path)
        handler.setFormatter(JSONFormatter())
        logging.getLogger("celery_sidejob.events").addHandler(handler)


@sidejob.task(name="observed.work")
def work(job: RunningJob, *given: Any) -> str:
    """Say where we are, by a task's logger and by a library's."""
    logger.info("working")
    library.warning("deep below")
    return "done"


@sidejob.task(name="observed.fail")
def fail(job: RunningJob, secret: str) -> None:
    """Fail with what it was given in the error."""
    raise ValueError(f"no entry with {secret}")


@sidejob.task(name="observed.again", max_retries=3)
def again(job: RunningJob, secret: str = "") -> str:
    """Be retried once."""
    if job.run_no == 1:
        raise job.retry(ValueError(f"not yet with {secret}"), countdown=0)
    return "done"


@sidejob.task(name="observed.rest")
def rest(job: RunningJob) -> None:
    """Be suspended in the first run."""
    if job.run_no == 1:
        job.suspend()


@rest.on_shutdown
def leave(job: RunningJob) -> None:
    """Fail to shut down, with the secret in the error."""
    raise RuntimeError(f"cannot leave {SECRET}")


@sidejob.task(name="observed.hold")
def hold(job: RunningJob) -> None:
    """Wait to be let go."""
    record = Record.from_env()
    record.note("holding", job=job.id)
    record.wait_for("go", job=job.id, timeout=60)


@sidejob.task(name="observed.trace")
def trace(job: RunningJob, parent: bool = False) -> None:
    """Note in which trace it runs, and make a child in the same."""
    from opentelemetry import trace as otel

    context = otel.get_current_span().get_span_context()
    Record.from_env().note("span", job=job.id, trace=f"{context.trace_id:032x}", span=f"{context.span_id:016x}")

    def look() -> None:
        span: Any = otel.get_current_span()
        Record.from_env().note("step", job=job.id, name=span.name, parent=f"{span.parent.span_id:016x}")

    job.step("look", look)
    if parent:
        job.enqueue(trace, child_name="child")


def _note_moves(job_id: int, before: str | None, after: str, **_: Any) -> None:
    Record.from_env().note("moved", job=job_id, before=before, after=after)


if os.environ.get("NOTE_MOVES"):
    job_status_changed.connect(_note_moves, weak=False)


def _note_report(event: Any, hint: Any) -> None:
    values = event.get("exception", {}).get("values", [])
    Record.from_env().note("reported", type=values[-1]["type"] if values else None, message=str(event.get("message")))


if os.environ.get("SENTRY"):
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Notes(Transport):
        """Writes down what would go to Sentry."""

        def capture_envelope(self, envelope: Any) -> None:
            for item in envelope.items:
                if item.type == "event":
                    _note_report(item.payload.json, None)

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1", transport=Notes, integrations=[CeleryIntegration()], traces_sample_rate=1.0,
        default_integrations=True, debug=False,
    )  # fmt: skip

if os.environ.get("OTEL"):
    from opentelemetry import trace as _otel
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    @signals.worker_process_init.connect(weak=False)
    def _instrument(**_: Any) -> None:
        """As its documentation says for a forking worker."""
        _otel.set_tracer_provider(TracerProvider())
        CeleryInstrumentor().instrument()


def logs(directory: Path) -> str:
    """All that the processes of a test have logged."""
    return "\n".join(path.read_text() for path in sorted(directory.glob("*.log")))
