"""Checks that a delivery has the task and body of its row: any program that reaches the broker can name a row."""

from __future__ import annotations

from ...model.durable import Content, Key, digest_of
from ...model.logger import logger
from ...store.outbox import tasks
from ..runtime import Runtime


def as_kept(runtime: Runtime, key: Key, content: Content) -> Content:
    """Return the content of a delivery in the form of its row; a compressed row's body is read for this."""
    if content.unpack is None:
        return content
    row = tasks.content_of(runtime.connections, key, whole=True)
    digest = content.digest
    if row is not None and row.digest != digest:
        try:
            if digest_of(content.unpack(bytes(row.body))) == digest:
                digest = row.digest
        except Exception as error:  # it is compressed in another way, or not at all
            logger.debug("The row of task %s is not compressed as a delivery says: %r", key[0], error)
    return Content(content.task, digest)


def is_forged(runtime: Runtime, key: Key, content: Content) -> bool:
    """Tell, and log, whether a delivery that is not run names a waiting or running row with another content."""
    row = tasks.content_of(runtime.connections, key)
    if row is None or (row.task, row.digest) == as_kept(runtime, key, content)[:2]:
        return False
    logger.error(
        "A message with the id of task %s is forged, and rejected: it would run %s, and the task is %s%s",
        key[0],
        content.task,
        row.task,
        "" if row.task != content.task else " with another body",
        extra={"task_id": key[0], "task": row.task},
    )
    return True
