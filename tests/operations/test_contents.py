"""A delivery that does not run is forged where it has the id of a row, and is not what the row has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_sidejob.model.durable import Content, Terms, digest_of
from celery_sidejob.operations.ledger import durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run, is_forged
from celery_sidejob.store import workers
from tests.tools.contents import content_of
from tests.tools.in_process import Stage


@pytest.fixture
def kept(stage: Stage) -> Iterator[Content]:
    """What the row of the task `mine` has."""

    @stage.app.task(name="mail", durable=True, shared=False)
    def mail(*args: object) -> None:
        pass

    mail.apply_async(("true",), task_id="mine")
    stage.runtime.connections.write_behind_now()
    yield content_of(stage.runtime, "mine")
    stage.sql("DELETE FROM messages")


def test_what_is_not_of_its_row_is_forged(stage: Stage, kept: Content, caplog: pytest.LogCaptureFixture) -> None:
    key = ("mine", 1)
    assert not is_forged(stage.runtime, key, kept)
    assert is_forged(stage.runtime, key, Content("other", kept.digest))
    assert "it would run other, and the task is mail" in caplog.text
    assert is_forged(stage.runtime, key, Content("mail", digest_of(b"other arguments")))
    assert "it would run mail, and the task is mail with another body" in caplog.text


@pytest.mark.parametrize("forged", [{"task": "other"}, {"digest": digest_of(b"other")}], ids=["task", "body"])
def test_what_is_not_of_its_row_locks_nothing(stage: Stage, kept: Content, forged: dict[str, str]) -> None:
    run = Run(("mine", 1), "mail", workers.register(stage.runtime.connections, "test:contents"), stage.runtime, kept)

    def begins() -> bool:
        return durable_runs.begin(stage.runtime, run, terms=Terms(1, "dead", 3), is_here=False)

    run.content = kept._replace(**forged)
    assert not begins()
    assert stage.sql("SELECT 1 FROM messages WHERE locked_by IS NOT NULL") == []
    run.content = kept
    assert begins()


def test_a_copy_of_an_earlier_generation_or_of_what_is_gone_is_not_forged(stage: Stage, kept: Content) -> None:
    """A retry may have other arguments."""
    retried = Content("mail", digest_of(b"before the retry"))
    stage.sql("UPDATE messages SET generation = 2")
    assert not is_forged(stage.runtime, ("mine", 1), retried)
    assert is_forged(stage.runtime, ("mine", 2), retried)
    stage.sql("DELETE FROM messages")
    assert not is_forged(stage.runtime, ("mine", 2), retried)
