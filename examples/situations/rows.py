"""Situation 2: an import of a million rows."""

from __future__ import annotations

import csv
import sys
from itertools import islice
from pathlib import Path

from situations import SERVER, sidejob
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, insert

from celery_sidejob import RunningJob

PAGE = 1000
engine = create_engine(f"postgresql+psycopg://{SERVER}")
products = Table("products", MetaData(), Column("id", Integer, primary_key=True), Column("name", String))


@sidejob.task(name="rows.load")
def load(job: RunningJob, path: str) -> int:
    """Insert each row of a file exactly once, whatever is killed on the way."""
    done: int = job.get("done", 0)
    with Path(path).open(newline="") as file, engine.connect() as connection:
        rows = islice(csv.DictReader(file), done, None)  # without the rows that an earlier run has committed
        while page := list(islice(rows, PAGE)):
            with job.unit(transaction=connection):
                connection.execute(insert(products), page)
                done += len(page)
                job.set(done=done)
            connection.commit()  # the rows and how far the job has come: together, or not at all
    return done


if __name__ == "__main__":
    products.create(engine, checkfirst=True)
    job = load.enqueue((sys.argv[1],), unique=f"load {sys.argv[1]}")  # while it is open, no second import begins
    print("job", job.id)
