"""A user's Django project, tested by Django's own runner: what `TestCase` and `TransactionTestCase` make of jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.testing.test_testing_page import LONGEST_S, files, write
from tests.tools.workers import environment

PROJECT = {
    "shop/__init__.py": "from shop.celery import app",
    "shop/celery.py": """
from celery import Celery
from celery_sidejob import SideJob

app = Celery("django_shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
sidejob = SideJob(app)
""",
    "shop/settings.py": """
import os
from urllib.parse import unquote, urlsplit

SECRET_KEY = "only for tests"
CELERY_SIDEJOB_DATABASE_URL = os.environ["DATABASE_URL"]
CELERY_BROKER_URL = "memory://"
server = urlsplit(CELERY_SIDEJOB_DATABASE_URL)
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": server.path.lstrip("/"), "USER": unquote(server.username or ""),
    "PASSWORD": unquote(server.password or ""), "HOST": server.hostname, "PORT": str(server.port or ""),
}}
INSTALLED_APPS = ["orders"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEST_RUNNER = "shop.testing.Runner"
""",
    "shop/testing.py": """
from django.conf import settings
from django.db import connection
from django.test.runner import DiscoverRunner
from shop.celery import sidejob

class Runner(DiscoverRunner):
    def setup_databases(self, **kwargs):
        made = super().setup_databases(**kwargs)
        base, _, _ = settings.CELERY_SIDEJOB_DATABASE_URL.rpartition("/")
        settings.CELERY_SIDEJOB_DATABASE_URL = f"{base}/{connection.settings_dict['NAME']}"
        sidejob.upgrade_schema()
        return made

    def teardown_databases(self, old_config, **kwargs):
        sidejob.close()
        super().teardown_databases(old_config, **kwargs)
""",
    "orders/__init__.py": "",
    "orders/test_more.py": """
from celery_sidejob import IllegalMoveError, JobNotFoundError
from celery_sidejob.testing import (
    assert_enqueued, assert_packets, crash_after, empty_store, refute_enqueued, run_job, run_until_quiet
)
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from orders.models import Order, place
from orders.tasks import confirm, fulfil
from shop.celery import app, sidejob

@app.task(durable=True)
def mail(to):
    return to

class MoreInATestCase(TestCase):
    def setUp(self):
        empty_store(sidejob)

    def test_nothing_of_the_test_s_transaction_is_there_for_others(self):
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            job = fulfil.enqueue((1,), transaction="default")
            result = mail.delay_on_commit("ada")
        self.assertEqual(len(callbacks), 2)
        self.assertFalse(job.exists)
        self.assertEqual(run_until_quiet(sidejob), 0)
        with self.assertRaisesRegex(JobNotFoundError, "never committed"):
            run_job(job)
        refute_enqueued(fulfil)
        refute_enqueued(mail)
        self.assertEqual(assert_enqueued(fulfil, transaction="default"), job)
        self.assertEqual(assert_enqueued(mail, ("ada",), transaction=connection).task_id, result.id)

    def test_other_tests_find_nothing_of_it(self):
        refute_enqueued(fulfil, transaction="default")
        refute_enqueued(mail, transaction="default")

    def test_what_a_rolled_back_block_asked_for_is_not_enqueued(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            fulfil.enqueue((1,), transaction="default")
            1 / 0
        refute_enqueued(fulfil, transaction="default")

    def test_a_unit_in_the_test_s_transaction_is_refused_and_harms_nothing(self):
        order = Order.objects.create(email="ada@example.com")
        job = fulfil.enqueue((order.pk,))
        with self.assertRaisesRegex(IllegalMoveError, "connection of a Django TestCase.* Use a TransactionTestCase"):
            run_job(job)
        self.assertEqual(job.refresh().status, "failed")
        order.refresh_from_db()
        self.assertFalse(order.fulfilled)

class MoreInATransactionTestCase(TransactionTestCase):
    def setUp(self):
        empty_store(sidejob)

    def test_a_run_dies_between_the_two_commits(self):
        order = place("ada@example.com")
        job = assert_enqueued(fulfil, (order.pk,))
        with crash_after("claim"):
            run_job(job)
        order.refresh_from_db()
        self.assertFalse(order.fulfilled)
        self.assertEqual(run_until_quiet(sidejob), 2)
        order.refresh_from_db()
        self.assertTrue(order.fulfilled)
""",
}


def test_django_s_own_runner_runs_the_page_s_tests_and_more(tmp_path: Path, empty_database_url: str) -> None:
    directory = write(tmp_path, {**PROJECT, **files(django=True)})
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "django", "test", "--verbosity", "2"], cwd=directory,
        env=environment({"DATABASE_URL": empty_database_url, "DJANGO_SETTINGS_MODULE": "shop.settings"}), check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Ran 8 tests" in done.stdout, done.stdout
