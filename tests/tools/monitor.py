"""A monitor that receives the events of workers, as Flower does."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.events.state import State

from tests.tools.waiting import wait_until


class Events:
    """Receives events as Flower does, into Celery's own state of a cluster."""

    def __init__(self, broker_url: str) -> None:
        self.app = Celery("monitor", broker=broker_url, set_as_current=False)
        self.state: State = self.app.events.State()
        self.raw: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> Events:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self.app.close()

    def wait_for(self, task_id: str, state: str) -> Any:
        """Return the task once the state shows it like this."""

        def there() -> Any:
            task = self.state.tasks.get(task_id)
            if task is None or task.state != state:
                raise LookupError(f"{task!r}, after {self.types(task_id)}")
            return task

        return wait_until(there, timeout=20, message=f"task {task_id} to be shown as {state}")

    def types(self, task_id: str) -> list[str]:
        """The types of the events of one task id, in the order in which they came."""
        return [event["type"] for event in self.raw if event.get("uuid") == task_id]

    def _receive(self) -> None:
        with self.app.connection_for_read() as connection:
            receiver = self.app.events.Receiver(connection, handlers={"*": self._note})
            with receiver.consumer_context() as (listening, _, _):
                while not self._stop.is_set():
                    with suppress(TimeoutError):
                        listening.drain_events(timeout=0.2)
                    self._ready.set()  # on Redis it subscribes when it first drains, and hears nothing of before

    def _note(self, event: dict[str, Any]) -> None:
        self.raw.append(dict(event))
        self.state.event(event)
