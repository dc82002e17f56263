"""Jobs of `enqueue_many` that are drawn up after others: each as if it were made by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import signals

from celery_sidejob import InvalidValueError
from celery_sidejob.jobs import drafts
from tests.tools.in_process import Stage
from tests.tools.looking import looking

QUOTED = 'a "quoted" \\ %(id)s %s \N{SNOWMAN} \N{PILE OF POO}\n'
OPTIONS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "columns": {"queue": "maths", "priority": 3, "created_by": "me"},
    "of Celery": {"link": {"task": "stage.call", "args": [1]}, "headers": {"mine": QUOTED}, "expires": 60},
    "later": {"eta": datetime.now(UTC) + timedelta(days=1)},
    "other tables": {"state": {"a": [QUOTED]}, "tags": ["x"], "inports": {"in": {"default": 1}}, "outports": ["out"]},
}
CALLS: list[tuple[Any, Any]] = [
    ((1,), {}), ([], None), (None, {"a": QUOTED}), (({"__type__": 1, "__value__": 2},), {"when": datetime(2026, 1, 1)}),
]  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tasks of jobs that were drawn up by themselves."""
    seen: list[Any] = []
    draft = drafts.draft

    def noting(runtime: Any, task: Any, *args: Any, **options: Any) -> Any:
        seen.append(task)
        return draft(runtime, task, *args, **options)

    monkeypatch.setattr(drafts, "draft", noting)
    return seen


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_is_as_if_made_by_itself(stage: Stage, drawn: list[Any], kind: str) -> None:
    @stage.sidejob.task(name="stage.any")
    def any_arguments(job: Any, *args: Any, **kwargs: Any) -> None:
        pass

    options = OPTIONS[kind]
    alone = [stage.sidejob.enqueue("stage.any", args or (), kwargs, **options) for args, kwargs in CALLS]

    drawn.clear()
    many = stage.sidejob.enqueue_many(
        {"task": any_arguments, "args": args, "kwargs": kwargs, **options} for args, kwargs in CALLS
    )

    assert len(drawn) == 1
    assert len({job.task_id for job in alone + many}) == 2 * len(CALLS)
    for one, other in zip(alone, many, strict=True):
        info, expected = ({**job.info, "id": 0, "task_id": "", "created_at": None} for job in (one, other))
        assert info == expected
    assert [options_of(stage, job) for job in alone] == [options_of(stage, job) for job in many]


def options_of(stage: Stage, job: Any) -> Any:
    return stage.sql("SELECT options::text FROM sidejob.askings WHERE job_id = %s", job.id)


def test_signatures_are_drawn_up_once_too(stage: Stage, drawn: list[Any]) -> None:
    @stage.sidejob.task(name="stage.any")
    def any_arguments(job: Any, number: int) -> None:
        pass

    jobs = stage.sidejob.enqueue_many(any_arguments.s(number).set(priority=number % 2) for number in (0, 2, 4, 1))

    assert [(job.args, job.info["priority"]) for job in jobs] == [([0], 0), ([2], 0), ([4], 0), ([1], 1)]
    assert len(drawn) == 2


def test_jobs_of_single_calls_are_drawn_up_once_too(stage: Stage, drawn: list[Any]) -> None:
    @stage.sidejob.task(name="stage.any")
    def any_arguments(job: Any, *args: Any, **kwargs: Any) -> None:
        pass

    with looking():
        alone = [any_arguments.enqueue(args or (), kwargs) for args, kwargs in CALLS]
    assert len(drawn) == len(CALLS), "somebody may look at each"

    drawn.clear()
    jobs = [any_arguments.enqueue(args or (), kwargs) for args, kwargs in CALLS]
    results = [any_arguments.apply_async(args, kwargs) for args, kwargs in CALLS]

    assert len(drawn) == 2, "one with the options that apply_async has from its task"
    for one, job, result in zip(alone, jobs, results, strict=True):
        infos = [{**each.info, "id": 0, "task_id": "", "created_at": None} for each in (one, job, result.job)]
        assert infos[0] == infos[1] == infos[2]


def test_what_a_task_and_its_app_say_later_counts(stage: Stage, drawn: list[Any]) -> None:
    @stage.sidejob.task(name="stage.any")
    def any_arguments(job: Any) -> None:
        pass

    task = stage.app.tasks["stage.any"]
    for _ in range(2):
        any_arguments.enqueue()
    task.max_losses, task.priority = 7, 3
    jobs = [any_arguments.enqueue() for _ in range(2)]
    stage.app.conf.task_default_queue = "others"
    jobs += [any_arguments.enqueue() for _ in range(2)]

    assert len(drawn) == 3
    losses = stage.sql("SELECT max_losses FROM sidejob.jobs WHERE id = ANY(%s)", [job.id for job in jobs])
    assert losses == [(7,)] * 4
    assert [(job.queue, job.info["priority"]) for job in jobs] == [("celery", 3)] * 2 + [("others", 3)] * 2


def test_single_calls_with_what_is_their_own_are_drawn_up_by_themselves(stage: Stage, drawn: list[Any]) -> None:
    stage.job()
    stage.job()
    assert len(drawn) == 1

    for options in ({"tags": ["x"]}, {"unique": "key"}, {"countdown": 5}, {"task_id": "mine"}, {"aliases": ["one"]}):
        stage.job(**options)
    with stage.sidejob.batch("batch"):
        stage.job()
    stage.inside(lambda job: stage.job())

    assert drawn[1:] == [stage.idle] * 6 + [stage.call, stage.idle], (
        "of the last two the outer one is the first of its task"
    )


@pytest.mark.parametrize("options", [{"priority": True}, {"state": {"a": True}}])
def test_options_that_are_merely_equal_are_looked_at(stage: Stage, options: Any) -> None:
    first = {key: 1 if value is True else {"a": 1} for key, value in options.items()}

    if "priority" in options:
        with pytest.raises(InvalidValueError, match=r"items\[1\] of enqueue_many\(\): priority"):
            stage.sidejob.enqueue_many([{"task": "stage.call", "args": [1], **given} for given in (first, options)])
    else:
        _, second = stage.sidejob.enqueue_many([{"task": "stage.call", "args": [1], **one} for one in (first, options)])
        assert second.state["a"] is True


@pytest.mark.parametrize("args", [(1, 2, 3), (object(),), "text"])
def test_wrong_arguments_are_named_by_their_place(stage: Stage, args: Any) -> None:
    with pytest.raises((TypeError, InvalidValueError), match=r"^items\[1\] of enqueue_many\(\): "):
        stage.sidejob.enqueue_many([{"task": "stage.call", "args": [1]}, {"task": "stage.call", "args": args}])

    assert stage.sidejob.jobs() == []


def by_a_receiver(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals.before_task_publish, "receivers", [(("mine", 0), lambda **_: None)])


def by_a_route(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    amqp = stage.app.amqp
    stage.app.conf.task_routes = [lambda name, args, kwargs, options, task=None: {"queue": f"of-{args[0]}"}]
    monkeypatch.setattr(amqp, "_rtable", None)
    monkeypatch.setattr(amqp, "router", amqp.Router())


def by_names(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looks, but each has a key of its own."""


LOOKS: dict[str, tuple[Callable[..., None], Mapping[str, Any]]] = {
    "a receiver": (by_a_receiver, {}),
    "a route": (by_a_route, {}),
    "a unique key": (by_names, {"unique": "key", "on_duplicate": "return"}),
}


@pytest.mark.parametrize("look", LOOKS)
def test_each_is_drawn_up_by_itself_where_something_looks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, drawn: list[Any], look: str
) -> None:
    prepare, options = LOOKS[look]
    prepare(stage, monkeypatch)

    stage.sidejob.enqueue_many([{"task": "stage.call", "args": [number], **options} for number in range(3)])

    assert len(drawn) == 3
