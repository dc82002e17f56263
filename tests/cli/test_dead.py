"""The commands about the dead set."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.deadset import REASONS
from tests.tools.commands import Said, ask
from tests.tools.in_process import Stage

Command = Callable[..., Said]


@pytest.fixture
def command(stage: Stage) -> Command:
    """Gives a command about the dead set to the stage's app; the code it ends with must be `code`."""

    def command(*words: object, code: int = 0) -> Said:
        said = ask(stage.app, "dead", *words)
        assert said.code == code, said
        return said

    return command


def fail(job: RunningJob) -> None:
    raise ValueError("no money")


@pytest.fixture
def failed(stage: Stage) -> Job:
    """A job in the dead set, and after it three ordinary tasks that were lost."""
    job = stage.job(fail)
    with pytest.raises(ValueError, match="no money"):
        stage.run(job)
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, error, traceback, payload, body)
        SELECT 't' || n, 'mail', 'q', 'lost', 'WorkerLostError: gone', 'the way', json_build_object(
          'publication', '{"v": 2, "about": "{}"}', 'generation', 1), 'x' FROM generate_series(1, 3) n""")
    return job


def test_an_empty_dead_set(command: Command) -> None:
    assert command("list", "--json").document == []
    assert command("groups", "--json").document == {}
    assert "no entry 7" in command("show", 7, code=1).err


def test_a_number_of_any_length_is_no_id(command: Command) -> None:
    assert "is no entry's id" in command("show", "1" * 5000, code=2).err


def test_only_jobs_among_the_entries_are_failed_jobs(stage: Stage, failed: Job) -> None:
    """Durable tasks, which rest there too, are no jobs."""
    found = stage.sidejob.stats()

    assert (found["jobs"], found["dead"]["entries"]) == ({"failed": 1}, 4)


def test_entries_are_shown(failed: Job, command: Command) -> None:
    listed, wide = command("list"), command("list", "--wide")
    assert listed.lines[0] == "Entry Died Task Job Error"
    assert wide.lines[0] == "Entry Died Reason Queue Task Job Task id Error"
    assert listed.lines[1].endswith(f"stage.call {failed.id} ValueError: no money")
    assert listed.lines[2].endswith("mail WorkerLostError: gone")
    assert wide.lines[2].endswith("lost q mail t1 WorkerLostError: gone")
    found = command("list", "--task", "mail", "--limit", 2, "--json").document
    assert [(entry["task_id"], entry["job_id"], entry["group"]) for entry in found] == [
        ("t1", None, "WorkerLostError"), ("t2", None, "WorkerLostError"),
    ]  # fmt: skip
    assert command("list", "--task", "mail", "--limit", 2).err == f"There may be more: --after {found[-1]['id']}\n"
    assert command("groups", "--json").document == {"WorkerLostError": 3, "ValueError": 1}
    assert "3 WorkerLostError" in command("groups").lines
    shown = command("show", found[0]["id"])
    assert "task id t1" in shown.lines
    assert "the way" in shown.lines


def test_the_list_fits_a_terminal_of_80_columns(
    stage: Stage, failed: Job, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.sql("SELECT setval('dead_id_seq', 123456)")
    stage.sql(
        "INSERT INTO dead (task_id, task, queue, reason, error, payload, body) SELECT "
        "'0f0ec1e0-4c5b-4f0a-9d51-6f3a2f0e7c11', 'shop.orders.mail_the_customer', 'q', 'lost', %s, payload, body "
        "FROM dead WHERE task_id = 't1'",
        "WorkerLostError: " + "far away " * 20,
    )
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", "80")

    said = command("list")
    assert max(map(len, said.out.splitlines())) == 80, "it is a terminal"
    assert [line.split()[0] for line in said.lines if "2" in line.split()[1]] == [
        str(entry.id) for entry in stage.sidejob.dead
    ], "no id is broken or cut"
    assert len(said.lines) < 2 * len(stage.sidejob.dead) + 2, "an entry takes few lines"
    assert "123457" in said.out
    assert f" {failed.id} " in said.out
    assert "mail_the" in said.out
    monkeypatch.setenv("COLUMNS", "160")
    assert "0f0ec1e0-4c5b-4f0a-9d51-6f3a2f0e7c11" in command("list", "--wide").out


def test_of_an_entry_is_shown_what_there_was(stage: Stage, failed: Job, command: Command) -> None:
    (entry, *_) = stage.sidejob.dead
    rows = {line.split()[0] for line in command("show", entry.id).lines}
    assert rows >= {"id", "reason", "error"}
    assert not rows & {"losses", "retries", "history"}
    assert not any(line.startswith("retries") for line in ask(stage.app, "show", failed.id).lines)
    assert command("show", entry.id, "--json").document["losses"] == 0

    stage.sql("UPDATE dead SET retries = 3")
    assert "retries 3" in command("show", entry.id).lines


def test_an_entry_is_found_by_its_task_id(stage: Stage, failed: Job, command: Command) -> None:
    (entry,) = stage.sidejob.dead.list(task="mail", limit=1)
    said = ask(stage.app, "show", "t1")
    assert said.code == 0
    assert f"id {entry.id}" in said.lines
    assert "the way" in said.lines
    assert ask(stage.app, "show", "t1", "--json").document["id"] == entry.id
    assert "is in the dead set: it has ended well" in ask(stage.app, "show", "t9").err

    assert "task id t1" in command("show", "t1").lines
    assert command("retry", "t1").lines == ["1 entry retried."]
    assert command("delete", "t2", "--yes").lines == ["1 entry deleted."]
    for verb in ("show", "retry", "delete"):
        assert "no entry of the task id 't1'" in command(verb, "t1", code=1).err
    assert stage.sidejob.dead.for_task_id("t1") is None
    found = stage.sidejob.dead.for_task_id("t3")
    assert found is not None
    assert found.task == "mail"


def test_entries_are_retried(stage: Stage, failed: Job, command: Command) -> None:
    (entry, *_) = stage.sidejob.dead
    assert command("retry", code=2).err
    assert command("retry", entry.id, "--all", code=2).err

    assert command("retry", entry.id).lines == ["1 entry retried."]
    assert str(failed.refresh().status) == "queued"
    assert command("retry", "--group", "WorkerLostError", "--limit", 2, "--yes", "--json").document == {
        "retried": 2, "skipped": {},
    }  # fmt: skip
    assert stage.sql("SELECT task_id, generation FROM messages WHERE body IS NOT NULL ORDER BY 1") == [
        ("t1", 2), ("t2", 2),
    ]  # fmt: skip
    assert command("retry", "--all", "--yes").lines == ["1 entry retried."]
    said = command("retry", "--task", "mial")
    assert (said.lines, said.err) == (["0 entries retried."], "Nothing matches: the dead set is empty.\n")


def test_entries_are_chosen_by_their_reason(stage: Stage, failed: Job, command: Command) -> None:
    stage.sql("UPDATE dead SET reason = 'revoked' WHERE task_id IN ('t1', 't2')")
    assert [entry["task_id"] for entry in command("list", "--reason", "revoked", "--json").document] == ["t1", "t2"]
    assert command("retry", "--reason", "revoked", "--limit", 1, "--yes").lines == ["1 entry retried."]
    assert command("purge", "--reason", "revoked", "--older-than", "1d").lines == ["0 entries purged."]
    assert command("purge", "--reason", "revoked", "--yes").lines == ["1 entry purged."]
    assert sorted(entry.reason for entry in stage.sidejob.dead) == ["failed", "lost"]


@pytest.mark.parametrize("words", [("list",), ("retry", "--yes"), ("delete", "--yes"), ("purge", "--yes")])
def test_a_reason_that_no_entry_can_have_is_refused(stage: Stage, command: Command, words: tuple[str, ...]) -> None:
    said = command(*words, "--reason", "expierd", code=1)
    assert f"reason is one of {', '.join(REASONS)}; not 'expierd'. Did you mean 'expired'?" in said.err


def test_the_table_allows_the_same_reasons(stage: Stage) -> None:
    ((check,),) = stage.sql("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'dead_reason_check'")
    assert set(re.findall("'(.*?)'", check)) == set(REASONS)


def test_a_loss_is_shown_as_a_sentence_and_kept_as_facts(stage: Stage, failed: Job, command: Command) -> None:
    loss = '{"kind": "killed", "signal": "SIGSEGV", "worker": "web-1:7:ab", "process": 8}'
    why = "process killed by SIGSEGV (process 8 of worker web-1:7:ab)"
    stage.sql("UPDATE dead SET payload = json_build_object('loss', %s::json) WHERE task_id = 't1'", loss)
    assert f"loss {why}" in command("show", "t1").lines
    shown = command("show", "t1", "--json").document["loss"]
    assert (shown["why"], shown["host"], shown["signal"]) == (why, "web-1", "SIGSEGV")

    stage.sql("UPDATE dead SET error = 'WorkerLostError: ' || %s WHERE task_id = 't1'", why)
    assert not any(line.startswith("loss ") for line in command("show", "t1").lines), "the error says it"
    stage.sql("UPDATE dead SET payload = json_build_object('loss', 'a riddle') WHERE task_id = 't1'")
    assert command("show", "t1", "--json").document["loss"]["kind"] == "unknown"


def test_several_entries_are_named(stage: Stage, failed: Job, command: Command) -> None:
    (job, first, *_) = stage.sidejob.dead
    assert "no entry of the task id 't9'" in command("retry", first.id, "t9", code=1).err
    assert len(stage.sidejob.dead) == 4, "nothing is changed unless all are there"

    assert command("retry", first.id, "t2").lines == ["2 entries retried."]
    stage.sql(
        "INSERT INTO dead (task_id, task, queue, reason, error, payload, body)"
        " SELECT task_id, task, queue, reason, error, payload, body FROM dead WHERE task_id = 't3'"
    )
    stage.sql("UPDATE dead SET task_id = 't1' WHERE id = (SELECT max(id) FROM dead)")
    said = command("retry", "t1", "t3", "t3", code=1)
    assert said.lines == ["1 entry retried."]
    assert "a task t1 waits or runs already" in said.err

    assert command("delete", job.id, "t1", "--yes", "--json").document == {"deleted": 2}
    assert len(stage.sidejob.dead) == 0


def test_where_nothing_matches_is_said_what_there_is(failed: Job, command: Command) -> None:
    said = command("retry", "--task", "mial")
    assert said.lines == ["0 entries retried."]
    assert said.err == "Nothing matches. There are: 'mail', 'stage.call'.\n"
    said = command("retry", "--group", "mail", "--json")
    assert said.document == {"retried": 0, "skipped": {}}
    assert said.err == "Nothing matches. There are: 'WorkerLostError', 'ValueError'.\n"


def test_entries_are_deleted_and_purged(stage: Stage, failed: Job, command: Command) -> None:
    (entry, *others) = stage.sidejob.dead
    assert command("delete", others[0].id, "--yes").lines == ["1 entry deleted."]
    assert command("purge", code=2).err
    assert command("purge", "--older-than", 3600).lines == ["0 entries purged."]
    assert command("purge", "--keep", 2, "--yes", "--json").document == {"purged": 1}
    assert not failed.exists
    assert command("delete", entry.id, code=1).err.startswith("Error: ")
    assert command("purge", "--older-than", 0, "--yes").lines == ["2 entries purged."]
    assert len(stage.sidejob.dead) == 0


@pytest.mark.parametrize(
    ("words", "entries", "left"),
    [
        (["purge", "--keep", 0], "4 entries of the dead set (1 job with everything below it)", []),
        (["purge", "--keep", 1, "--task", "mail"], "2 entries of the dead set", ["stage.call", "mail"]),
        (["delete", "--all"], "4 entries of the dead set (1 job with everything below it)", []),
        (["delete", "--group", "ValueError"], "1 entry of the dead set (1 job with everything below it)", ["mail"] * 3),
        (["delete", "--reason", "lost", "--queue", "q"], "3 entries of the dead set", ["stage.call"]),
        (["delete", "t1"], "1 entry of the dead set", ["stage.call", "mail", "mail"]),
    ],
)
def test_what_goes_for_good_is_named_and_asked_for(
    stage: Stage, failed: Job, answer: Command, words: list[str], entries: str, left: list[str]
) -> None:
    refused = answer("n", "dead", *words)
    assert (refused.code, refused.out) == (1, "")
    assert f"Delete {entries} for good? [y/N]: " in refused.err
    assert len(stage.sidejob.dead) == 4

    assert answer("y", "dead", *words).code == 0

    assert [entry.task for entry in stage.sidejob.dead] == left
    assert failed.exists == ("stage.call" in left)


def test_what_dies_while_the_question_waits_stays(
    stage: Stage, failed: Job, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_late(*_: object, **__: object) -> None:
        stage.sql("INSERT INTO dead (task_id, task, queue, reason, payload, body) "
                  "SELECT 'late', task, queue, reason, payload, body FROM dead WHERE task_id = 't1'")  # fmt: skip

    monkeypatch.setattr("celery_sidejob.cli.dead.confirm", ask_late)
    assert command("purge", "--older-than", 0).lines == ["4 entries purged."]
    assert [entry.task_id for entry in stage.sidejob.dead] == ["late"]


def test_an_entry_that_cannot_go_is_told(stage: Stage, failed: Job, command: Command) -> None:
    failed.enqueue("stage.idle", child_name="open")
    said = command("delete", "--group", "ValueError", "--yes")
    assert said.lines == ["0 entries deleted."]
    assert said.err.startswith("1 entry left: something below its job is not finished")
    assert command("delete", "--group", "none", "--yes").err.startswith("Nothing matches. There are: ")
