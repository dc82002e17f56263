"""How tests of other packages that ended differently on two sides are told, and which of them are run once more."""

from __future__ import annotations

import pytest

from benchmarks import upstream

CHAIN = "t.integration.test_canvas.test_chain::test_apply[redis-ids]"


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (CHAIN, "t/integration/test_canvas.py::test_chain::test_apply[redis-ids]"),
        ("t.integration.test_worker::test_run", "t/integration/test_worker.py::test_run"),
    ],
)
def test_pytest_finds_a_test_of_its_results_again(name: str, address: str) -> None:
    assert upstream.address(name) == address


def test_only_what_ended_differently_without_a_reason_is_run_once_more() -> None:
    stock = {CHAIN: "passed", "t.test_a::test_active": "passed", "t.test_a::test_fails": "failure"}
    outcomes = {"stock": stock, "ours": {**dict.fromkeys(stock, "failure"), "t.test_a::test_ours": "passed"}}

    assert upstream.to_repeat(outcomes, {"test_active": "a reason"}) == [CHAIN]


def test_a_reason_may_be_that_of_some_parameters() -> None:
    reasons = {"test_apply*-old]": "a reason", "test_all": "another"}
    names = ["t.test_a::test_apply[x-old]", "t.test_a::test_apply[x-new]", "t.test_a::test_all[x]"]

    assert [upstream.reason_of(name, reasons) for name in names] == ["a reason", None, "another"]


@pytest.mark.parametrize(("ours", "code"), [("passed", 0), ("failure", 1)])
def test_a_difference_without_a_reason_is_an_error(ours: str, code: int) -> None:
    assert upstream.report({"stock": {CHAIN: "passed"}, "ours": {CHAIN: ours}}, {}) == code
