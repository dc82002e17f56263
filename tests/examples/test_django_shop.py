"""The Django example as `docs/django.md` says it is run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.examples.shops import DjangoShop, kill_in_the_middle
from tests.tools.databases import Databases
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> DjangoShop:
    return DjangoShop("django_shop", tmp_path, processes, empty_database_url)


@pytest.fixture
def user(databases: Databases) -> Iterator[str]:
    """The name and password of a user who may do nothing yet."""
    name = f"shop_{secrets.token_hex(6)}"
    with psycopg.connect(databases.admin_url, autocommit=True) as connection:
        try:
            connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
        except psycopg.errors.InsufficientPrivilege:
            pytest.skip("the user of SIDEJOB_TEST_DATABASE_URL may not create roles")
        yield name
        connection.execute(f"DROP ROLE {name}")


@pytest.mark.slow
def test_each_order_is_handled_once_whatever_dies(shop: DjangoShop, processes: Processes) -> None:
    shop.run("manage", "migrate")
    assert "it is new" in shop.celery("sidejob", "db", "upgrade")
    assert "fits" in shop.celery("sidejob", "db", "check")
    shop.serve("manage", "runserver", "--noreload", "127.0.0.1:0")
    kill_in_the_middle(shop)

    def mails() -> str:
        return "".join(process.log() for process in processes.started)

    wait_until(  # no order waits for its confirmation
        lambda: all(f"Subject: Order {number}\n" in mails() for number in range(1, 13)),
        timeout=30, message="a mail on each order",
    )  # fmt: skip
    assert mails().count("Subject: Invoice") >= 12


@pytest.mark.slow
def test_a_user_with_few_rights_is_enough(user: str, shop: DjangoShop) -> None:
    shop.run("manage", "migrate")
    shop.celery("sidejob", "db", "upgrade")
    grants = (shop.directory / "grants.sql").read_text()
    shop.sql(grants.replace("shop_app", user))
    shop.sql(shop.celery("sidejob", "db", "grants", user))
    shop.stock(cup=3)
    shop.env["DATABASE_URL"] = urlsplit(shop.database_url)._replace(netloc=_login(user, shop.database_url)).geturl()

    shop.serve("manage", "runserver", "--noreload", "127.0.0.1:0")
    shop.worker("worker")
    order = shop.place(cup=2)
    shop.wait_for([order], "completed")
    end = f"job = sidejob.get('order-{order}').terminate(recursive=True).wait(['terminated'], 30)"
    end += "; [child.wait(['terminated'], 30) for child in job.children.values()]"  # which may take a moment longer
    shop.run("manage", "shell", "-c", f"from shop.celery import sidejob; {end}; assert job.delete()")
    with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(shop.env["DATABASE_URL"]) as connection:
        connection.execute("DROP TABLE sidejob.jobs")


def test_the_shops_own_tests_pass(shop: DjangoShop) -> None:
    assert "Ran 5 tests" in shop.run("manage", "test")


def test_the_migrations_are_those_of_the_models(shop: DjangoShop) -> None:
    assert "No changes" in shop.run("manage", "makemigrations", "--check", "--dry-run")
    assert "no issues" in shop.run("manage", "check")


def _login(user: str, url: str) -> str:
    """The part of a URL that says who logs in where."""
    return f"{user}:{user}@{urlsplit(url).netloc.rpartition('@')[2]}"
