"""The first hour of a new user: what the pages show is typed, word for word, into a system as its installer leaves it.

`./run bare` prepares such a system and runs these tests. `SIDEJOB_TEST_ROOT` names its root file system.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from tests.examples.test_guides import blocks
from tests.examples.test_readme import README, SESSION
from tests.tools.bare import BareSystem, Terminal, bare_system, needed
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

DURABLE, DJANGO, FLASK, FASTAPI = (ROOT / "docs" / f"{name}.md" for name in ("durable", "django", "flask", "fastapi"))
BANNER = "[queues]"
"""A worker as the pages start it logs warnings only."""
SUMS = list(accumulate(range(20_000)))
TAKEN_OVER = f"""
>>> from itertools import accumulate
>>> from shop import sidejob
>>> job = sidejob.get(2).wait(timeout=600)
>>> sums = list(job.output("sums"))
>>> len(sums), sums[-1], sums == list(accumulate(range({len(SUMS)})))
({len(SUMS)}, {SUMS[-1]}, True)
"""


@pytest.fixture
def bare() -> Iterator[BareSystem]:
    with bare_system(needed()) as system:
        yield system


def block(page: Path, containing: str) -> str:
    """Return the only block of a page that has this in it."""
    (found,) = (text for text in blocks(page, "") if containing in text)
    return found


def in_clone(bare: BareSystem, *typed: str) -> Terminal:
    """Type these blocks in the clone, after the README's for this system."""
    terminal = bare.terminal("first")
    terminal.run("cd celery_sidejob")
    for text in (block(README, "sudo apt install"), *typed):
        terminal.run(text)
    return terminal


def another(bare: BareSystem, name: str, directory: str) -> Terminal:
    """Open another terminal in a directory with a virtual environment."""
    terminal = bare.terminal(name)
    terminal.run(f"cd {directory}\n. .venv/bin/activate")
    return terminal


def doctest(bare: BareSystem, terminal: Terminal, session: str) -> None:
    """Type a session into a Python shell, and compare its answers."""
    bare.write("shop/session.txt", session)
    terminal.run(f"python -c {shlex.quote(SESSION)}", timeout=900)


def test_the_five_minutes_of_the_readme(bare: BareSystem) -> None:
    first = in_clone(bare, block(README, "python3 -m venv"))
    task, job = (text for text in blocks(README, "python") if text.startswith("# shop.py"))
    bare.write("shop/shop.py", task)
    upgrade, worker = block(README, "sidejob db upgrade").splitlines()
    assert "it is new" in first.run(upgrade)
    first.start(worker, until=BANNER)

    second = bare.terminal("second")
    second.run("cd shop")
    call = block(README, "send_mail.delay")
    second.run(call)
    assert "\nsent to" not in second.log()
    (worker,) = block(README, "celery -A shop worker\n").splitlines()
    first.start(worker, until=BANNER)
    wait_until(lambda: "\nsent to ada@" in second.log(), timeout=60, message="the caller to print the result")

    kill = call.splitlines()[-1]
    second.run(kill.replace("-9", "-INT"))  # as Ctrl-C does
    bare.write("shop/shop.py", f"{task}\n\n{job}")
    first.start(worker, until=BANNER)
    (session,) = (text for text in blocks(README, "python") if text.startswith(">>>"))
    doctest(bare, second, session)
    second.run(kill)
    waiting = json.loads(second.run("celery -A shop sidejob show 2 --json").partition("\n")[2])
    assert waiting["status"] != "completed", "the worker was killed while it worked"
    first.start(worker, until=BANNER)
    doctest(bare, second, TAKEN_OVER)


def test_the_first_lines_of_durable_tasks(bare: BareSystem) -> None:
    terminal = in_clone(bare, block(README, "python3 -m venv"))
    bare.write("shop/mail.py", blocks(DURABLE, "python")[0])
    *before, again = blocks(DURABLE, "")[0].splitlines()
    terminal.run("\n".join(before))
    assert "sent to" not in terminal.log()
    terminal.start(again, until="sent to ada@example.com")
    assert "comes back from a worker that is gone" in terminal.log()


@pytest.mark.parametrize(
    ("guide", "tests"),
    [(DJANGO, "python manage.py test"), (FLASK, ""), (FASTAPI, "")],
    ids=["django", "flask", "fastapi"],
)
def test_a_guide(bare: BareSystem, guide: Path, tests: str) -> None:
    directory = f"{guide.stem}_shop"
    first = in_clone(bare, block(guide, "python3 -m venv"))
    *prepare, worker, server = block(guide, "sidejob db upgrade").splitlines()
    assert "it is new" in first.run("\n".join(prepare))
    first.start(worker, until=BANNER)
    another(bare, "server", directory).start(server, until="http://127.0.0.1:")

    customer = bare.terminal("customer")
    product, order, *looks = block(guide, "INSERT INTO").splitlines()
    customer.run(product)
    assert answer_to(customer, order) == shown_for(order)
    for look in looks:
        wait_until(lambda look=look: answer_to(customer, look) == shown_for(look), timeout=60, message=look)  # type: ignore[misc]

    tester = another(bare, "tester", directory)
    assert "OK" in tester.run(tests) if tests else "passed" in tester.run(block(guide, "-m pytest"))


def answer_to(terminal: Terminal, line: str) -> object:
    """Type a `curl`, and return the document of the answer."""
    found: object = json.loads(next(text for text in terminal.run(line).splitlines() if text.startswith("{")))
    return found


def shown_for(line: str) -> object:
    """Return the document that the page shows behind a `curl`."""
    found: object = json.loads(line.rpartition("# ")[2])
    return found
