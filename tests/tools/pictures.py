"""Makes the pictures of docs/web.md anew: `.venv/bin/python -m tests.tools.pictures`.

Look at each before you commit it.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import uvicorn

from celery_sidejob import CapacityPool, RunningJob, embedded
from celery_sidejob.jobs import batch as batches
from celery_sidejob.store import registry
from celery_sidejob.web.app import site_app
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users
from tests.tools.apps import make_app
from tests.tools.browsers import ENTRIES, PASSWORDS
from tests.tools.chromium import chromium
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
DAYS = """
INSERT INTO tallies (day, queue, task, step, measure, bucket, number, total_us, squares_us)
SELECT current_date - n, 'mail', 'shop.send', '', m, 3,
  CASE m WHEN 'run' THEN 900 + n * n * 7919 % 1300 ELSE n * 31 % 70 END, 0, 0
FROM generate_series(0, 29) n, unnest(ARRAY['run', 'failure']) m"""


SAMPLES = """
WITH made AS (
  INSERT INTO run_samples (taken_at, runs, failures)
  SELECT now() - (1500 - n) * interval '1 min', floor(n * 21 + 3100 * sin(n / 230.0 + 2) + 9 * sin(n * 0.7)),
    floor(n * 0.4 + 40 * sin(n / 150.0))
  FROM generate_series(0, 1500) n RETURNING runs, failures)
INSERT INTO tallies (day, queue, task, step, measure, bucket, number, total_us, squares_us)
SELECT '1970-01-01', 'mail', 'shop.send', '', m.measure, 3, m.number, 0, 0
FROM made, LATERAL (VALUES ('run', runs), ('failure', failures)) m(measure, number)
WHERE runs = (SELECT max(runs) FROM made)"""
TREE = """
WITH part AS (
  INSERT INTO jobs (task, queue, parent_id, name, status)
  SELECT 'shop.import_part', 'reports', %s, 'part ' || n, 'suspended' FROM generate_series(1, 4) n RETURNING id)
INSERT INTO jobs (task, queue, parent_id, name, status)
SELECT 'shop.import_line', 'reports', part.id, 'line ' || n,
  CASE WHEN n > 600 + part.id %% 3 * 40 THEN 'queued' WHEN n %% 41 = 0 THEN 'failed' ELSE 'completed' END
FROM part, generate_series(1, 720) n"""


def fail(job: RunningJob) -> None:
    raise ValueError("order 4711 has no address: the customer has deleted it")


def order(job: RunningJob) -> None:
    for name, seconds in (("reserve seats", 0.15), ("charge the card", 0.35), ("print the tickets", 0.2)):
        job.step(name, lambda seconds=seconds: time.sleep(seconds))
    for _ in range(3):
        job.step("notify", lambda: time.sleep(0.05))
    job.sleep("cool down", hours=4)


def import_catalogue(job: RunningJob) -> None:
    job.suspend()


def grow(stage: Stage) -> int:
    """Make a tree of some thousand jobs with its neighbours; returns the id of its root."""
    begin = stage.sidejob.task(import_catalogue, name="shop.import_catalogue",
                               outports={"new": {"channels": ["/products/new"]}})  # fmt: skip
    fetch, check, publish, index = (
        stage.sidejob.task(stage.idle.run, name=f"shop.{name}", inports=["*"])
        for name in ("fetch_catalogue", "check_prices", "publish_catalogue", "index_product")
    )
    first = fetch.enqueue()
    root = begin.enqueue(depends_on=[first], aliases=["catalogue"])
    publish.enqueue(depends_on=[root, check.enqueue(depends_on=[root])])
    for _ in range(9):
        index.enqueue(inports={"product": {"channels": ["/products"]}})
    stage.sql(TREE, root.id)
    return root.id


def fill(stage: Stage) -> int:
    """Make rows of each kind; returns the id of the job that is shown."""
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["celery", "mail", "orders", "reports"],
                 tasks=["stage.idle", "stage.call"])  # fmt: skip
    for number in range(24):
        job = stage.job(fail if number % 8 == 0 else None, queue="mail")
        hold = stage.claim(job)
        assert hold is not None
        stage.perform(hold)
    for number in range(12):
        stage.job(queue=("mail", "reports")[number % 2])
    shown = stage.job(order, tags=["customer:7", "vip"], state={"order": 4711, "total": "19.90"}, queue="orders",
                      aliases=["order-4711"], created_by="checkout")  # fmt: skip
    stage.run(shown)
    shown.input("refunds").write({"amount": 3})
    shown.enqueue(stage.idle, child_name="invoice")
    stage.claim(stage.job(queue="mail"))
    stage.sidejob.queue("mail").configure(limit=5, rate="600/m")
    stage.sidejob.queue("reports").pause("the printer is on fire")
    stage.sidejob.schedule("poll the bank", stage.idle, every=timedelta(minutes=15))
    CapacityPool("printers", 4).apply_async(stage.idle)
    stage.sql(DAYS)
    stage.sql(SAMPLES)
    with stage.sidejob.batch("newsletter 48"):
        for number in range(14):
            job = stage.job(fail if number == 5 else None, queue="mail")
            if number < 9:
                hold = stage.claim(job)
                assert hold is not None
                stage.perform(hold)
    batches.settle_all(stage.runtime)
    return shown.id


def main() -> int:
    """Fill a store, serve its page, and take the pictures."""
    with embedded.Postgres() as postgres, tempfile.TemporaryDirectory() as profile, socket.socket() as listener:
        make_app("shop", broker="memory://", sidejob_database_url=postgres.url).sidejob.upgrade_schema()
        with closing(Stage(postgres.url)) as stage, chromium(Path(profile), height=1020) as browser:
            stage.app.main = "shop"
            job_id, root_id = fill(stage), grow(stage)
            listener.bind(("127.0.0.1", 0))
            site = site_app(Site(stage.sidejob, Users(ENTRIES), None))
            server = uvicorn.Server(uvicorn.Config(site, log_level="warning", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            wait_until(lambda: server.started, message="the site to listen")
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            browser.get(f"{address}/")
            browser.find_element("name", "name").send_keys("ann")
            browser.find_element("name", "password").send_keys(PASSWORDS["ann"])
            browser.find_element("css selector", "main button").click()
            for name, path in (("overview", "/"), ("job", f"/jobs/{job_id}"), ("graph", f"/jobs/{root_id}/graph")):
                stage.sql("UPDATE workers SET beat_at = now()")  # its worker has no heart of its own
                browser.get(address + path)
                browser.save_screenshot(str(ASSETS / f"web_{name}.png"))
            browser.get("about:blank")  # which ends the stream of the page of the job
            server.should_exit = True
            thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
