"""The commands `queues`, `pause` and `resume`, and what `stats`, the metrics and `doctor` say of managed queues."""

from __future__ import annotations

from tests.cli.test_doctor import findings
from tests.cli.test_doctor import levels as levels_of
from tests.tools.commands import Command
from tests.tools.in_process import Stage


def test_a_queue_is_paused_shown_and_resumed(stage: Stage, command: Command) -> None:
    assert command("queues").lines == ["No queue is managed: declare one in sidejob_queues, or pause one."]
    stage.job(queue="mail")
    assert command("pause", "mail", "--reason", "no\nserver").lines == ["Queue mail is paused. Runs in progress: 0."]
    stage.sidejob.queue("mail").configure(limit=3, rate="10/m")

    header, line = command("queues").lines
    assert header == "Queue Limit Per key Rate Waiting Running Scheduled Blocked Lost"
    assert line.startswith("mail paused 20")
    assert line.endswith("3 10/m 1 0 0 0 0")
    (found,) = command("queues", "--json").document
    assert (found["name"], found["reason"], found["limit"], found["rate"]) == ("mail", "no\nserver", 3, "10/m")
    for given in ("600/m", "10/s", "0.5/s", "0.5/m", "1/m", "2/h", "7/s", "1000000/h"):
        assert stage.sidejob.queue("mail").configure(rate=given).rate == given
    stage.sidejob.queue("mail").configure(rate="10/m")
    assert found["counts"] == {"waiting": 1, "running": 0, "scheduled": 0, "blocked": 0, "lost": 0}

    assert command("resume", "mail").lines == ["Queue mail goes on. Waiting: 1."]
    assert command("resume", "mail").lines == ["Queue mail was not paused. Waiting: 1."]
    assert command("queues", "--json").document[0]["paused_at"] is None


def test_a_queue_is_managed_no_more(stage: Stage, command: Command) -> None:
    stage.sidejob.queue("mail").configure(limit=3, rate="10/m").pause()
    assert command("unmanage", "mail").lines == ["Queue mail is not managed any more. It had limit 3, rate 10/m."]
    assert command("unmanage", "mail").lines == ["Queue mail was not managed."]
    assert command("queues", "--json").document == []


def test_stats_say_what_is_paused_and_limited(stage: Stage, command: Command) -> None:
    stage.sidejob.queue("mail").pause()
    stage.sidejob.queue("web").configure(limit=2)
    found = stage.sidejob.stats()["queues"]
    assert (found["mail"]["paused"], found["mail"]["limit"], found["mail"]["managed"]) == (True, None, True)
    assert (found["web"]["paused"], found["web"]["limit"]) == (False, 2)
    lines = command("stats").lines
    assert any(line.startswith("mail ") and line.endswith("paused") for line in lines)
    assert any(line.startswith("web ") and line.endswith("at most 2") for line in lines)
    exposed = command("stats", "--prometheus").out
    assert 'sidejob_queue_paused{queue="mail"} 1.0' in exposed
    assert 'sidejob_queue_paused{queue="web"} 0.0' in exposed
    assert 'sidejob_queue_limit{queue="web"} 2.0' in exposed
    assert 'sidejob_queue_limit{queue="mail"}' not in exposed


def test_doctor_finds_a_queue_that_was_paused_and_forgotten(stage: Stage) -> None:
    stage.sidejob.queue("mail").pause("a deploy")
    stage.job(queue="mail")
    assert levels_of(stage, "paused queues") == ["ok"], "it was paused just now"
    stage.sql("UPDATE queues SET paused_at = now() - interval '2 h'")
    (finding,) = findings(stage)["paused queues"]
    assert finding.level == "warning"
    assert finding.found == "mail has been paused for 2.0 h (a deploy), and something waits"
    stage.sql("UPDATE messages SET queue = 'elsewhere'")
    assert levels_of(stage, "paused queues") == ["ok"], "nothing waits"


def test_what_waits_at_a_gate_is_not_taken_for_unpublished(stage: Stage) -> None:
    stage.job(queue="mail")
    stage.sql("UPDATE messages SET published_at = NULL, gate = 1, next_check_at = 'infinity', "
              "due_at = now() - interval '1 h'")  # fmt: skip
    found = stage.sidejob.stats()["queues"]["mail"]
    assert (found["depth"], found["unpublished"], found["oldest_unpublished_s"]) == (1, 0, None)
    assert levels_of(stage, "publishing") == ["ok"]
