"""The legal moves are those of the contract, which says them in one sentence."""

from __future__ import annotations

import itertools

from celery_sidejob.model.status import ASKABLE, FINISHED, MOVES, Status

# The legal moves in one sentence; the long remark on asking again is "→suspended|completed|failed" of queued.
SENTENCE = (
    "new→queued · queued→running|terminating · queued→suspended|completed|failed · "
    "running→queued|suspended|completed|failed|terminating · suspended|completed|failed→queued|terminating · "
    "terminating→terminated|queued · terminated→queued"
)


def moves_of(sentence):
    for clause in sentence.split(" · "):
        before, after = (part.split("|") for part in clause.split("→"))
        yield from itertools.product((None if word == "new" else Status(word) for word in before), map(Status, after))


def test_moves_are_those_of_the_contract():
    assert {(before, after) for before, afters in MOVES.items() for after in afters} == set(moves_of(SENTENCE))


def test_every_status_has_its_moves():
    assert set(MOVES) == {None, *Status}


def test_finished_is_what_wait_waits_for():
    assert {"completed", "failed", "terminated"} == FINISHED


def test_a_run_may_be_asked_for_without_force_from_these():
    assert {"queued", "running", "suspended", "completed"} == ASKABLE


def test_a_status_is_its_word():
    assert [str(status) for status in Status] == [
        "queued",
        "running",
        "suspended",
        "completed",
        "failed",
        "terminating",
        "terminated",
    ]
    assert Status("queued") == "queued"
