"""What the dead lists of both transports have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu import Connection

from celery_sidejob.model.messages import Cursor
from tests.transport.consuming import publish


def check_reading_on(connect: Callable[..., Connection], killed: Callable[[], None], deads: Any) -> None:
    """The dead list of a transport, whose pages hold two, is read on from a place, and anew if that is gone."""
    for number in range(3):
        publish(connect(), "queue", number, headers={"id": f"task{number}"})
        killed()
    cursor, page = deads.page(Cursor())
    cursor = cursor.past([one.text for one in page])
    assert [one.task_id for one in page] == ["task0", "task1"]
    assert [one.task_id for one in deads.page(cursor)[1]] == ["task2"]
    assert deads.delete(page[0].text)
    assert not deads.delete(page[0].text)
    again, page = deads.page(cursor)
    assert (again, [one.task_id for one in page]) == (Cursor(), ["task1", "task2"])
    assert [one.task_id for one in deads] == ["task1", "task2"]
