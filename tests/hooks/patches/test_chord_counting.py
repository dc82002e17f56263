"""Celery's Redis backend counts parts, publishes the body, and forgets the chord by a script."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chord
from celery.backends.redis import RedisBackend

from celery_sidejob.hooks.patches import result_backend
from tests.hooks.patches.conftest import task_of
from tests.tools.versions import CELERY_5_7

pytestmark = [pytest.mark.filterwarnings("ignore:Call to deprecated setex"), CELERY_5_7]


def test_the_chord_is_forgotten_after_its_body_was_published(app: Celery, redis_url: str, make_worker: Any) -> None:
    assert list(inspect.signature(RedisBackend.on_chord_part_return).parameters)[:4] == [
        "self", "request", "state", "result",
    ]  # fmt: skip
    app.conf.result_backend = redis_url
    backend, done = app.backend, list[Any]()
    told: list[str] = []

    def count(request: Any, *args: Any, **options: Any) -> Any:
        told.append(f"count {args[1]}")
        return result_backend.count_part(backend, request, *args, tell=pytest.fail, forget=forget, **options)

    def forget(before: Callable[..., Any], *, keys: Any, args: Any, client: Any) -> Any:
        told.append("forget")
        assert backend.client.get(keys[0]).decode() == args[0], "the claim is named first"
        assert backend._chord_claim_extend_script(keys=[keys[0], keys[3]], args=[args[0], 10], client=client)
        counted, size = (backend.get_key_for_group(group[0], end) for end in (".j", ".s"))
        assert {counted, size} <= set(keys)
        assert (client.zcard if backend._chord_zset else client.llen)(counted) == 2
        done.append(before(keys=keys, args=args, client=client))
        assert not client.exists(counted)
        return done[-1]

    backend.remove_pending_result = lambda result: result  # results unsubscribe when they go, perhaps after Redis
    result_backend.count_by(backend, count=count)
    result_backend.count_by(backend, count=count)
    part = task_of(app, "part", lambda number: number)
    body = task_of(app, "body", lambda numbers: told.append(f"body {numbers}"))

    result = chord([part.s(1), part.s(2)], body.s(), app=app).apply_async()
    group = [result.parent.id]
    make_worker().run()

    assert told[:3] == ["count 1", "count 2", "forget"]
    assert done == [1]
    backend.client.close()


def test_other_backends_are_left_alone(app: Celery) -> None:
    before = dict(vars(app.backend))

    result_backend.count_by(app.backend, count=pytest.fail)

    assert vars(app.backend) == before
