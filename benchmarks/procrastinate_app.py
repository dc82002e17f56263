"""procrastinate as a side of `peers.py`: `python -m benchmarks.procrastinate_app install|client|worker URL`.

The client speaks as `client.py` does. The worker is one process that runs two coroutines at a time, with all its other
settings as they come: it fetches one job at a time, and keeps the rows of jobs that have ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import procrastinate

from benchmarks.client import in_one_go, publish, serve, wait
from benchmarks.note import note


def main(verb: str, url: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "worker":
        make_app(procrastinate.PsycopgConnector(conninfo=url)).run_worker(concurrency=2)
        return
    app = make_app(procrastinate.SyncPsycopgConnector(conninfo=url))
    stamp = app.tasks["stamp"]
    with app.open():
        if verb == "install":
            app.schema_manager.apply_schema()
            return
        serve(
            {
                "publish": lambda count: publish(stamp.defer, count),
                "together": lambda count: in_one_go(lambda: stamp.batch_defer(*({} for _ in range(count))), count),
                "wait": lambda count: wait(stamp.defer, count, Path(os.environ["STAMPS"])),
            }
        )


def make_app(connector: procrastinate.BaseConnector) -> procrastinate.App:
    """Make an app with the task `stamp`."""
    app = procrastinate.App(connector=connector)

    @app.task(name="stamp")
    async def stamp() -> None:
        """Note the instant."""
        note()

    return app


if __name__ == "__main__":
    main(*sys.argv[1:])
