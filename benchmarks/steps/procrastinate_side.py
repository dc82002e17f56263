"""procrastinate with a column of one's own: `python -m benchmarks.steps.procrastinate_side install|client|worker URL`.

The task is a plain function, so a thread of the worker runs it. It keeps how far it is in a table, as one would without
a library for steps: an UPDATE and a commit for each.
"""

from __future__ import annotations

import sys
from threading import local

import procrastinate
import psycopg

from benchmarks.note import note
from benchmarks.steps.body import CONCURRENCY, QUEUE, nothing, obey

TABLE = "CREATE TABLE progress (id bigserial PRIMARY KEY, done int NOT NULL DEFAULT 0)"
resting: list[tuple[int, int]] = []
url = sys.argv[-1]


def make_app(connector: procrastinate.BaseConnector) -> procrastinate.App:
    """Make an app with the task."""
    app = procrastinate.App(connector=connector)
    connections = local()

    @app.task(name="body", queue=QUEUE)
    def body(row: int, steps: int) -> None:
        """Do the steps that are not done, and note the end."""
        if not hasattr(connections, "mine"):
            connections.mine = psycopg.connect(url, autocommit=True)
        (found,) = connections.mine.execute("SELECT done FROM progress WHERE id = %s", [row]).fetchall()
        for done in range(found[0] + 1, steps + 1):
            nothing()
            connections.mine.execute("UPDATE progress SET done = %s WHERE id = %s", [done, row])
        note()

    return app


def main(verb: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "worker":
        make_app(procrastinate.PsycopgConnector(conninfo=url)).run_worker(queues=[QUEUE], concurrency=CONCURRENCY)
        return
    app = make_app(procrastinate.SyncPsycopgConnector(conninfo=url))
    with app.open(), psycopg.connect(url, autocommit=True) as connection:
        if verb == "install":
            app.schema_manager.apply_schema()
            connection.execute(TABLE)
            return

        def make(count: int, steps: int, rests: bool) -> None:
            rows = connection.execute(
                "INSERT INTO progress (done) SELECT 0 FROM generate_series(1, %s) RETURNING id", [count]
            ).fetchall()
            app.tasks["body"].batch_defer(*({"row": row, "steps": steps} for (row,) in rows))
            if rests:
                resting.extend((row, steps) for (row,) in rows)

        def wake() -> None:
            app.tasks["body"].batch_defer(*({"row": row, "steps": steps} for row, steps in resting))
            resting.clear()

        obey(make, wake)


if __name__ == "__main__":
    main(sys.argv[1])
