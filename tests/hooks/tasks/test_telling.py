"""What became of a run is told once, and truly, whatever befalls the result backend, the store or Celery meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from celery import Task, chord, states
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_sidejob import JobFailed
from celery_sidejob.hooks.messages import carried
from celery_sidejob.hooks.tasks import results
from celery_sidejob.hooks.tasks.present import RUNS
from celery_sidejob.operations.ledger import durable_ends
from celery_sidejob.services.sweep.sweeper import Sweeper
from tests.hooks.tasks.test_stale_runs import REPEATABLE, Shop, shop_fixture  # noqa: F401 - the fixture `shop`
from tests.tools.databases import SCHEMA
from tests.tools.proxy import TcpProxy
from tests.tools.versions import CELERY_5_7

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8

LONE, NUL = "\ud83d", "\x00"


@contextmanager
def behind_a_proxy(shop: Shop, redis_url: str) -> Iterator[TcpProxy]:
    """Have the result backend behind a proxy, and do what fails there only once."""
    with TcpProxy.to(redis_url) as proxy:
        once = Retry(NoBackoff(), 0)
        shop.app.backend.client = redis.Redis.from_url(proxy.url_for(redis_url), retry=once)
        yield proxy


def noted() -> Exception:
    error = ValueError("noted")
    error.add_note(f"{LONE}{NUL}")
    return error


def caused() -> Exception:
    error = ValueError("caused")
    error.__cause__ = KeyError(f"{LONE}{NUL}")
    return error


ERRORS: dict[str, tuple[Callable[[], Exception], str, str | None]] = {
    "a lone surrogate": (lambda: ValueError(f"cannot parse {LONE}"), r"ValueError: cannot parse \ud83d", None),
    "NUL": (lambda: ValueError(f"cannot parse {NUL}"), "ValueError: cannot parse \ufffd", None),
    "a note": (noted, "ValueError: noted", None),
    "a cause": (caused, "ValueError: caused", None),
    "a group": (lambda: JobFailed("no stock", LONE), r"JobFailed: \ud83d", "no stock"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("backend", ["redis", "database"])
def test_an_error_whose_text_cannot_be_stored_ends_its_run(
    shop: Shop, caplog: pytest.LogCaptureFixture, backend: str, name: str
) -> None:
    caplog.set_level("CRITICAL", "celery.app.trace")  # pytest cannot report such texts
    make, text, group = ERRORS[name]
    if backend == "database":
        shop.app.conf.result_backend = "db+" + shop.url.replace("postgresql://", "postgresql+psycopg://")
    result = shop.work.apply_async(link_error=shop.errback.s())
    shop.outcome = make()

    shop.run(shop.work, result.id)

    assert (result.state, type(result.result), shop.told) == (states.FAILURE, type(shop.outcome), [result.id])
    assert shop.sql("SELECT reason, error, given_group FROM dead") == [("failed", text, group)]
    assert shop.rows() == []


def test_a_retry_for_such_an_error_is_a_retry(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "celery.app.trace")

    def again(self: Any) -> None:
        raise self.retry(exc=ERRORS["a note"][0](), countdown=3600)

    task = shop.app.task(again, bind=True, name="stale.again", shared=False)
    result = task.delay()

    shop.run(task, result.id)

    assert (result.state, shop.rows(), shop.buried()) == (states.RETRY, [(False, None)], [])


def test_an_end_that_the_store_refuses_becomes_one_that_it_takes(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.sql("ALTER TABLE dead ADD CONSTRAINT nothing_odd CHECK (error NOT LIKE '%odd%')")
    result = shop.work.delay()
    shop.outcome = ValueError("odd")

    shop.run(shop.work, result.id)

    assert (result.state, shop.rows()) == (states.FAILURE, [])
    ((error,),) = shop.sql("SELECT error FROM dead")
    assert error.startswith("InvalidValueError: The run ended with ValueError, and that cannot be stored")
    assert "nothing_odd" in caplog.text


@pytest.mark.parametrize("code", ["42501", "42P01"], ids=["a right", "a table"])
@pytest.mark.parametrize("outcome", [7, ValueError("for good")], ids=["well", "failed"])
def test_an_end_waits_for_what_the_schema_lacks_for_a_moment(shop: Shop, outcome: Any, code: str) -> None:
    """As while somebody restores the store, or gives its rights anew."""
    shop.sql("CREATE SEQUENCE tries")
    shop.sql(
        "CREATE FUNCTION lacks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('{SCHEMA}.tries') < 3 THEN RAISE EXCEPTION 'lacks' USING ERRCODE = '{code}'; END IF; "
        "RETURN OLD; END $$"
    )
    result = shop.work.apply_async(link=shop.body.s())
    shop.sql("CREATE TRIGGER lacks BEFORE DELETE ON messages FOR EACH ROW EXECUTE FUNCTION lacks()")
    shop.outcome = outcome

    shop.run(shop.work, result.id)

    ends = ([("stale.body",)], []) if outcome == 7 else ([], ["failed"])
    assert (shop.sql("SELECT task FROM messages"), shop.buried()) == ends


@pytest.mark.parametrize("outcome", [7, ValueError("for good")], ids=["well", "failed"])
def test_what_the_backend_has_and_cannot_read_is_replaced(shop: Shop, outcome: Any) -> None:
    result = shop.work.apply_async(link=shop.body.s(), link_error=shop.errback.s())
    shop.outcome, shop.meanwhile = outcome, lambda: garble(shop, result.id)

    shop.run(shop.work, result.id)

    if outcome == 7:
        assert (result.state, result.result, shop.told, shop.buried()) == (states.SUCCESS, 7, [], [])
        assert shop.sql("SELECT task FROM messages") == [("stale.body",)]
    else:
        assert (result.state, shop.told, shop.buried()) == (states.FAILURE, [result.id], ["failed"])


def test_what_the_backend_has_and_cannot_read_is_replaced_for_a_lost_run(shop: Shop) -> None:
    result = shop.once.apply_async(link_error=shop.errback.s())

    def lose() -> None:
        garble(shop, result.id)
        shop.lose()
        Sweeper(shop.runtime).run_once()
        assert (result.state, shop.told, shop.buried()) == (states.FAILURE, [result.id], ["lost"])

    shop.outcome, shop.meanwhile = ValueError("too late"), lose
    shop.run(shop.once, result.id)


def garble(shop: Shop, task_id: str) -> None:
    """Have the backend keep what a worker with another `result_serializer` has stored there."""
    shop.app.backend.client.set(shop.app.backend.get_key_for_task(task_id), b"\x80\x04 a pickle")


def test_memory_that_runs_out_once_at_the_end_of_a_run_is_not_its_outcome(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, tries = durable_ends.end, iter([MemoryError()])

    def scarce(*args: Any) -> None:
        for error in tries:
            raise error
        end(*args)

    monkeypatch.setattr(durable_ends, "end", scarce)
    result = shop.work.apply_async(link=shop.body.s())

    shop.run(shop.work, result.id)

    assert (result.state, shop.buried()) == (states.SUCCESS, [])
    assert shop.sql("SELECT task FROM messages") == [("stale.body",)]


@pytest.mark.parametrize("hook", ["on_failure", "on_retry"])
def test_a_hook_that_raises_changes_no_outcome(shop: Shop, hook: str) -> None:
    def raises(*_: Any) -> None:
        raise RuntimeError("the hook is broken")

    def body(self: Any) -> None:
        if hook == "on_retry":
            raise self.retry(countdown=3600)
        raise ValueError("for good")

    base = type("Hooked", (Task,), {hook: raises})
    task = shop.app.task(body, bind=True, base=base, name="stale.hooked", shared=False)
    result = task.apply_async(link_error=shop.errback.s())

    with pytest.warns(RuntimeWarning, match="Exception raised outside body"), suppress(RuntimeError):
        shop.run(task, result.id)

    if hook == "on_retry":
        assert (result.state, shop.told, shop.rows()) == (states.RETRY, [], [(False, None)])
        assert shop.buried() == []
    else:
        assert (result.state, shop.told, shop.rows()) == (states.FAILURE, [result.id], [])
        assert shop.sql("SELECT reason, error FROM dead") == [("failed", "ValueError: for good")]


def test_a_hook_that_leaves_its_process_changes_no_outcome(shop: Shop) -> None:
    def leaves(*_: Any) -> None:
        sys.exit(3)

    def body(self: Any) -> None:
        raise ValueError("for good")

    base = type("Leaving", (Task,), {"on_failure": leaves})
    task = shop.app.task(body, bind=True, base=base, name="stale.leaving", **REPEATABLE)
    result = task.apply_async(link_error=shop.errback.s())

    with suppress(SystemExit):
        shop.run(task, result.id)

    assert (result.state, shop.told, shop.rows()) == (states.FAILURE, [result.id], [])
    assert shop.sql("SELECT reason, error FROM dead") == [("failed", "ValueError: for good")]


@pytest.mark.parametrize("of", ["a task", pytest.param("a chord", marks=CELERY_5_7)])
def test_an_errback_that_cannot_be_sent_yet_has_no_other_repeated(shop: Shop, of: str) -> None:
    sent: list[str] = []

    class Away(Task):
        def apply_async(self, *_: Any, task_id: str, **__: Any) -> None:
            sent.append(task_id)
            if len(sent) < 3:
                raise OperationalError("the broker is away")

    def note(task_id: str) -> None: ...

    plain = shop.app.task(note, base=Away, name="plain.note", shared=False)
    errbacks = [shop.errback.s(), plain.s()]
    if of == "a task":
        result = part = shop.work.apply_async(link_error=errbacks)
    else:
        body = shop.body.s()
        for errback in errbacks:
            body.link_error(errback)
        result = chord([shop.work.s()], body).apply_async()
        (part,) = result.parent.results
    shop.outcome = ValueError("for good")

    shop.run(shop.work, part.id)

    assert (len(sent), shop.told, shop.rows()) == (3, [result.id], [])
    assert "for good" in str(result.result)
    assert shop.sql("SELECT reason, error FROM dead") == [("failed", "ValueError: for good")]


def test_a_run_begins_whose_backend_cannot_be_told_so(shop: Shop, redis_url: str) -> None:
    def body() -> None:
        shop.meanwhile()

    task = shop.app.task(body, name="stale.started", track_started=True, shared=False)
    with behind_a_proxy(shop, redis_url) as proxy:
        result = task.apply_async(link_error=shop.errback.s())
        proxy.refuse()
        shop.meanwhile = proxy.pass_through

        shop.run(task, result.id)

        assert (result.state, shop.told, shop.rows(), shop.buried()) == (states.SUCCESS, [], [], [])


def test_a_result_is_given_up_whose_backend_is_away_for_longer_than_a_lease(shop: Shop, redis_url: str) -> None:
    object.__setattr__(shop.runtime.settings, "lease", 0.5)
    with behind_a_proxy(shop, redis_url) as proxy:
        result = shop.work.apply_async(link=shop.body.s())
        shop.outcome, shop.meanwhile = 7, proxy.refuse

        shop.run(shop.work, result.id)

        assert shop.sql("SELECT task FROM messages") == [("stale.body",)]
        assert shop.buried() == []


@CELERY_5_7  # before, there was no claim
def test_a_chord_whose_backend_was_away_for_a_moment_has_not_failed(shop: Shop, redis_url: str) -> None:
    with behind_a_proxy(shop, redis_url) as proxy:
        value = chord([shop.work.s()], shop.body.s()).apply_async(link_error=shop.errback.s())
        (part,) = value.parent.results
        shop.outcome = 7
        shop.meanwhile = lambda: proxy.cut_after(b"ZRANGE")  # all parts are counted, and are to be joined

        shop.run(shop.work, part.id)

        assert proxy.cut_done.is_set()
        assert (part.state, shop.told, shop.buried()) == (states.SUCCESS, [], [])
        assert shop.sql("SELECT task FROM messages") == [("stale.body",)]
        shop.meanwhile = lambda: None
        shop.run(shop.body, value.id)
        assert (value.get(timeout=5), shop.args) == (7, ([7],))


@CELERY_5_7  # before, parts are looked for in the backend of the current app
def test_a_chord_s_body_takes_results_of_any_size(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of a call would end the chord."""
    value = chord([shop.work.s()], shop.body.s()).apply_async()
    (part,) = value.parent.results
    monkeypatch.setattr(carried, "MOST_BYTES", 1000)
    shop.outcome = "x" * 1000

    shop.run(shop.work, part.id)
    shop.run(shop.body, value.id)

    assert shop.args == ([shop.outcome],)


@CELERY_5_7  # before, there was no claim
@pytest.mark.parametrize(("when", "state"), [("in its body", states.FAILURE), ("while it is told", states.SUCCESS)])
def test_a_part_whose_chord_has_failed_for_it_stays_in_the_dead_set(shop: Shop, when: str, state: str) -> None:
    value = chord([shop.once.s()], shop.body.s()).apply_async(link_error=shop.errback.s())
    (part,) = value.parent.results

    def lose() -> None:
        shop.lose()
        Sweeper(shop.runtime).run_once()

    def lose_when_told() -> None:
        def count(*args: Any, **options: Any) -> Any:
            del shop.app.backend.on_chord_part_return
            shop.app.backend.forget(part.id)
            lose()
            shop.app.backend.store_result(part.id, 7, states.SUCCESS)
            return shop.app.backend.on_chord_part_return(*args, **options)

        shop.app.backend.on_chord_part_return = count

    shop.outcome, shop.meanwhile = 7, lose if when == "in its body" else lose_when_told
    shop.run(shop.once, part.id)

    assert (value.state, part.state, shop.buried()) == (states.FAILURE, state, ["lost"])


@CELERY_5_7  # before, the body is kept while the backend counts
def test_a_chord_is_not_forgotten_for_an_end_that_was_never_applied(shop: Shop, monkeypatch: Any) -> None:
    """The answer to it was lost, and meanwhile the row was given to another run: that one has the body."""
    monkeypatch.setattr(results, "CLAIM_S", 1)
    value = chord([shop.work.s()], shop.body.s()).apply_async()
    (part,) = value.parent.results
    count = shop.app.backend.on_chord_part_return

    def count_and_lose(*args: Any, **options: Any) -> None:
        shop.meanwhile = lambda: None
        results.install_counting(shop.app.backend)
        shop.app.backend.on_chord_part_return(*args, **options)
        RUNS[part.id].end_is_unknown = True
        shop.lose()
        assert shop.begin_elsewhere(part.id)

    def meanwhile() -> None:
        def once(*args: Any, **options: Any) -> None:
            del shop.app.backend.on_chord_part_return
            count_and_lose(*args, **options)

        shop.app.backend.on_chord_part_return = once

    shop.outcome, shop.meanwhile = 7, meanwhile
    shop.run(shop.work, part.id)
    assert (count.__func__, shop.rows()) == (type(shop.app.backend).on_chord_part_return, [(True, None)])

    shop.lose()
    shop.run(shop.work, part.id)
    assert shop.sql("SELECT task FROM messages") == [("stale.body",)]
