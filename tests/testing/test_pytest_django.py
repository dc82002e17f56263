"""A user's Django project, tested by pytest-django: the fixtures of both, in two processes of pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.test_django import PROJECT
from tests.testing.test_testing_page import files, run_pytest, write
from tests.tools.versions import KOMBU_5_7

TESTS = """
import pytest
from celery_sidejob.testing import assert_enqueued, crash_before, run_until_quiet
from django.db import connection
from orders.models import Order, place
from orders.tasks import fulfil

def test_the_store_is_in_django_s_test_database(sidejob_database_url, worker_id):
    name = sidejob_database_url.rpartition("/")[2]
    assert name.startswith("test_") and name.endswith(worker_id)

@pytest.mark.django_db
def test_a_test_that_never_commits(sidejob_store):
    order = place("ada@example.com")
    assert_enqueued(fulfil, (order.pk,), transaction="default")
    assert run_until_quiet(sidejob_store) == 0

@pytest.mark.django_db(transaction=True)
def test_what_is_committed_runs_here(sidejob_store):
    order = place("ada@example.com")
    with crash_before("end"):
        run_until_quiet(sidejob_store)
    run_until_quiet(sidejob_store)
    order.refresh_from_db()
    assert order.fulfilled

@pytest.mark.django_db(transaction=True)
def test_both_databases_are_empty_again(sidejob_store):
    assert not Order.objects.exists()
    assert sidejob_store.count_jobs() == {}
"""


@pytest.mark.few(0)
@KOMBU_5_7
def test_both_plugins_together(tmp_path: Path, empty_database_url: str) -> None:
    shown = {**PROJECT, **files(django=True)}
    shown["shop/settings.py"] = shown["shop/settings.py"].replace("memory://", "sidejobpg://")
    shown["test_more.py"] = TESTS
    shown["pytest.ini"] = "[pytest]\nsidejob_app = shop\nDJANGO_SETTINGS_MODULE = shop.settings\npythonpath = .\n"
    said = run_pytest(
        write(tmp_path, shown), "test_more.py", "tests/test_orders.py", "-n2", DATABASE_URL=empty_database_url
    )
    assert "5 passed" in said, said
