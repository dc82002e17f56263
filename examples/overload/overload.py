"""An endpoint that refuses requests while too many of their jobs wait or run. docs/capacity.md explains it.

createdb overload                                # or name yours in DATABASE_URL
celery -A overload sidejob db upgrade
celery -A overload worker --loglevel info

python overload.py                               # in another shell; sends requests from sixteen clients
"""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from celery import Celery
from flask import Flask, Response, jsonify

from celery_sidejob import CapacityPool, Overloaded, RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///overload").partition("://")[2]

app = Celery("overload", broker="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)
reports = CapacityPool("reports", 8)
web = Flask(__name__)


@sidejob.task(capacity=reports)
def report(job: RunningJob, number: int) -> None:
    """Write a report."""
    time.sleep(0.02)


@web.post("/reports/<int:number>")
def order(number: int) -> tuple[Response, int]:
    """Take an order of a report."""
    return jsonify(job=report.enqueue((number,)).id), 202


@web.errorhandler(Overloaded)
def try_later(full: Overloaded) -> tuple[Response, int, dict[str, str]]:
    """Tell the client when to try again."""
    return jsonify(used=full.used, limit=full.limit), 503, {"Retry-After": str(math.ceil(full.retry_after))}


def main(orders: int = 100) -> None:
    """Order reports from sixteen clients at once; whoever is refused tries again when it is told to."""
    refused, lock, most = 0, threading.Lock(), 0

    def client(number: int) -> int:
        nonlocal refused, most
        while True:
            response = web.test_client().post(f"/reports/{number}")
            most = max(most, reports.used)
            if response.status_code == 202:
                return int(response.get_json()["job"])
            assert response.status_code == 503, response.data
            with lock:
                refused += 1
            time.sleep(min(1, int(response.headers["Retry-After"])))

    with ThreadPoolExecutor(16) as clients:
        jobs = [sidejob.get(job) for job in clients.map(client, range(orders))]
    for job in jobs:
        job.wait(timeout=60)
    print(f"{len({job.id for job in jobs})} reports, some orders refused: {refused > 0}")
    print(f"never more than the limit: {most <= reports.limit}")
    print(f"used: {reports.used}, refusals counted: {wait_for_refusals(refused)}")


def wait_for_refusals(expected: int) -> bool:
    """Tell whether the pool has counted all refusals: it does so within a second."""
    deadline = time.monotonic() + 10
    while reports.stats()["refused"]["total"] < expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(reports.stats()["refused"]["total"] == expected)


if __name__ == "__main__":
    main()
