"""What whoever reaches the broker can do with the id of a task that waits: run nothing under it, and end nothing.

The true message waits in a queue that nobody serves, so that the worker is given forged ones first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.compression import compress

from celery_sidejob.model.durable import HEADER, digest_of
from tests.acceptance.durable_site import APP, TIMEOUT_S
from tests.acceptance.durable_site import Site as OneTest
from tests.acceptance.shared_site import Place
from tests.tools.brokers import APART
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess

pytestmark = pytest.mark.brokers(
    "sidejob", "amqp", only=APART, reason="is the store: a message is a reference, and who can forge one has the rows"
)

ASIDE = "aside"
"""A queue that no worker serves."""


@dataclass(frozen=True)
class Sent:
    """A message in the broker: its body, not compressed, and what goes around that."""

    body: bytes
    headers: Mapping[str, Any]
    content_type: str
    content_encoding: str
    properties: Mapping[str, Any]

    def saying(self, *args: Any) -> Sent:
        """The same with other arguments."""
        _, kwargs, embed = json.loads(self.body)
        return replace(self, body=json.dumps([args, kwargs, embed]).encode())

    def telling(self, **options: Any) -> Sent:
        """The same with other arguments, and options in its body, which Celery puts before what the headers say."""
        _, kwargs, embed = json.loads(self.body)
        return replace(self, body=json.dumps([["forged"], kwargs, {**embed, **options}]).encode())

    def headed(self, **headers: Any) -> Sent:
        """The same with other headers."""
        return replace(self, headers={**self.headers, **headers})


class Site(OneTest):
    """A worker that serves one queue, for all tests of the module."""

    process: WorkerProcess

    def __init__(self, place: Place) -> None:
        super().__init__(place.database_url, place.broker, place.record, place.processes)
        self.app.conf.sidejob_lost_after = 600
        # Or the sweeper would miss the true message, and publish it again.
        self.process = self.worker(concurrency=1, env={"SIDEJOB_LOST_AFTER": "600"})

    def taken(self) -> Sent:
        """Take the true message of a task out of the queue that nobody serves."""
        with Connection(self.broker_url) as connection:
            message = Queue(ASIDE, channel=connection.default_channel).get(no_ack=True)
        assert message is not None
        body = message.body if isinstance(message.body, bytes) else message.body.encode()
        properties = {key: message.properties[key] for key in ("correlation_id", "reply_to")}
        return Sent(body, message.headers, message.content_type, message.content_encoding, properties)

    def send(self, message: Sent) -> None:
        """Give a message to the worker, compressed as it says."""
        codec = message.headers.get("compression")
        body = compress(message.body, codec)[0] if codec else message.body
        with Connection(self.broker_url) as connection:
            connection.Producer().publish(
                body, routing_key="durable", headers=dict(message.headers), content_type=message.content_type,
                content_encoding=message.content_encoding, **message.properties,
            )  # fmt: skip

    def wait_until_seen(self, marker: str) -> None:
        """Wait until the worker has done with all that it was given before."""
        assert self.call("noted", marker).get(timeout=TIMEOUT_S) == marker
        wait_until(lambda: self.queued() == 0, timeout=TIMEOUT_S, message="all messages to be fetched")


@pytest.fixture(scope="module")
def site(shared_place: Place) -> Iterator[Site]:
    """A store, a broker, a record and a worker."""
    made = Site(shared_place)
    yield made
    assert made.process.alive
    made.close()


FORGED: dict[str, tuple[str, Callable[[Sent], Sent], Mapping[str, Any]]] = {
    "other arguments": ("noted", lambda true: true.saying("forged"), {}),
    "other arguments, compressed": ("noted", lambda true: true.saying("forged"), {"compression": "zlib"}),
    "other arguments, and a compression": ("noted", lambda true: true.saying("forged").headed(compression="zlib"), {}),
    "other arguments, of a task that may be repeated": ("step", lambda true: true.saying("forged"), {}),
    "other arguments, as if never kept": (
        "noted", lambda true: replace(true.saying("forged"), headers={
            key: value for key, value in true.headers.items() if key != HEADER
        }), {},
    ),
    "another task": ("noted", lambda true: true.headed(task=f"{APP}.noted_late"), {}),
    "a task that is not durable": ("noted", lambda true: true.headed(task=f"{APP}.plain"), {"ignore_result": True}),
    "a task that is not durable and fails": (
        "noted", lambda true: true.headed(task=f"{APP}.plain_failing").saying(), {"ignore_result": True}
    ),
    "a task that nobody knows": ("noted", lambda true: true.headed(task="no.such"), {}),
    "no body that can be read": ("noted", lambda true: replace(true, body=b"[", content_type="application/json"), {}),
    "an expiry that is over": ("noted", lambda true: true.headed(expires="2020-01-01T00:00:00+00:00"), {}),
    "an identity to lock under": ("noted", lambda true: true.saying("forged").headed(
        sidejob_worker=1, sidejob_digest=digest_of(true.body)), {}),
    "the true digest in its body": ("noted", lambda true: true.telling(sidejob_digest=digest_of(true.body)), {}),
    "another task, which its body calls the true one": ("noted", lambda true: true.headed(
        task=f"{APP}.noted_late").telling(task=f"{APP}.noted", sidejob_digest=digest_of(true.body)), {}),
    "a task that is not durable, whose body calls it the true one": ("noted", lambda true: true.headed(
        task=f"{APP}.plain").telling(task=f"{APP}.noted", sidejob_digest=digest_of(true.body)),
        {"ignore_result": True}),
    "a body that says it runs in its caller's process": ("noted", lambda true: true.telling(is_eager=True), {}),
    "what looks like a run": ("step", lambda true: true.saying("forged").headed(
        sidejob_run=[], headers="x"), {}),
    "a body that says it has no row": ("noted", lambda true: true.telling(sidejob_durable=None), {}),
}  # fmt: skip


TOLD = FORGED.keys() - {
    "other arguments, as if never kept", "a task that nobody knows", "no body that can be read",
    "an expiry that is over", "the true digest in its body", "another task, which its body calls the true one",
    "a body that says it runs in its caller's process", "what looks like a run", "a body that says it has no row",
}  # fmt: skip
"""Those that come to a lock, or to an end without one."""


@pytest.mark.few(12)
@pytest.mark.parametrize("how", FORGED)
def test_a_forged_copy_runs_nothing_and_the_true_message_goes_on(site: Site, how: str) -> None:
    task, forge, options = FORGED[how]
    result = site.call(task, "true", queue=ASIDE, **options)
    true = site.taken()
    site.send(forge(true))
    site.wait_until_seen(how)

    if how in TOLD:
        site.process.wait_for_log(f"A message with the id of task {result.id} is forged", timeout=TIMEOUT_S)
    (row,) = site.sql("SELECT task, doom FROM messages WHERE task_id = %s", result.id)
    assert (row.task, row.doom) == (f"{APP}.{task}", None)
    assert [entry for entry in site.dead() if entry.task_id == result.id] == []
    site.send(true)
    wait_until(lambda: site.ran(result, value="true", task=f"{APP}.{task}"), timeout=TIMEOUT_S, message="the true run")
    wait_until(lambda: site.rows() == [], timeout=TIMEOUT_S, message="its end")
    assert [line["value"] for line in site.ran(result, task=f"{APP}.{task}")] == ["true"]
    assert [entry for entry in site.dead() if entry.task_id == result.id] == []
