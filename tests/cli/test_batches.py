"""The commands below `batches`."""

from __future__ import annotations

from tests.tools.commands import Command
from tests.tools.in_process import Stage


def test_batches_are_listed_shown_closed_and_deleted(stage: Stage, command: Command, answer: Command) -> None:
    assert command("batches", "list").lines == ["There is no batch."]
    with stage.sidejob.batch("letters"):
        stage.job()
    stage.drain()
    stage.sidejob.poll()
    left_open = stage.sidejob.batch("left open").add(stage.job())

    assert command("batches", "list").lines == [
        "Batch Members Completed Failed Terminated Open", "letters ended 1 1 0 0 0",
        "left open takes members 1 0 0 0 1",
    ]  # fmt: skip
    found = command("batches", "show", "left open", "--json").document
    assert (found["state"], found["counts"]["open"]) == ("takes members", 1)

    assert command("batches", "close", "left open").lines == ["Batch left open is closed. Open members: 1."]
    assert left_open.closed
    assert "Delete batch left open (1 open), so that nothing follows it? [y/N]: " in answer(
        "n", "batches", "delete", "left open"
    ).err  # fmt: skip
    assert command("batches", "delete", "left open", "--yes").lines == ["Batch left open is deleted."]
    for verb in ("show", "close", "delete"):
        assert "There is no batch 'left open'" in command("batches", verb, "left open", code=1).err
