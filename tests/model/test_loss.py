"""Each kind of loss is a sentence of its own, and comes back from its JSON as it was."""

from __future__ import annotations

import json

import pytest

from celery_sidejob.model.loss import Loss, LossKind

WORKER = "web-1:77:ab12"
LOSSES = {
    LossKind.KILLED: (
        Loss.of_process(WORKER, 5, -9, out_of_memory=None),
        "process killed by SIGKILL (process 5 of worker web-1:77:ab12)",
    ),
    LossKind.EXITED: (
        Loss.of_process(WORKER, 5, 3, out_of_memory=True),
        "process exited with code 3 in the middle of the run (process 5 of worker web-1:77:ab12)",
    ),
    LossKind.ENDED: (
        Loss.of_process(WORKER, 5, None, out_of_memory=True),
        "process ended, its exit code is not known (process 5 of worker web-1:77:ab12)",
    ),
    LossKind.DISCONNECTED: (
        Loss(LossKind.DISCONNECTED, WORKER, silent_s=2.5),
        (
            "worker gone: its connection to Postgres ended, and no heartbeat followed. It was killed, or its host is "
            "down or cut off (worker web-1:77:ab12)"
        ),
    ),
    LossKind.SILENT: (
        Loss(LossKind.SILENT, WORKER, silent_s=10.4),
        "worker silent for 10 seconds: it was killed, is frozen or cut off, or its host is down (worker web-1:77:ab12)",
    ),
    LossKind.OVERDUE: (
        Loss(LossKind.OVERDUE, WORKER, 5),
        "lease not renewed: the run did not renew its own lease in time (process 5 of worker web-1:77:ab12)",
    ),
    LossKind.DROPPED: (
        Loss(LossKind.DROPPED, WORKER),
        "run dropped: its worker held it and did not execute it (worker web-1:77:ab12)",
    ),
    LossKind.LEFT: (
        Loss(LossKind.LEFT, WORKER, cause="SystemExit(4)"),
        "body ended with SystemExit(4), which ends a process (worker web-1:77:ab12)",
    ),
    LossKind.STOPPED: (Loss(LossKind.STOPPED, WORKER), f"worker stopped before the run ended (worker {WORKER})"),
    LossKind.STORE: (
        Loss(LossKind.STORE, cause="it is away"), "Postgres out of reach of the run: it is away",
    ),
    LossKind.REFUSED: (Loss(LossKind.REFUSED, WORKER, cause="no"), "end refused by Postgres: no"),
    LossKind.UNKNOWN: (Loss(), "worker died"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LossKind)
def test_a_loss_is_a_sentence_and_survives_its_json(kind: LossKind) -> None:
    loss, why = LOSSES[kind]
    assert (loss.kind, loss.why) == (kind, why)
    assert Loss.of_json(loss.json) == loss
    facts = dict(loss.facts)
    assert facts == json.loads(loss.json)
    assert (facts.pop("why"), facts.pop("kind")) == (why, kind)
    assert facts.pop("host", None) == (None if loss.worker is None else "web-1")
    assert None not in facts.values()


@pytest.mark.parametrize(
    ("killed", "told"),
    [
        (True, "process killed by SIGKILL, out of memory"),
        (False, "process killed by SIGKILL, not because memory ran out"),
        (None, "process killed by SIGKILL"),
    ],
)
def test_a_kill_says_whether_memory_was_short_as_far_as_that_is_known(killed: bool | None, told: str) -> None:
    assert Loss.of_process(WORKER, 5, -9, out_of_memory=killed).why == f"{told} (process 5 of worker {WORKER})"
    assert "memory" not in Loss.of_process(WORKER, 5, -15, out_of_memory=killed).why, "no other signal is the kernel's"


def test_a_process_that_ends_well_in_the_middle_of_a_run_has_exited() -> None:
    told = f"process exited with code 0 in the middle of the run (process 5 of worker {WORKER})"
    assert Loss.of_process(WORKER, 5, 0, out_of_memory=None).why == told


def test_signals_without_a_name_and_facts_of_a_newer_version() -> None:
    assert Loss.of_process(WORKER, 5, -50, out_of_memory=None).signal == "signal 50"
    newer = Loss.of_json('{"kind": "struck by lightning", "worker": null, "voltage": 3}')
    assert newer == Loss()
    assert Loss.of_facts({"kind": "silent", "silent_s": None}).why.startswith("worker silent for 0 seconds: ")


@pytest.mark.parametrize(
    "newer",
    [
        {"kind": ["killed"]}, {"kind": "silent", "silent_s": "10"}, {"kind": "killed", "out_of_memory": 3},
        {"kind": "silent", "worker": {"host": "web"}},
    ],
)  # fmt: skip
def test_facts_in_another_form_are_not_known(newer: dict[str, object]) -> None:
    """A text must be found for each, or its task could never be buried."""
    loss = Loss.of_json(json.dumps(newer))
    assert loss == Loss(LossKind(newer["kind"]) if isinstance(newer["kind"], str) else LossKind.UNKNOWN)
    assert loss.facts["why"]


def test_a_body_may_leave_with_any_error() -> None:
    class Odd(SystemExit):
        def __repr__(self) -> str:
            return "\x00\ud800"

    class Worse(SystemExit):
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    causes = [Loss.of_body(WORKER, error).cause for error in (SystemExit("x" * 10**6), Odd(), Worse())]
    assert causes == [f"SystemExit('{'x' * 188}…", r"\x00\ud800", "a Worse"]


def test_secrets_in_the_cause_are_hidden() -> None:
    loss = Loss.of_body(WORKER, SystemExit("hunter2"))
    shown = loss.redacted(lambda text: text.replace("hunter2", "***"))
    assert shown.facts["cause"] == "SystemExit('***')"
    assert "hunter2" not in shown.why
    assert Loss().redacted(lambda _: "hidden") == Loss()
