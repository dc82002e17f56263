"""A real app and a real worker of Celery, in this process, over kombu's broker in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.platforms import EX_OK
from celery.worker import WorkController, state
from kombu.transport import memory


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app without SideJob: each test replaces what it is about."""
    made = Celery("contract", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.worker_cancel_long_running_tasks_on_connection_loss = True  # or Celery warns
    yield made
    made.close()
    memory.Transport.global_state.clear()
    memory.Channel.queues.clear()


class Worker(WorkController):
    """A worker with the pool solo, which runs in the thread of the test."""

    def run(self, *, after: float | None = 0.0) -> None:
        """Run the tasks that wait, and stop after so many seconds; or when the task `contract.stop` is sent."""

        def shut_down() -> None:
            state.should_stop = EX_OK  # an eta is awaited in another thread, where WorkerShutdown stops nothing

        stop = task_of(self.app, "stop", shut_down)
        if after is not None:
            stop.apply_async(countdown=after or None)
        self.start()


@pytest.fixture
def make_worker(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Make a worker that does not run yet."""
    before = _state._tls.current_app
    monkeypatch.setattr(_state, "default_app", app)  # of the thread of its timer

    def make() -> Worker:
        app.set_current()  # as in the process of a worker: Celery looks for tasks there
        return Worker(
            app=app, pool_cls="solo", concurrency=1, hostname="contract@here", loglevel="CRITICAL",
            without_gossip=True, without_mingle=True, without_heartbeat=True,
        )  # fmt: skip

    yield make
    _state._set_current_app(before)
    _state._set_task_join_will_block(False)  # the worker has set it, and later tests wait for results
    state.reset_state()
    state.should_stop = state.should_terminate = None


def task_of(app: Celery, name: str, body: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a task of this app alone."""

    def run(*args: Any) -> Any:
        return None if body is None else body(*args)

    return app.task(name=f"contract.{name}", shared=False, typing=False, **options)(run)
