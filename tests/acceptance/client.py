"""A client that asks one thing after the other and notes which calls have returned; it is killed on its way.

    python -m tests.acceptance.client

An answer that is lost is an exception of the call: what was asked may or may not have been done, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_sidejob import SideJob, StoreUnavailableError
from tests.tools.brokers import Broker
from tests.tools.recorder import Record


def main() -> None:
    """Make a job with packets, ask it to run, have it terminated."""
    record = Record.from_env()
    app = Celery("acceptance")
    app.conf.update(Broker.from_env().configuration)
    app.conf.update(task_default_queue="acceptance")
    sidejob = SideJob(app)

    def call(name: str, ask: Callable[[], Any]) -> Any:
        record.note("asked", call=name)
        try:
            answer = ask()
        except StoreUnavailableError:
            record.note("unknown", call=name)
            return sidejob.find("client")
        record.note("returned", call=name)
        return answer

    job = call("enqueue", lambda: sidejob.enqueue("acceptance.adder", aliases=["client"]))
    if job is None:  # the answer was lost before anything was done
        job = call("enqueue again", lambda: sidejob.enqueue("acceptance.adder", aliases=["client"]))
    call("write a", lambda: job.input("a").write(1))
    call("write b", lambda: job.input("b").write(2))
    call("run", job.run)
    call("terminate", job.terminate)
    record.note("done")


if __name__ == "__main__":
    main()
