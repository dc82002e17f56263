"""DBOS as a side: `python -m benchmarks.steps.dbos_side install|client|worker URL`."""

from __future__ import annotations

import sys
import threading

from dbos import DBOS, DBOSClient

from benchmarks.note import note
from benchmarks.steps.body import CONCURRENCY, QUEUE, nothing, obey

VERSION = "1"
POLL_S = 0.01
"""As it comes it looks once a second, for as many workflows as it may run at a time."""
resting: list[tuple[str, int]] = []


@DBOS.step()
def step() -> int:
    """Do nothing, as a step."""
    return nothing()


@DBOS.workflow(name="body")
def body(steps: int) -> None:
    """Do so many steps, and note the end."""
    for _ in range(steps):
        step()
    note()


def main(verb: str, url: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "client":
        client = DBOSClient(system_database_url=url)
        obey(lambda count, steps, rests: make(client, count, steps, rests=rests), lambda: wake(client))
        return
    DBOS(config={
        "name": "steps", "system_database_url": url, "application_version": VERSION, "run_admin_server": False,
        "log_level": "ERROR",
    })  # fmt: skip
    DBOS.launch()
    DBOS.register_queue(QUEUE, worker_concurrency=CONCURRENCY, polling_interval_sec=POLL_S)
    if verb == "worker":
        threading.Event().wait()
    DBOS.destroy()


def make(client: DBOSClient, count: int, steps: int, *, rests: bool) -> None:
    """Enqueue workflows. One that is to rest ends after its steps, and is forked behind them."""
    for _ in range(count):
        handle = client.enqueue({"queue_name": QUEUE, "workflow_name": "body", "app_version": VERSION}, steps)
        if rests:
            resting.append((handle.get_workflow_id(), steps))


def wake(client: DBOSClient) -> None:
    """Fork what has ended behind its last step: it passes them all."""
    for workflow, steps in resting:
        client.fork_workflow(workflow, steps + 1, application_version=VERSION, queue_name=QUEUE)
    resting.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
