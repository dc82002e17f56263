"""Making tasks: `@sidejob_task`, `@sidejob.task`, classes, hooks, and the task classes of other people."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, _state
from celery.contrib.django.task import DjangoTask
from kombu import Exchange, Queue

from celery_sidejob import (
    IllegalMoveError,
    InvalidValueError,
    Job,
    RunningJob,
    SettingsError,
    SideJob,
    SideJobTask,
    Status,
    current_job,
    sidejob_task,
)
from celery_sidejob.hooks.call_options import check_arguments
from tests.hooks.jobs import decorated
from tests.tools.apps import make_app
from tests.tools.in_process import Stage
from tests.tools.recorder import Record
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

UNTOUCHED = """
import os, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"connects to {args[1:]}")

socket.socket.connect = refuse
for name in [name for name in os.environ if name.startswith("SIDEJOB")]:
    del os.environ[name]

from celery import Celery, _state
import psycopg
psycopg.connect = psycopg.Connection.connect = refuse
from celery_sidejob import SideJob, sidejob_task
from tests.hooks.jobs import decorated

sidejob = SideJob()

@sidejob_task
def mine(job): ...

@mine.on_startup
def _(job): ...

@mine.on_shutdown
def _(job): ...

assert _state.default_app is None, "importing made an app"

app = Celery("late", set_as_current=False)
app.config_from_object("no.such.module", namespace="CELERY")  # would fail where it is read
sidejob.init_app(app)
sidejob.init_app(app)
assert app.sidejob.__dict__ is sidejob.__dict__

@sidejob.task(name="late.task", inports=["a"])
def task(job): ...

@task.on_startup
def _(job): ...

assert not app.configured, "configuration was read"
assert not app.finalized, "the app was finalized"
assert _state.default_app is None, "importing made an app"
assert not {"django.db", "django.conf", "celery_sidejob.cli"} & sys.modules.keys()
print("untouched")
"""


@pytest.fixture(autouse=True)
def shared_tasks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared tasks made in a test are not those of every app that later tests make in this process."""
    monkeypatch.setattr(_state, "_on_app_finalizers", _state._on_app_finalizers.copy())


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("decorator", broker="memory://", set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def sidejob(app: Celery, database_url: str) -> Iterator[SideJob]:
    app.conf.sidejob_database_url = database_url
    made = SideJob(app)
    yield made
    made.close()


def in_a_process(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment(variables), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- importing --------------------------------------------------------------------------------------------------------


def test_importing_touches_nothing() -> None:
    assert "untouched" in in_a_process(UNTOUCHED)


def test_importing_with_an_app_reads_no_configuration() -> None:
    program = """
from celery import Celery, _state
from celery_sidejob import SideJob
app = Celery("early", set_as_current=False)
app.config_from_object("no.such.module")
SideJob(app)
assert not app.configured and not app.finalized and _state.default_app is None
print("untouched")
"""
    assert "untouched" in in_a_process(program)


def test_one_sidejob_for_each_app(app: Celery) -> None:
    made = SideJob(app)
    made.init_app(app)
    again = SideJob(app)
    again.init_app(app)
    assert app.sidejob is made
    assert again.app is app
    with pytest.raises(SettingsError, match="another app"):
        made.init_app(Celery("other", set_as_current=False))
    with pytest.raises(SettingsError, match="init_app"):
        SideJob().enqueue("nothing")


# -- functions --------------------------------------------------------------------------------------------------------


def test_bare_and_with_options(app: Celery) -> None:
    sidejob = SideJob(app)

    @sidejob.task
    def bare(job: RunningJob) -> None:
        """Words."""

    @sidejob.task(name="named.task", inports=["a"], outports={"b": {"default": 1}}, queue="q", max_retries=7)
    def named(job: RunningJob) -> None: ...

    assert app.tasks[bare.name] is bare._get_current_object()
    assert bare.name.endswith(".bare")
    assert bare.__doc__ == "Words."
    assert (named.name, named.queue, named.max_retries) == ("named.task", "q", 7)
    assert (list(named.parsed_inports), named.parsed_outports["b"].default) == (["a"], 1)
    assert isinstance(bare, SideJobTask)
    mro = type(app.tasks["named.task"]).__mro__
    assert mro.index(SideJobTask) < mro.index(app.Task)


def test_the_shared_style_before_and_after_the_app() -> None:
    first, second = Celery("first", set_as_current=False), Celery("second", set_as_current=False)
    SideJob(first), SideJob(second)
    assert first.tasks["decorated.add"] is not second.tasks["decorated.add"]
    for app in (first, second):
        assert app.tasks["decorated.add"].app is app
        assert app.tasks["tests.hooks.jobs.decorated.bare"].__doc__ == "Its own words."

    @sidejob_task(name="shared.late")
    def late(job: RunningJob) -> None: ...

    assert {"shared.late"} <= first.tasks.keys() & second.tasks.keys()
    first.set_current()
    assert late.app is first
    second.set_current()
    assert late.app is second
    assert decorated.add.app is second
    first.close(), second.close()


def test_a_receiver_of_on_after_finalize_finds_the_tasks(app: Celery) -> None:
    found: list[str] = []
    app.on_after_finalize.connect(lambda sender, **_: found.append(made.s().task), weak=False)

    @SideJob(app).task(name="found.task")
    def made(job: RunningJob) -> None: ...

    app.finalize()
    assert found == ["found.task"]


def test_what_cannot_become_a_task_says_why(app: Celery) -> None:
    made = SideJob(app).task(lambda job: None, name="no.name")
    with pytest.raises(SyntaxError):
        made.delay()


CELERY_OPTIONS: dict[str, Any] = {
    "rate_limit": "10/m", "time_limit": 60, "soft_time_limit": 50, "ignore_result": True, "trail": False,
    "send_events": False, "serializer": "json", "compression": None, "default_retry_delay": 5, "max_retries": 9,
    "track_started": True, "acks_late": True, "reject_on_worker_lost": True, "acks_on_failure_or_timeout": True,
    "store_errors_even_if_ignored": True, "expires": 3600, "priority": 3, "throws": (KeyError,), "typing": True,
    "resultrepr_maxsize": 10, "retry_backoff": True, "retry_backoff_max": 5, "retry_jitter": False,
    "autoretry_for": (ValueError,), "dont_autoretry_for": (KeyError,), "retry_kwargs": {"max_retries": 2},
    "shared": False, "lazy": False, "routing_key": "x", "exchange": "y", "custom_attribute": object(),
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_every_option_of_celery_passes(app: Celery, shared: bool) -> None:
    sidejob = SideJob(app)
    decorate = sidejob_task if shared else sidejob.task
    name = f"options.{shared}"

    @decorate(name=name, inports=["a"], **CELERY_OPTIONS)
    def task(job: RunningJob, value: int) -> None: ...

    made = app.tasks[name]
    for option, value in CELERY_OPTIONS.items():
        if option not in {"shared", "lazy"}:
            assert getattr(made, option) == value, option
    check_arguments(made.run, name, (1,), {})
    with pytest.raises(TypeError):
        check_arguments(made.run, name, (1, 2), {})


def test_an_exchange_and_a_routing_key_lead_to_the_queue_that_is_bound_so(database_url: str) -> None:
    media = Exchange("media", type="topic")
    app = make_app(
        "addresses",
        sidejob_database_url=database_url,
        task_queues=[Queue("celery"), Queue("video", media, routing_key="media.video"), Queue("image", media, "image")],
        task_routes={"addresses.routed": {"exchange": "media", "routing_key": "image"}},
    )
    sidejob = app.sidejob
    body = _a_body
    own = sidejob.task(body, name="addresses.own", exchange="media", routing_key="media.video")
    routed = sidejob.task(body, name="addresses.routed")
    plain = sidejob.task(body, name="addresses.plain")
    try:
        assert [task.enqueue().queue for task in (own, routed, plain)] == ["video", "image", "celery"]
        assert plain.enqueue(exchange="media", routing_key="media.video").queue == "video"
        assert own.enqueue(queue="image").queue == "image"
        with pytest.raises(InvalidValueError, match="No queue of this app is bound to exchange 'media'"):
            plain.enqueue(exchange="media", routing_key="media.sound")
        assert len(sidejob.jobs()) == 5

        from_where = sidejob.runtime.tasks.delivered_from
        assert from_where({"exchange": "media", "routing_key": "media.video"}) == "video"
        assert from_where({"exchange": "", "routing_key": "image"}) == "image"
        assert from_where({"exchange": "media", "routing_key": "media.any"}) is None, "sent through a pattern"
        assert from_where({"exchange": "", "routing_key": "amq.gen-1"}) is None
        assert from_where({}) is None
    finally:
        sidejob.close()
        app.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"inports": "a"}, Exception),
        ({"inports": ["no spaces"]}, Exception),
        ({"lease_renewal": "never"}, SettingsError),
        ({"lease_renewal": "manual"}, SettingsError),
        ({"lease": 5}, SettingsError),
        ({"lease": "5", "lease_renewal": "manual"}, SettingsError),
        ({"lease": timedelta(seconds=5), "lease_renewal": "manual"}, SettingsError),
        ({"lease": 0, "lease_renewal": "manual"}, SettingsError),
        ({"max_losses": 0}, SettingsError),
        ({"on_lost": "sometimes"}, SettingsError),
    ],
)
def test_wrong_options_are_refused_where_they_stand(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        sidejob_task(name="wrong.options", **options)(_a_body)
    assert str(caught.value)


def _a_body(job: RunningJob) -> None: ...


def test_a_task_is_not_decorated_twice() -> None:
    with pytest.raises(TypeError, match="a task already"):
        sidejob_task(decorated.add)


# -- other people's task classes --------------------------------------------------------------------------------------


def test_djangos_task_class_stays() -> None:
    app = Celery("d", broker="memory://", set_as_current=False, task_cls="celery.contrib.django.task:DjangoTask")
    SideJob(app)
    made = app.tasks["decorated.add"]
    assert isinstance(made, DjangoTask)
    assert isinstance(app.tasks["decorated.classy"], DjangoTask)
    mro = type(made).__mro__
    assert mro.index(SideJobTask) < mro.index(app.Task) < mro.index(DjangoTask) < mro.index(Task)
    app.close()


def test_flasks_application_context_is_there_in_the_body(database_url: str) -> None:
    from flask import Flask, current_app, has_app_context

    flask_app = Flask("site")

    class FlaskTask(Task):
        def __call__(self, *args: object, **kwargs: object) -> object:
            with flask_app.app_context():
                return self.run(*args, **kwargs)

    app = Celery("f", broker="memory://", set_as_current=False, task_cls=FlaskTask)
    app.conf.sidejob_database_url = database_url
    sidejob = SideJob(app)

    @sidejob.task(name="flask.body")
    def body(job: RunningJob, value: int) -> list[Any]:
        return [current_app.name, value]

    @sidejob.task(name="flask.bound", bind=True)
    def bound(self: Any, job: RunningJob, value: int) -> list[Any]:
        return [current_app.name, self.name, self.request.retries, value]

    @sidejob.task(name="flask.classy")
    class Body(SideJobTask):
        def run(self, job: RunningJob, value: int) -> list[Any]:
            return [current_app.name, value]

    for task in (body, bound, Body):
        assert isinstance(task, FlaskTask)
    assert body.apply((3,)).get() == ["site", 3]
    assert bound.apply((3,)).get() == ["site", "flask.bound", 0, 3]
    assert app.tasks["flask.classy"].apply((3,)).get() == ["site", 3]
    assert body(body.enqueue((1,)), 4) == ["site", 4]
    assert not has_app_context()
    sidejob.close()
    app.close()


@pytest.mark.parametrize("through_celery", [False, True])
def test_hooks_run_in_the_surroundings_of_the_body(stage: Stage, through_celery: bool) -> None:
    from flask import Flask, current_app, has_app_context

    flask_app = Flask("site")
    seen: list[tuple[Any, ...]] = []

    class FlaskTask(Task):
        def __call__(self, *args: object, **kwargs: object) -> object:
            seen.append(("entered", args[1:], kwargs))
            with flask_app.app_context():
                return super().__call__(*args, **kwargs) if through_celery else self.run(*args, **kwargs)

    @stage.task(name="flask.hooked", base=FlaskTask)
    def hooked(job: RunningJob, value: int, *, more: int) -> str:
        return f"{current_app.name} {value}"

    @hooked.on_startup
    def _(job: RunningJob) -> None:
        seen.append(("startup", current_app.name, current_job.id))
        job.set(started=True)

    @hooked.on_shutdown
    def _(job: RunningJob) -> None:
        seen.append(("shutdown", current_app.name, current_job.id))

    @stage.task(name="flask.class", base=FlaskTask)
    class Hooked(SideJobTask):
        def startup(self, job: RunningJob) -> None:
            seen.append(("startup", current_app.name, self.name))

        def run(self, job: RunningJob) -> None:
            seen.append(("run", current_app.name, self.name))

    job = hooked.enqueue((1,), {"more": 2})
    stage.run(job)
    assert job.state == {"started": True}
    given = ("entered", (1,), {"more": 2})
    assert seen == [given, ("startup", "site", job.id), given]
    job.run()
    stage.run(job)
    job.terminate()
    assert stage.run(job) == Status.TERMINATED
    assert seen[3:] == [given, given, ("shutdown", "site", job.id)]

    seen.clear()
    job = Hooked.enqueue()
    stage.run(job)
    job.terminate()
    stage.run(job)
    entered = ("entered", (), {})
    assert seen == [entered, ("startup", "site", "flask.class"), entered, ("run", "site", "flask.class")]
    assert not has_app_context()


def test_a_base_of_ones_own(app: Celery) -> None:
    class Mine(Task):
        mark = "mine"

    sidejob = SideJob(app)
    plain = sidejob.task(base=Mine, name="base.plain")(_a_body)
    assert (plain.mark, isinstance(plain, SideJobTask)) == ("mine", True)
    classes = sidejob.task(name="base.class", base=Mine)(type("Two", (SideJobTask,), {"run": lambda self, job: None}))
    assert classes.mark == "mine"


# -- classes ----------------------------------------------------------------------------------------------------------


def test_classes_by_each_way(sidejob: SideJob) -> None:
    app = sidejob.app

    class Registered(SideJobTask):
        name = "classes.registered"
        inports = ("a",)
        outports = {"b": {"channels": ["/b"]}}

        def startup(self, job: RunningJob) -> None:
            job.set(started=True)

        def run(self, job: RunningJob, value: int) -> int:
            return value + 1

        def shutdown(self, job: RunningJob) -> None:
            job.set(shut=True)

    @sidejob.task
    class Decorated(Registered):
        name = "classes.decorated"

    registered = app.register_task(Registered())
    by_class = app.tasks["decorated.classy"]
    for task in (registered, app.tasks["classes.decorated"]):
        assert (task.app, list(task.parsed_inports), list(task.parsed_outports)) == (app, ["a"], ["b"])
        result = task.apply((41,))
        assert (result.get(), result.job.state) == (42, {"started": True})
        job = task.enqueue((1,))
        assert [port.name for port in job.inports] == ["a"]
        with pytest.raises(TypeError, match="the running job is given"):
            task.enqueue((1, 2))
        with pytest.raises(TypeError):
            task.enqueue()
    assert Decorated.name == "classes.decorated"
    assert by_class.apply((1,), {"more": 2}).get() == 3
    job = registered.apply((1,)).job.refresh()
    job.terminate()
    sidejob.app.tasks["classes.registered"]
    assert list(by_class.parsed_inports) == ["a"]


# -- calls ------------------------------------------------------------------------------------------------------------


def test_arguments_are_checked_without_the_job(sidejob: SideJob) -> None:
    tasks = sidejob.app.tasks
    bound, plain = tasks["decorated.bound"], tasks["decorated.add"]
    for call in (
        lambda: bound.delay(), lambda: bound.delay(1, 2), lambda: bound.enqueue((1,), {"other": 1}),
        lambda: bound.apply_async((1, 2)), lambda: sidejob.enqueue("decorated.bound"),
        lambda: sidejob.enqueue(bound.s(1, 2)), lambda: plain.delay(1, 2), lambda: plain.delay(nothing=1),
        lambda: bound.apply((1, 2)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="decorated"):
            call()
    assert sidejob.count_jobs() == {}


def test_typing_may_be_switched_off(sidejob: SideJob) -> None:
    @sidejob.task(name="untyped.task", typing=False)
    def untyped(job: RunningJob, value: int) -> None: ...

    assert untyped.enqueue((1, 2, 3)).args == [1, 2, 3]


def test_a_call_runs_the_body_with_the_job_that_is_given(sidejob: SideJob) -> None:
    sidejob.app.set_current()
    job = decorated.bare.enqueue((1,))
    assert decorated.bare(job, 2) == 2
    assert decorated.bare(job, value=3) == 3
    for wrong in (lambda: decorated.bare(2), lambda: decorated.bare(), lambda: decorated.Classy(1)):
        with pytest.raises(TypeError, match="delay"):
            wrong()
    assert decorated.Classy(job, 2, more=1) == 3
    assert decorated.bound.__call__ is not None
    assert job.refresh().status == Status.QUEUED, "a call is no run"


def test_enqueue_names_the_right_call(sidejob: SideJob) -> None:
    task = sidejob.app.tasks["decorated.add"]
    for call, hint in (
        (lambda: task.enqueue(2), "delay(2)"),
        (lambda: task.enqueue(2, 3), "delay(2, 3)"),
        (lambda: task.enqueue((2,), (3,)), "enqueue("),
        (lambda: task.enqueue((2,), {}, 4), "enqueue("),
        (lambda: task.enqueue("text"), "delay('text')"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert hint in str(caught.value)
    with pytest.raises(TypeError, match=r"(?s)countdwon.*Did you mean 'countdown'"):
        task.enqueue((2,), countdwon=3)
    with pytest.raises(TypeError, match="is no option"):
        task.apply_async((2,), whatever=3)
    for wrong in (task.enqueue, task.apply_async):
        with pytest.raises(
            TypeError, match=r"'scale': no option of .* argument of decorated.add. .*kwargs={'scale': ...}"
        ):
            wrong(scale=2)
    with pytest.raises(TypeError, match="args takes"):
        sidejob.enqueue(task, 2)
    with pytest.raises(TypeError, match="kwargs takes"):
        sidejob.enqueue(task, (), 2)
    assert sidejob.count_jobs() == {}


def test_a_body_that_takes_no_job_is_named_at_the_call(sidejob: SideJob) -> None:
    @sidejob.task(name="jobless")
    def jobless() -> None:
        pass

    with pytest.raises(TypeError, match="jobless: its body takes no argument, but is given the running job"):
        jobless.enqueue()
    assert sidejob.count_jobs() == {}


def test_signatures(sidejob: SideJob) -> None:
    sidejob.app.set_current()
    assert sidejob.enqueue(decorated.add.s(2)).args == [2]
    assert sidejob.enqueue(decorated.add.si(scale=3)).kwargs == {"scale": 3}
    assert sidejob.enqueue(decorated.add.s().set(queue="other")).queue == "other"
    assert sidejob.enqueue(decorated.add.s(), (4,)).args == [4]
    assert sidejob.enqueue(decorated.add.s()).queue == "math"
    assert sidejob.enqueue(sidejob.app.signature("decorated.add", (5,))).args == [5]
    assert decorated.add.s(6).delay().job.args == [6]
    assert decorated.add.s(6).apply_async(queue="x").job.queue == "x"
    again = sidejob.enqueue(json.loads(json.dumps(decorated.add.s(7))) and decorated.add.s(7))
    assert again.args == [7]
    with pytest.raises(IllegalMoveError):
        decorated.add.retry(args=(1,))


# -- jobs as values ---------------------------------------------------------------------------------------------------


def test_a_job_is_equal_hashable_and_picklable_by_its_id(sidejob: SideJob) -> None:
    job = sidejob.enqueue("decorated.add")
    again = pickle.loads(pickle.dumps(job))
    assert (again, hash(again), type(again)) == (job, hash(job), Job)
    assert again.task == "decorated.add"
    assert {job: 1}[sidejob.get(job.id)] == 1
    assert sidejob.enqueue("decorated.add", state={"other": job}).get("other") == job.id
    assert len(pickle.dumps(job)) < 200


def test_current_job(sidejob: SideJob) -> None:
    assert not current_job
    assert "outside" in repr(current_job)
    with pytest.raises(IllegalMoveError, match="outside of a run"):
        current_job.set(a=1)
    decorated.seen.clear()
    result = sidejob.app.tasks["decorated.add"].apply((2,))
    job_id = result.job.id
    assert decorated.seen == [("startup", job_id), ("run", job_id, 2, job_id)]
    assert not current_job
    assert sidejob.app.tasks["decorated.bound"].apply((2,)).get() == ["decorated.bound", True, [2], 2]


# -- spawn ------------------------------------------------------------------------------------------------------------


@CELERY_5_7
def test_workers_that_spawn(database_url: str, redis_url: str, record: Record, processes: Processes) -> None:
    env = {"SIDEJOB_DATABASE_URL": database_url, "BROKER_URL": redis_url, **record.env}
    processes.start_worker("tests.hooks.jobs.spawned", env=env, pool="prefork", concurrency=1)
    client = make_app("spawned", broker=redis_url, sidejob_database_url=database_url)
    sidejob = client.sidejob
    job = sidejob.enqueue("spawned.work")
    job.input("a").write(1)
    assert job.wait(timeout=30).status == Status.COMPLETED
    wait_until(lambda: [packet.value for packet in job.output("b").peek()] == [2], timeout=10)
    line = record.wait_for("worked", job=job.id)[-1]
    assert (line["method"], line["stopping"]) == ("spawn", False)
    assert line["pid"] != os.getpid()
    shared = sidejob.enqueue("spawned.shared").wait(timeout=10)
    assert shared.children["child"].wait(timeout=10).status == Status.COMPLETED
    client.send_task("spawned.plain")
    record.wait_for("worked", count=3)
    sidejob.close()
    client.close()
