"""Places for connections are given in the order of asking, and nobody waits for ever."""

from __future__ import annotations

from tests.tools.workers import Processes

PROGRAM = """
from gevent import monkey
monkey.patch_all()
import gevent
from celery_sidejob.store.connection import turns

def use(name, seconds):
    with pool.one():
        order.append(name)
        gevent.sleep(seconds)

pool, order = turns.Places(2), []
users = [gevent.spawn(use, name, 0.05) for name in range(9)]
gevent.sleep(0.01)
users[4].kill()  # while it waits
users[0].kill()  # while it has a place
gevent.joinall(users)
assert order == [0, 1, 2, 3, 5, 6, 7, 8], order
assert (pool._free, len(pool._waiting)) == (2, 0)

turns.PATIENCE_S = 0.05
pool, order = turns.Places(1), []
users = [gevent.spawn(use, name, 30.0) for name in range(2)]
gevent.joinall(users, timeout=1.0)
assert order == [0, 1], order

turns.PATIENCE_S = 30.0
users.append(gevent.spawn(use, 2, 30.0))
gevent.sleep(0.01)
users[0].kill()  # its place is for the one that waits, and not for the one that went on without
gevent.sleep(0.01)
assert order == [0, 1, 2], order
gevent.killall(users)
assert (pool._free, len(pool._waiting)) == (1, 0)

pool, order = turns.Places(1), []
with pool.one():
    waiter = gevent.spawn(use, 0, 30.0)
    gevent.sleep(0.01)
    waiter.kill(block=False)  # and is given the place before it learns of that
waiter.join()
assert (pool._free, len(pool._waiting)) == (1, 0)

pool, order = turns.Places(1), []


def again_and_again():
    for _ in range(3):
        with pool.one():
            gevent.sleep(0.01)
            order.append("again")


def once():
    with pool.one():
        order.append("once")


gevent.joinall([gevent.spawn(again_and_again), gevent.spawn(once)])
assert order == ["again", "once", "again", "again"], "those who wait come before one who asks again"
print("in order")
"""


def test_places_are_given_in_order_and_nobody_waits_for_ever(processes: Processes) -> None:
    program = processes.start_python(PROGRAM)
    assert program.wait(30) == 0, program.log_tail()
    assert "in order" in program.log()
