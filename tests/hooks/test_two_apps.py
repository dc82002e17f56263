"""Processes with threads, and with several apps: a task and a handle find the app that is meant."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_sidejob import Job, SettingsError, SideJob
from tests.tools.apps import make_app
from tests.tools.in_process import Stage

ROOT = Path(__file__).parents[2]


def say(source: str) -> list[str]:
    """Run Python of its own, for there a process has no apps but those that it makes; returns the lines it prints."""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


THREADS = """
import threading
from celery import Celery
from celery_sidejob import SideJob, sidejob_task

@sidejob_task(name="shop.add")
def add(job, value):
    pass

def app(name):
    made = Celery(name, broker="memory://")
    made.conf.sidejob_database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    SideJob(made)
    return made

def look():
    print(add.app.main)

def in_a_thread():
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
"""


def test_a_task_that_is_used_in_another_thread_is_that_of_the_only_app() -> None:
    assert say(f"{THREADS}\nshop = app('shop'); look(); in_a_thread()") == ["shop", "shop"]


def test_an_app_without_jobs_beside_it_does_not_count() -> None:
    assert say(f"{THREADS}\nshop = app('shop'); other = Celery('other'); in_a_thread(); look()") == ["shop", "shop"]


def test_of_several_apps_the_current_one_is_meant() -> None:
    source = f"{THREADS}\nfirst, second = app('first'), app('second'); first.set_default(); look(); in_a_thread()"
    assert say(source) == ["second", "first"]


def test_to_use_a_task_makes_no_app() -> None:
    source = f"{THREADS}\nfrom celery import _state\nshop = app('shop'); in_a_thread(); print(_state.default_app)"
    assert say(source) == ["shop", "None"]


# -- handles that were pickled ---------------------------------------------------------------------------------------


@pytest.fixture
def other(database_url: str) -> Iterator[SideJob]:
    """The SideJob of another app, made after the stage's, with a store of its own."""
    made = make_app("other", sidejob_database_url=database_url)
    sidejob = made.sidejob

    @sidejob.task(name="other.work", shared=False)
    def work(job: Any) -> None:
        pass

    yield sidejob
    sidejob.close()
    made.close()


def passed(job: Job) -> Job:
    return pickle.loads(pickle.dumps(job))


@pytest.mark.parametrize("how", [passed, lambda job: passed(passed(job))], ids=["once", "twice"])
def test_a_handle_finds_the_store_of_its_own_app(stage: Stage, other: SideJob, how: Callable[[Job], Job]) -> None:
    stage.app.main = "first"  # else it has the name of other tests' apps
    here, there = stage.job(), other.enqueue("other.work")
    assert here.id == there.id, "the same number in both"
    assert (how(here).task, how(there).task) == ("stage.idle", "other.work")
    assert how(here) == here


def test_a_handle_of_an_app_that_is_not_here_is_refused(stage: Stage, other: SideJob) -> None:
    stage.app.main = "gone"
    job = passed(stage.job())
    stage.app.main = "renamed"
    with pytest.raises(SettingsError, match="comes from the app 'gone' with the schema 'sidejob'"):
        job.refresh()


BEFORE_ITS_APP = """
from celery_sidejob import SettingsError, sidejob_task

@sidejob_task(name="shop.add")
def add(job, value):
    pass

for call in add.enqueue, add.delay:
    try:
        call((1,))
    except SettingsError as error:
        print(error)
"""


def test_an_app_without_jobs_is_named_as_the_cause_where_it_is_the_default_app() -> None:
    said = say(f"from celery import Celery\nCelery('shop').set_default()\n{BEFORE_ITS_APP}")
    assert said == ["shop.add is a sidejob task, but its app has no SideJob: call SideJob(app)."] * 2


def test_a_task_whose_app_nobody_has_imported_names_that_as_the_cause() -> None:
    said = say(BEFORE_ITS_APP)
    assert len(said) == 2
    for line in said:
        assert line.startswith("shop.add is a sidejob task, but nobody has imported the module with your app: ")
        assert line.endswith("in the project's __init__.py, with `from .celery import app as celery_app`.")
