"""What clients ask for, and what must be in the ledger for it: kinds of load.

Each ask has a key, a whole number that is never used again; values in the ledger are made of it. A kind's `wanted` are
the entries that must be there exactly so often once the ask was promised, and that are all there or none of them when
its answer was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psycopg
from celery import chain, chord, group

from celery_sidejob import JobNotFoundError

if TYPE_CHECKING:
    from proofs.soak.client import Client

Effect = tuple[str, int]

BULK, STEPS, PACKETS, LINKS = 10, 5, 3, 3
CHILDREN, PAIRS = 2, 2
READERS, LISTENERS, CLERKS = 4, 3, 3
"""Jobs that are there from the beginning: for packets, for a channel, and for plain `run()`."""
CHANNEL = "/soak/news"
BORROWED = 99
"""The place of a packet written in a borrowed transaction."""
PLACES = 100
"""Values of one key: key * PLACES + place."""
FAMILY_PLACES = 100_000
LEAVES = 2
ROOT = 99
"""The place of a tree's root among the entries of its shutdown."""
TABLES = """
CREATE TABLE orders (key bigint PRIMARY KEY);
CREATE TABLE notes (value bigint PRIMARY KEY, clerk int NOT NULL);
CREATE INDEX ledger_what_value_idx ON ledger (what, value);
ALTER TABLE ledger ADD at timestamptz NOT NULL DEFAULT clock_timestamp()"""


def reader_alias(number: int) -> str:
    """The name of a job that reads packets."""
    return f"reader-{number}"


def clerk_alias(number: int) -> str:
    """The name of a job that is only ever asked to run."""
    return f"clerk-{number}"


def places(what: str, key: int, count: int) -> Counter[Effect]:
    """Entries of one key."""
    return Counter({(what, key * PLACES + place): 1 for place in range(count)})


# -- asking -----------------------------------------------------------------------------------------------------------


def _single(client: Client, key: int) -> None:
    client.promise("single", key, lambda: client.enqueue("soak.enter", ("single", key)))


def _bulk(client: Client, key: int) -> None:
    items = [{"task": "soak.enter", "args": ("bulk", key * PLACES + place)} for place in range(BULK)]
    client.promise("bulk", key, lambda: client.sidejob.enqueue_many(items))


def _steps(client: Client, key: int) -> None:
    client.promise("steps", key, lambda: client.enqueue("soak.steps", (key * PLACES, STEPS)))


def _timer(client: Client, key: int) -> None:
    countdown = client.dice.uniform(0.5, 8)
    client.promise("timer", key, lambda: client.enqueue("soak.enter", ("timer", key), countdown=countdown))


def _flaky(client: Client, key: int) -> None:
    client.promise("flaky", key, lambda: client.enqueue("soak.flaky", (key, client.dice.randint(1, 3))))


def _patient(client: Client, key: int) -> None:
    client.promise("patient", key, lambda: client.enqueue("acceptance.patient", (key,)))


def _family(client: Client, key: int) -> None:
    link = client.app.signature("acceptance.linked")
    arguments = (CHILDREN, PAIRS, key * FAMILY_PLACES)
    client.promise("family", key, lambda: client.enqueue("acceptance.family", arguments, link=link))


def _packets(client: Client, key: int) -> None:
    port = client.sidejob.get(reader_alias(client.dice.randrange(READERS))).input("in")
    client.promise("packets", key, lambda: port.write_many([key * PLACES + place for place in range(PACKETS)]))


def _news(client: Client, key: int) -> None:
    client.promise("news", key, lambda: client.sidejob.publish(CHANNEL, key))


def _note(client: Client, key: int) -> None:
    number = client.dice.randrange(CLERKS)
    with client.connect() as connection:
        connection.execute("INSERT INTO notes (value, clerk) VALUES (%s, %s)", [key, number])
    clerk = client.sidejob.get(clerk_alias(number))
    client.promise("note", key, clerk.run)


def _chain(client: Client, key: int) -> None:
    parts = [
        client.app.signature("soak.enter", args=("chain", key * PLACES + place), immutable=True)
        for place in range(LINKS)
    ]
    client.promise("chain", key, lambda: chain(*parts).apply_async())


def _canvas(client: Client, key: int) -> None:
    """A canvas with plain tasks in it, which may be lost, and with a chord, whose count is in the result backend."""

    def entry(place: int) -> object:
        return client.app.signature("soak.enter", args=("canvas", key * PLACES + place), immutable=True)

    plain = client.app.signature("soak.plain", args=(key,), immutable=True)
    canvas = chord(group(entry(0), plain, entry(1)), chain(entry(2), plain, entry(3)))
    client.promise("canvas", key, canvas.apply_async)


def _tree(client: Client, key: int) -> None:
    client.promise("tree", key, lambda: client.enqueue("soak.tree", (key,)))


def _fell(client: Client, key: int) -> None:
    """Terminate a tree that rests, whoever made it, or remove one that is terminated."""
    found = client.sidejob.jobs(status=["suspended", "terminated"], task="soak.tree", limit=30)
    if not found:
        return
    job = client.dice.choice(found)
    try:
        if job.terminated:
            job.delete()
        else:
            root = job.args[0]
            client.promise("fell", key, lambda: job.terminate(recursive=True), root=root)
    except JobNotFoundError:  # another client or the retention was quicker
        return


def _order(client: Client, key: int) -> None:
    """Make a job and a packet in a transaction of our own, which is committed or rolled back."""
    reader = client.sidejob.get(reader_alias(client.dice.randrange(READERS)))
    gives_up = client.dice.random() < 0.3

    def ask() -> None:
        with client.connect(autocommit=False) as connection:
            connection.execute("INSERT INTO orders (key) VALUES (%s)", [key])
            client.enqueue("soak.enter", ("order", key), transaction=connection)
            reader.input("in").write(key * PLACES + BORROWED, transaction=connection)
            connection.rollback() if gives_up else connection.commit()

    client.promise("given up" if gives_up else "order", key, ask)


def _failing(client: Client, key: int) -> None:
    client.promise("failing", key, lambda: client.enqueue("soak.failing", (key,)))


def _retried(client: Client, key: int) -> None:
    """Have a job of the dead set tried again; it fails again."""
    entry = next((entry for entry in client.sidejob.dead if client.dice.random() < 0.3), None)
    if entry is not None:
        try:
            client.promise("retried", key, lambda: client.sidejob.dead.retry(entry.id))
        except JobNotFoundError:  # another client was quicker
            return


def _nothing(key: int) -> Counter[Effect]:
    return Counter()


def _one(what: str) -> Callable[[int], Counter[Effect]]:
    return lambda key: Counter({(what, key): 1})


def _of_family(key: int) -> Counter[Effect]:
    values = [key * FAMILY_PLACES + child * 1000 + pair for child in range(CHILDREN) for pair in range(PAIRS)]
    return Counter([("sum", value) for value in values] + [("collected", value) for value in values]) + Counter(
        {("linked", sum(values)): 1}
    )


@dataclass(frozen=True)
class Kind:
    """One kind of load."""

    ask: Callable[[Client, int], None]
    """Asks for one of it through a client."""
    weight: float
    """How often, against the others."""
    wanted: Callable[[int], Counter[Effect]] = field(default=_nothing)
    """The entries of one ask."""
    promised: bool = True
    """Whether all of `wanted` must be there once the call has returned; otherwise each may be, once."""


KINDS: Mapping[str, Kind] = {
    "single": Kind(_single, 6, _one("single")),
    "bulk": Kind(_bulk, 1, lambda key: places("bulk", key, BULK)),
    "steps": Kind(_steps, 3, lambda key: places("step", key, STEPS)),
    "timer": Kind(_timer, 2, _one("timer")),
    "flaky": Kind(_flaky, 1.5, _one("flaky")),
    "patient": Kind(_patient, 1.5, _one("patient")),
    "family": Kind(_family, 1.5, _of_family),
    "packets": Kind(_packets, 3, lambda key: places("packet", key, PACKETS)),
    "news": Kind(_news, 2, lambda key: Counter({("news", key): LISTENERS})),
    "note": Kind(_note, 3, _one("note")),
    "chain": Kind(_chain, 1.5, lambda key: places("chain", key, LINKS)),
    "canvas": Kind(_canvas, 0.7, lambda key: places("canvas", key, 4), promised=False),
    "tree": Kind(_tree, 1, _one("tree"), promised=False),  # it may be felled before its first run
    "fell": Kind(_fell, 1.5),
    "order": Kind(_order, 2, lambda key: Counter({("order", key): 1, ("packet", key * PLACES + BORROWED): 1})),
    "failing": Kind(_failing, 0.5),
    "retried": Kind(_retried, 0.3),
}
"""By name. What is asked under another name (an order that was given up) must have had no effect."""


def prepare(sidejob: object, connection: psycopg.Connection[object]) -> None:
    """Make our tables, and the jobs that are there from the beginning."""
    for statement in TABLES.split(";"):
        connection.execute(statement)
    enqueue = sidejob.enqueue  # type: ignore[attr-defined]
    for number in range(READERS):
        enqueue("soak.reader", ("packet",), aliases=[reader_alias(number)])
    for number in range(LISTENERS):
        enqueue("soak.reader", ("news",), aliases=[f"listener-{number}"], inports={"in": {"channels": [CHANNEL]}})
    for number in range(CLERKS):
        enqueue("soak.clerk", (number,), aliases=[clerk_alias(number)])
