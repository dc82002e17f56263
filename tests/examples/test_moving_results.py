"""The page on moving results, walked with real workers, while old and new callers call and wait for their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.examples.test_guides import blocks
from tests.tools.pgbouncer import direct
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT, Process, Processes, WorkerProcess

pytestmark = KOMBU_5_7

PAGE = ROOT / "docs" / "moving_results.md"
NEW = "sidejobpg://"
CALLER = """
import pathlib, sys, time
from celery import chord
from shop import confirm, quote

rounds = 0
while not pathlib.Path(sys.argv[1]).exists():
    result = quote.delay([1, 2])
    assert result.get(timeout=60) == 3
    assert confirm.delay(7).get(timeout=60) == "order 7 is confirmed"
    assert chord(quote.s([number]) for number in range(4))(quote.s()).get(timeout=60) == 6
    rounds += 1
    print("round", rounds, result.id, flush=True)
    time.sleep(0.2)  # leaves some of the machine to the others
"""
STATES = "import sys; from shop import app; print(*(app.AsyncResult(id).state for id in sys.argv[1:]))"
FOUND = "import sys; from shop import result_of; print(*(result_of(id).result for id in sys.argv[1:]))"
QUOTE = "from shop import quote; print(quote.delay([4, 5]).id)"
FAR = "from shop import quote; print(quote.apply_async(([6, 7],), countdown=3600).id)"
DELIVER = "from shop import deliver; print(deliver.enqueue((8,)).task_id)"
PAY = "from shop import sidejob; print(sidejob.get(1).input('payments').write(30))"


@dataclass(frozen=True)
class Caller:
    """A process that calls tasks, and waits for each, until it is stopped."""

    process: Process
    stop: Path

    def ids(self) -> list[str]:
        """The ids of the plain tasks of its complete rounds."""
        return [line.split()[-1] for line in self.process.log().splitlines() if line.startswith("round ")]

    def goes_on(self) -> None:
        """Wait until it has had the results of two rounds more."""
        before = len(self.ids())
        assert wait_until(
            lambda: not self.process.alive or len(self.ids()) >= before + 2, timeout=120, message="two rounds"
        )
        assert self.process.alive, self.process.log()

    def end(self) -> None:
        """Have it end after its round; none of its calls may have failed."""
        self.stop.touch()
        assert self.process.wait(120) == 0, self.process.log()


class Move:
    """A shop of which some processes have the old result backend, and some the new one."""

    def __init__(self, shop: Shop, old: str) -> None:
        self._shop = shop
        self.old = {"CELERY_RESULT_BACKEND": old, "SHOP_OTHER_RESULTS": NEW}
        self.new = {"CELERY_RESULT_BACKEND": NEW, "SHOP_OTHER_RESULTS": old, "SHOP_QUEUES": "pg."}

    def step(self, containing: str) -> str:
        """Run the page's block with this command in it, and return what it printed."""
        (shown,) = (text for text in blocks(PAGE, "sh") if containing in text)
        return self._shop.run("sh", "-e", "-c", shown, **self.old)

    def worker(self, name: str, env: dict[str, str], *queues: str) -> WorkerProcess:
        """Start a worker of these queues."""
        return self._shop.worker(name, queues=queues, **env)

    def caller(self, name: str, env: dict[str, str]) -> Caller:
        """Start a caller."""
        stop = self._shop.directory / f"stop_{name}"
        return Caller(self._shop.start("python", "-c", CALLER, str(stop), name=name, **env), stop)

    def do(self, program: str, env: dict[str, str], *ids: str) -> str:
        """Run a program in a process of its own."""
        return self._shop.run("python", "-c", program, *ids, **env).strip().splitlines()[-1]


def walk(move: Move, shop: Shop) -> None:
    """Go through the steps of the page."""
    move.step("db upgrade")
    old_worker = move.worker("old", move.old, "celery", "mails")
    old = move.caller("old_caller", move.old)
    old.goes_on()

    new_worker = move.worker("new", move.new, "pg.celery", "pg.mails")
    queues = move.step("active_queues")
    names = ("celery", "pg.celery", "mails", "pg.mails")
    assert [queues.count(f"* {{'name': '{name}'") for name in names] == [1, 1, 1, 1]
    old.goes_on()

    new = move.caller("new_caller", move.new)
    new.goes_on()
    old.goes_on()  # while new ones call as well
    assert {move.do(STATES, move.new, old.ids()[-1]), move.do(STATES, move.old, new.ids()[-1])} == {"PENDING"}
    both = (old.ids()[-1], new.ids()[-1])
    assert [move.do(FOUND, env, *both) for env in (move.old, move.new)] == ["3 3", "3 3"]
    far, resting = move.do(FAR, move.old), move.do(DELIVER, move.old)
    wait_until(
        lambda: shop.sql("SELECT status FROM sidejob.jobs") == [("suspended",)], timeout=30, message="it to rest"
    )
    old.end()

    assert move.step("inspect reserved").count("- empty -") >= 2, "the old worker has nothing more to do"
    new.goes_on()
    old_worker.terminate()
    assert old_worker.wait(60) == 0
    new_worker.terminate()
    assert new_worker.wait(60) == 0
    move.worker("all", move.new, "celery", "mails", "pg.celery", "pg.mails")
    new.goes_on()

    forgotten = move.do(QUOTE, move.old)  # by a client that was not changed
    wait_until(lambda: move.do(FOUND, move.old, forgotten) == "9", timeout=60, message="its result to be in Postgres")
    assert move.do(STATES, move.old, forgotten) == "PENDING", "where it looks itself"
    move.do(PAY, move.new)
    wait_until(lambda: move.do(FOUND, move.new, resting) == "order 8 is paid with 30", timeout=60, message="the job")
    assert move.do(STATES, move.new, far) == "PENDING"
    assert move.do(FOUND, move.new, *old.ids()[:3]) == "3 3 3", "old results are still found"
    new.end()
    assert shop.sql("SELECT * FROM sidejob.dead") == []


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> Shop:
    class MovingShop(Shop):
        celery_app = "shop"

    return MovingShop("moving_results", tmp_path, processes, empty_database_url)


@pytest.mark.few(0)
def test_from_redis(shop: Shop, redis_url: str) -> None:
    walk(Move(shop, redis_url), shop)


@pytest.mark.slow
def test_from_redis_with_a_broker_in_redis(shop: Shop, redis_url: str) -> None:
    shop.env["CELERY_BROKER_URL"] = redis_url
    move = Move(shop, redis_url)
    walk(move, shop)


@pytest.mark.slow
def test_from_the_database_backend_of_celery(shop: Shop) -> None:
    url = direct(shop.database_url).replace("postgresql:", "postgresql+psycopg:")
    walk(Move(shop, f"db+{url}"), shop)
