"""Packets that are written and looked at by command."""

from __future__ import annotations

import io
import json
import sys

import click
import pytest

from celery_sidejob import RunningJob
from celery_sidejob.cli.ports import _standard_input, _values
from tests.tools.commands import Command, ask
from tests.tools.in_process import Stage


def test_values_are_written(stage: Stage, command: Command) -> None:
    job = stage.job(inports=["numbers"], outports=["numbers"], aliases=["sums"])
    stage.run(job)

    assert command("write", "sums", "numbers", -5, '"a text"', '{"page": 7}', "null").lines == [
        f"Wrote 4 values to input port numbers of job {job.id}."
    ]
    assert list(job.input("numbers")) == [-5, "a text", {"page": 7}, None]
    assert job.refresh().status == "queued", "its packet asks it to run"
    assert command("write", job.id, "numbers", 1, "--output", "--json").document == {
        "job": job.id, "port": "numbers", "direction": "out", "written": 1,
    }  # fmt: skip
    assert list(job.output("numbers")) == [1]


def test_values_are_read_from_the_standard_input(stage: Stage) -> None:
    job = stage.job(inports=["numbers"])
    said = ask(stage.app, "write", job.id, "numbers", "-", typed='1\n\n{"a": [2]}\n"three"')
    assert said.lines == [f"Wrote 3 values to input port numbers of job {job.id}."]
    assert list(job.input("numbers")) == [1, {"a": [2]}, "three"]

    said = ask(stage.app, "write", job.id, "numbers", "-", typed="1\ntwo\n3")
    assert said.code == 2
    assert (
        "line 2: 'two' is no JSON value: Expecting value: line 1 column 1 (char 0). "
        'A text has double quotes: "two". In a shell, type \'"two"\'.' in said.err
    )
    assert len(job.input("numbers")) == 0, "all or none"
    assert ask(stage.app, "write", job.id, "numbers", "-", "--json", typed="").document["written"] == 0


def test_what_cannot_be_written(stage: Stage, command: Command) -> None:
    job = stage.job(inports={"numbers": {"limit": 2}})
    assert "VALUE 2: 'x' is no JSON value" in command("write", job.id, "numbers", 1, "x", code=2).err
    assert "'--ouput' is no JSON value" in command("write", job.id, "numbers", 1, "--ouput", code=2).err
    assert "input port 'numbers'" in command("write", job.id, "numbers", 1, 2, 3, code=1).err, "it is full"
    assert "There is no job 'nobody'" in command("write", "nobody", "numbers", 1, code=1).err
    assert len(job.input("numbers")) == 0


def test_packets_are_taken(stage: Stage, command: Command) -> None:
    job = stage.job(inports=["numbers"], outports=["sums"])
    job.input("numbers").write_many([1, {"a": "\x1b[31m" + "b" * 500}, 3])

    assert command("take", job.id, "numbers").lines == ["1"]
    (line,) = command("take", job.id, "numbers").lines
    assert json.loads(line) == {"a": "\x1b[31m" + "b" * 500}
    assert command("take", job.id, "numbers", "--limit", 5, "--json").document == [3]
    said = command("take", job.id, "numbers")
    assert (said.out, said.err) == ("", "The port is empty.\n")
    assert "add --output" in command("take", job.id, "sums", code=1).err


def test_packets_are_looked_at_and_stay(stage: Stage, command: Command) -> None:
    job = stage.job(inports=["numbers"])
    with stage.sidejob.context(customer="Ann"):
        job.input("numbers").write({"n": 1})
    job.input("numbers").write_many(["two\nlines", 3])

    said = command("peek", job.id, "numbers", "--limit", 2)
    assert said.lines[0] == "Written Value Context"
    assert said.lines[1].endswith('{"n": 1} {"customer": "Ann"}')
    assert said.lines[2].endswith('"two\\nlines"')
    assert said.err == "There may be more: --limit.\n"
    found = command("peek", job.id, "numbers", "--json").document
    assert [packet["value"] for packet in found] == [{"n": 1}, "two\nlines", 3]
    assert found[0]["context"] == {"customer": "Ann"}
    assert len(job.input("numbers")) == 3
    assert command("peek", job.id, "numbers").err == ""


@pytest.mark.parametrize("verb", ["write", "peek"])
def test_a_port_that_is_not_there(stage: Stage, verb: str) -> None:
    job = stage.sidejob.enqueue(stage.task(_idle, name="stage.ported", inports=["a"], outports=["b"]))
    value = ["1"] if verb == "write" else []
    for words in (("c",), ("b",), ("a", "--output")):
        said = ask(stage.app, verb, job.id, words[0], *value, *words[1:])
        assert said.code == 1
        assert f"Error: Job {job.id} has no {'out' if words[1:] else 'in'}put port '{words[0]}'" in said.err


def test_what_is_redacted_is_not_shown(database_url: str) -> None:
    stage = Stage(database_url, sidejob_redact=lambda value: json.loads(json.dumps(value).replace("secret", "***")))
    try:
        job = stage.job(inports=["in"])
        with stage.sidejob.context(token="secret"):
            job.input("in").write({"password": "secret"})
        for words in ((), ("--json",)):
            said = ask(stage.app, "peek", job.id, "in", *words)
            assert "secret" not in said.out
            assert said.out.count("***") == 2
    finally:
        stage.close()


def _idle(job: object) -> None:
    pass


def test_a_standard_input_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n\xff\n"), encoding="utf-8"))
    with pytest.raises(click.UsageError, match="The standard input is no text: 'utf-8' codec"):
        list(_values(_standard_input(), ["-"]))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="The standard input is closed"):
        list(_values(_standard_input(), ["-"]))


def test_a_long_text_that_is_no_value_is_shortened(stage: Stage) -> None:
    job = stage.job(inports=["numbers"])
    said = ask(stage.app, "write", job.id, "numbers", "-", typed="1" * 5000)
    assert said.code == 2
    assert f"line 1: '{'1' * 100}'… is no JSON value" in said.err
    assert len(said.err) < 500


@pytest.mark.parametrize("verb", [("peek",), ("write", "1")])
def test_an_output_port_is_suggested(stage: Stage, command: Command, verb: tuple[str, ...]) -> None:
    @stage.task(name="fixed", inports=["both"], outports=["sums", "both"])
    def fixed(job: RunningJob) -> None:
        pass

    job = fixed.enqueue()
    said = command(verb[0], job.id, "sums", *verb[1:], code=1)
    assert f"Job {job.id} has no input port 'sums', but an output port of this name: add --output." in said.err
    command(verb[0], job.id, "both", *verb[1:])
    assert len(job.output("sums")) == 0
