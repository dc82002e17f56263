"""The page on moving: what it says to remove leaves the tables of others."""

from __future__ import annotations

import re

import psycopg

from celery_sidejob.store.schema import migrate
from tests.tools.apps import make_app
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role
from tests.tools.versions import SQLALCHEMY_2_0_22
from tests.tools.workers import ROOT

pytestmark = SQLALCHEMY_2_0_22
PAGE = ROOT / "docs" / "moving.md"


def shown() -> str:
    """The page's SQL that drops the schema."""
    (found,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_the_results_of_celery_stay_when_the_schema_with_the_name_of_the_role_is_dropped(
    empty_database_url: str,
) -> None:
    with (
        psycopg.connect(direct(empty_database_url), autocommit=True) as admin,
        a_role(empty_database_url) as (role, url),
    ):
        admin.execute(f"GRANT CREATE ON DATABASE {admin.info.dbname} TO {role}")
        migrate.upgrade(url, role)
        backend = f"db+{url.replace('postgresql:', 'postgresql+psycopg:')}"
        with make_app("shop", broker="memory://", result_backend=backend) as app:
            app.backend.store_result("before", 1, "SUCCESS")
            assert admin.execute("SELECT to_regclass(%s)", (f"{role}.celery_taskmeta",)).fetchone() != (None,)

            admin.execute(shown().replace("sidejob", role))

            assert admin.execute("SELECT to_regnamespace(%s)", (role,)).fetchone() == (None,)
            app.backend.store_result("after", 2, "SUCCESS")
            assert [app.AsyncResult(task_id).result for task_id in ("before", "after")] == [1, 2]


def test_it_passes_over_tables_that_are_not_there(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, "sidejob")
    with psycopg.connect(direct(empty_database_url), autocommit=True) as admin:
        admin.execute(shown())
        assert admin.execute("SELECT to_regnamespace('sidejob')").fetchone() == (None,)
