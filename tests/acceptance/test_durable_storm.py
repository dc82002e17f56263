"""Everything dies again and again: what a call has accepted ends in success or the dead set, once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable

import pytest

from tests.acceptance.durable_site import APP, Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.tools.waiting import wait_until
from tests.tools.workers import Process

CLIENT = f"""
import os, random, sys, time
from celery import chain
from {APP} import noted, noted_late, retrying, step
from tests.tools.recorder import Record

record, chance = Record.from_env(), random.Random(os.getpid())
for number in range(int(sys.argv[1])):
    time.sleep(0.01)  # so that it is struck in the midst of its calls
    kind = chance.choice(["noted", "noted_late", "retrying", "step", "chain"])
    if kind == "chain":
        result = chain(step.s(number), noted_late.s()).apply_async()
        record.note("accepted", id=result.parent.id, kind="step", then=result.id)
    else:
        task = {{"noted": noted, "noted_late": noted_late, "retrying": retrying, "step": step}}[kind]
        result = task.delay(1 if kind == "retrying" else number)
        record.note("accepted", id=result.id, kind=kind)
"""
KINDS = {"noted", "noted_late", "retrying", "step"}
ONCE = {"noted", "noted_late"}
"""What is never begun a second time, unless nothing of it had begun."""


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("tasks", "blows", "seed"), [(150, 8, 1), pytest.param(3000, 120, None, marks=pytest.mark.slow)]
)
def test_a_storm(site: Site, tasks: int, blows: int, seed: int | None) -> None:
    seed = seed if seed is not None else random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    env = {"SIDEJOB_MAX_LOSSES": "100"}
    workers = [site.worker(concurrency=2, env=env) for _ in range(2)]
    wanted: dict[int, int] = {}
    killed: set[int] = set()

    def client(calls: int) -> Process:
        started = site.processes.start_python(CLIENT, str(calls), env=site.env)
        wanted[started.pid] = calls
        return started

    clients = [client(tasks // 2) for _ in range(2)]

    def kill_a_worker() -> None:
        place = chance.randrange(len(workers))
        workers[place].kill_group()
        workers[place] = site.worker(concurrency=2, env=env)

    def kill_a_pool_process() -> None:
        for pid in chance.sample(found := workers[chance.randrange(len(workers))].children(), min(1, len(found))):
            os.kill(pid, signal.SIGKILL)

    def kill_a_client() -> None:
        victim = client(tasks)
        wait_until(
            lambda: site.record.of("accepted", pid=victim.pid), timeout=60, message="the client to be in its calls"
        )
        assert victim.alive
        killed.add(victim.pid)
        victim.kill_group()
        clients.append(client(tasks // 4))

    plans: list[Callable[[], None]] = [kill_a_worker, kill_a_pool_process, kill_a_client, site.empty_broker]
    for blow in range(blows):
        ran = len(site.record.of("ran"))
        wait_until(
            lambda ran=ran: len(site.record.of("ran")) >= ran + tasks // blows // 2 or all_ended(clients),
            timeout=60, message="something to run between two blows",
        )  # fmt: skip
        plans[blow % len(plans)]() if blow < len(plans) else chance.choice(plans)()
    wait_until(lambda: all_ended(clients), timeout=120, message="the clients to end")
    wait_until(lambda: not site.sql("SELECT 1 FROM messages"), timeout=120, message="no message to be left")

    runs = Counter(line["id"] for line in site.record.of("ran"))
    dead = Counter(entry.task_id for entry in site.dead())
    accepted = {line["id"]: line["kind"] for line in site.record.of("accepted")}
    called = Counter(line["pid"] for line in site.record.of("accepted"))
    assert {pid: called[pid] for pid in wanted.keys() - killed} == {
        pid: calls for pid, calls in wanted.items() if pid not in killed
    }, "a client that nobody killed made all its calls"
    assert killed
    assert {line["kind"] for line in site.record.of("accepted")} == KINDS
    assert max(runs.values()) > 1 or dead, "no blow has struck anything"
    assert {task_id: count for task_id, count in dead.items() if count > 1} == {}
    assert {entry.reason for entry in site.dead()} <= {"lost"}
    assert [task_id for task_id in accepted if not runs[task_id] and not dead[task_id]] == [], "lost"
    assert [one for one, kind in accepted.items() if kind in ONCE and runs[one] > 1] == [], "repeated unseen"
    then = [line["then"] for line in site.record.of("accepted") if "then" in line and line["id"] not in dead]
    assert [task_id for task_id in then if not runs[task_id] and not dead[task_id]] == [], "what follows was lost"
    assert [task_id for task_id in then if runs[task_id] > 1] == [], "what follows was begun twice"


def all_ended(clients: list[Process]) -> bool:
    """Whether no client publishes any more."""
    return not any(client.alive for client in clients)
