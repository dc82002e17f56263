"""An import of a file of any size: a job for each thousand rows, of which some run at a time, and their sum.

python imports.py products.csv                   # the first line is id,name
"""

from __future__ import annotations

import csv
import sys
from itertools import islice
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, String, Table, insert
from steps import engine, sidejob

from celery_sidejob import RunningJob

PAGE = 1000
AT_A_TIME = 4
products = Table("products", MetaData(), Column("id", Integer, primary_key=True), Column("name", String))


@sidejob.task(name="imports.load")
def load(job: RunningJob, path: str) -> int:
    """Load a file; each page of rows is loaded once, whatever is killed on the way."""
    pages = job.step("split", split, path)  # read once, also if the import takes a day and many workers
    counts = job.call_all("page", [load_page.s(path, page) for page in pages], limit=AT_A_TIME)
    return sum(counts)


def split(path: str) -> list[int]:
    """Return where each page begins in the file, in bytes."""
    starts: list[int] = []
    with Path(path).open("rb") as file:
        file.readline()  # the names of the columns
        while True:
            start = file.tell()
            if not sum(1 for _ in islice(iter(file.readline, b""), PAGE)):
                return starts
            starts.append(start)


@sidejob.task(name="imports.load_page")
def load_page(job: RunningJob, path: str, start: int) -> int:
    """Insert the rows of a page, and return how many there were."""
    with Path(path).open(newline="", encoding="utf-8") as file, engine.connect() as connection:
        file.seek(start)
        with job.step("rows", transaction=connection) as step:
            if step.is_new:
                rows = [{"id": int(number), "name": name} for number, name in csv.reader(islice(file, PAGE))]
                connection.execute(insert(products), rows)
                step.value = len(rows)
        connection.commit()
    count: int = step.value
    return count


if __name__ == "__main__":
    products.create(engine, checkfirst=True)
    print("job", load.enqueue((sys.argv[1],), unique=f"load {sys.argv[1]}").id)
