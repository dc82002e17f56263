"""A name is suggested only if it is nearly the one that was given."""

from __future__ import annotations

import pytest

from celery_sidejob.model.checks import did_you_mean, nearest

TASKS = ["shop.orders.add_up", "shop.orders.bill", "shop.mails.send"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("shop.orders.add_pu", "shop.orders.add_up"),
        ("shop.order.blil", "shop.orders.bill"),
        ("add_up", "shop.orders.add_up"),
        ("mails.send", "shop.mails.send"),
        ("shop.orders.ship", None),
        ("shop.orders.pay", None),
        ("shop.mails.read", None),
        ("other.send_mails", None),
        ("", None),
        (".", None),
    ],
)
def test_of_a_task_each_part_is_near(given: str, meant: str | None) -> None:
    assert nearest(given, TASKS) == meant


def test_of_a_word_a_letter_is_wrong() -> None:
    assert did_you_mean("celeri", ["celery", "mails"]) == " Did you mean 'celery'?"
    for far in ("cellar", "selector", "mail_queue"):
        assert did_you_mean(far, ["celery", "mails"]) == ""
