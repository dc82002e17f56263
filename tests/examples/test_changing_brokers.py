"""The page on changing the broker, walked with real workers: tasks sent before, during and after, none left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import kombu
import pytest
import redis
from amqp.exceptions import ChannelError

from tests.examples.shops import PostgresShop
from tests.examples.test_guides import blocks
from tests.tools.brokers import in_postgres
from tests.tools.versions import KOMBU_5_7, SQLALCHEMY_2_0_22
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT, Process, Processes, WorkerProcess

pytestmark = [KOMBU_5_7, SQLALCHEMY_2_0_22]

PAGE = ROOT / "docs" / "changing_brokers.md"
SEND = """
import json, sys, shop

number, others = int(sys.argv[1]), json.loads(sys.argv[2])
quotes = [shop.quote.delay([n]).id for n in range(number)]
quotes += [shop.quote.apply_async(([n],), countdown=8).id for n in range(number)]
order = shop.place_order("ada@example.com", 30)
for payee in [order, *others]:
    shop.pay(payee, 10)
print(json.dumps([quotes, order]))
"""
FAR = "import shop; shop.quote.apply_async(([1],), countdown=3600)"


class Change:
    """The shop on its way from one broker to another."""

    def __init__(self, shop: PostgresShop, old: str, new: str) -> None:
        self.shop, self.old, self.new = shop, old, new
        self.quotes: list[str] = []
        self.orders: list[int] = []

    def step(self, containing: str) -> str:
        """Run the page's block with this command in it, and return what it printed."""
        return self.shop.run(*self._block(containing), OLD=self.old, NEW=self.new)

    def begin(self, containing: str) -> Process:
        """Start the page's block with this command in it."""
        return self.shop.start(*self._block(containing), name="step", OLD=self.old, NEW=self.new)

    @staticmethod
    def _block(containing: str) -> list[str]:
        (shown,) = (text for text in blocks(PAGE, "sh") if containing in text)
        return ["sh", "-e", "-c", shown]

    def worker(self, broker: str, name: str) -> WorkerProcess:
        """Start a worker."""
        return self.shop.worker(name, CELERY_BROKER_URL=broker)

    def send(self, broker: str, *, quotes: int = 5, pays: Sequence[int] = ()) -> None:
        """Call plain tasks, as many for later, and place an order: a job, a durable task and a packet for each payment.

        `pays` names earlier orders that another part is paid of.
        """
        sent = self.shop.do("-c", SEND, str(quotes), json.dumps(pays), CELERY_BROKER_URL=broker)
        more, order = json.loads(sent)
        self.quotes += more
        self.orders.append(order)

    def has_quotes(self) -> bool:
        """Tell whether each plain task has its result; LookupError says which have none."""
        ended = {
            task_id for (task_id,) in self.shop.sql("SELECT task_id FROM celery_taskmeta WHERE status = 'SUCCESS'")
        }
        missing = [number for number, task_id in enumerate(self.quotes) if task_id not in ended]
        if missing:
            raise LookupError(f"quotes {missing} of {len(self.quotes)}")
        return True

    def is_done(self) -> bool:
        """Tell whether each order was confirmed and has a payment as well; LookupError says which have not."""
        waiting = self.shop.sql("SELECT id FROM orders WHERE NOT confirmed OR paid = 0")
        if waiting:
            raise LookupError(f"orders {waiting} of {len(self.orders)}")
        return self.has_quotes()


def ready(broker: str) -> int:
    """How many messages of the queue may be fetched."""
    with kombu.Connection(broker) as connection:
        try:
            found: int = connection.default_channel.queue_declare("celery", passive=True).message_count
        except ChannelError:  # in Redis an empty queue is none
            return 0
        return found


def fetched(redis_url: str) -> int:
    """How many messages somebody has fetched from Redis and not acknowledged."""
    with redis.Redis.from_url(redis_url) as client:
        return int(client.hlen("unacked"))


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> PostgresShop:
    shop = PostgresShop("postgres_shop", tmp_path, processes, empty_database_url)
    shop.env["SIDEJOB_LOST_AFTER"] = "600"  # no sweep finds by itself what the steps leave behind
    shop.do("create-tables")
    return shop


def walk(change: Change) -> None:
    """Go through the steps of the page up to the sixth; plain tasks and orders come in all the time."""
    change.shop.celery("sidejob", "db", "upgrade", CELERY_BROKER_URL=change.old)
    old = change.worker(change.old, "old")
    change.send(change.old)

    assert "fits" in change.step("reassign --beside")
    change.worker(change.new, "new")
    assert change.step("inspect ping").count("pong") == 2
    change.send(change.new, pays=change.orders)
    change.send(change.old, pays=change.orders)
    change.step("inspect active")
    wait_until(change.is_done, timeout=60, message="all that was sent to either broker to be done")
    paid = "SELECT paid FROM orders ORDER BY id"
    wait_until(lambda: change.shop.sql(paid) == [(30,), (20,), (10,)], timeout=30, message="all packets to be read")

    with pytest.raises(AssertionError, match="has workers that run"):
        change.step("sidejob db reassign\n")
    change.shop.do("-c", FAR, CELERY_BROKER_URL=change.old)
    old.terminate()
    assert old.wait(30) == 0
    change.send(change.old)  # by a client that somebody forgot


def end(change: Change) -> None:
    """Go through the last step, and see that nothing was left behind."""
    change.send(change.old, quotes=0)  # nobody moves these messages any more
    assert "belongs to" in change.step("sidejob db reassign\n")
    change.send(change.new)
    wait_until(change.is_done, timeout=60, message="all that was sent to be done")
    assert change.shop.sql("SELECT * FROM sidejob.dead") == []
    with pytest.raises(AssertionError, match="before it wrote"):
        change.worker(change.old, "forgotten")


@pytest.mark.slow
def test_from_redis_to_postgres(shop: PostgresShop, redis_url: str) -> None:
    change = Change(shop, redis_url, in_postgres(shop.database_url))
    walk(change)
    assert ready(change.old) > 0

    change.step("migrate -a -t")

    assert (ready(change.old), fetched(redis_url)) == (0, 0)
    assert shop.sql("SELECT count(*) FROM sidejob.broker_messages WHERE due_at > now() + interval '50 min'") == [(1,)]
    end(change)


@pytest.mark.slow
def test_from_rabbitmq_to_postgres(shop: PostgresShop, amqp_url: str) -> None:
    change = Change(shop, amqp_url, in_postgres(shop.database_url))
    walk(change)
    assert ready(change.old) > 0

    change.step("migrate -a -t")

    assert ready(change.old) == 0
    assert shop.sql("SELECT count(*) FROM sidejob.broker_messages WHERE due_at > now() + interval '50 min'") == [(1,)]
    end(change)


@pytest.mark.slow
def test_from_postgres_to_redis(shop: PostgresShop, redis_url: str) -> None:
    change = Change(shop, in_postgres(shop.database_url), redis_url)
    walk(change)

    mover = change.begin("migrate -a -F")
    wait_until(change.has_quotes, timeout=60, message="what has an eta to be moved when it is due")

    left = shop.sql("SELECT due_at > now() + interval '50 min' FROM sidejob.broker_messages WHERE task_id IS NULL")
    assert left == [(True,)]
    mover.kill_group()
    end(change)
