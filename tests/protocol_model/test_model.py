"""The model still finds each tempting mistake, and finds none in the small instances of the protocol."""

from __future__ import annotations

import dataclasses

import pytest

from tests.protocol_model import run

MISTAKES = run.mistakes()
PROTOCOLS = run.protocols()


@pytest.mark.few(8)
@pytest.mark.parametrize("instance", MISTAKES, ids=lambda instance: instance.name)
def test_a_mistake_ends_in_a_trace(instance: run.Instance) -> None:
    verdict = run.explore(instance)

    assert verdict.as_expected, verdict
    assert verdict.trace


@pytest.mark.few(14)
@pytest.mark.parametrize("instance", run.small(PROTOCOLS), ids=lambda instance: instance.name)
def test_the_protocol_has_no_counterexample(instance: run.Instance) -> None:
    verdict = run.explore(instance)

    assert verdict.as_expected, f"{verdict}\n{verdict.trace}"


def test_all_files_were_collected() -> None:
    assert len(MISTAKES) >= 37
    assert len(PROTOCOLS) >= 59
    names = [instance.name for instance in MISTAKES + PROTOCOLS]
    assert len(names) == len(set(names))


def test_every_mistake_that_can_be_switched_in_is_shown() -> None:
    shown = {mistake for instance in MISTAKES + PROTOCOLS for mistake in instance.model.V}

    assert shown == run.every_mistake()


def test_a_mistake_that_goes_unnoticed_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = dataclasses.replace(run.small(PROTOCOLS)[0], must_fail=True)
    monkeypatch.setattr(run, "mistakes", lambda: [harmless])
    monkeypatch.setattr(run, "protocols", list)

    assert run.main(["--jobs", "1"]) == 1
    assert capsys.readouterr().out.startswith("FAIL")


def test_a_counterexample_fails_the_run_and_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = dataclasses.replace(MISTAKES[0], must_fail=False)
    monkeypatch.setattr(run, "mistakes", list)
    monkeypatch.setattr(run, "protocols", lambda: [broken])

    assert run.main(["--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL")
    assert run.explore(broken).trace.splitlines()[-1] in said


def test_a_bound_that_was_reached_is_no_counterexample() -> None:
    bounded = dataclasses.replace(PROTOCOLS[0], limits={"maxstates": 1000})

    verdict = run.explore(bounded)

    assert "bound reached" in verdict.result
    assert verdict.as_expected
