"""The run-time role needs exactly the GRANTs that `db grants` prints: with them everything runs, without one not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from celery_sidejob import SchemaError
from celery_sidejob.store.connection.connections import Connections
from celery_sidejob.store.schema import schema_check, tables
from celery_sidejob.store.statement import Statement
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role
from tests.tools.statements import numbered, statements

SCHEMA = "sidejob"
OF_UPGRADES = {"meta._NOTE", "meta._CHANGE", "meta._FORGET"}
"""Statements of upgrades alone, which the schema's owner runs."""


@pytest.fixture
def role(database_url: str) -> Iterator[tuple[str, str]]:
    """A role with the documented GRANTs and nothing else, and its URL."""
    with a_role(direct(database_url)) as (name, url):
        written = io.StringIO()
        tables.write_grants(SCHEMA, name, written)
        with psycopg.connect(direct(database_url), autocommit=True) as owner:
            owner.execute(written.getvalue())
        yield name, url


def at_run_time() -> dict[str, Statement]:
    """Every statement that workers and clients run, by where it is."""
    return {name: statement for name, statement in statements().items() if name not in OF_UPGRADES}


def refused(connection: psycopg.Connection[Any], statement: Statement) -> str | None:
    """What the role may not do in a statement: Postgres looks before it begins with it."""
    text, count = numbered(statement, SCHEMA)
    if text.upper().startswith("SET LOCAL"):
        return None
    nothing = ", ".join(["NULL"] * count)
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(f"PREPARE probe AS {text}")
            connection.execute(f"EXPLAIN EXECUTE probe{f'({nothing})' if nothing else ''}")
    except psycopg.errors.InsufficientPrivilege as error:
        return str(error)
    finally:
        connection.execute("DEALLOCATE ALL")
    return None


def test_with_the_grants_every_statement_may_run(role: tuple[str, str]) -> None:
    with psycopg.connect(role[1], autocommit=True) as connection:
        assert {name: said for name, one in at_run_time().items() if (said := refused(connection, one))} == {}


def test_each_grant_is_needed(database_url: str, role: tuple[str, str]) -> None:
    name, url = role
    needless = []
    with psycopg.connect(direct(database_url), autocommit=True) as owner:
        with psycopg.connect(url, autocommit=True) as connection:
            for table, declared in tables.TABLES.items():
                about = [one for one in at_run_time().values() if f'"{SCHEMA}".{table}' in one.render(SCHEMA)]
                for right in declared.rights.split():
                    owner.execute(f"REVOKE {right} ON {SCHEMA}.{table} FROM {name}")
                    if not any(refused(connection, statement) for statement in about):
                        needless.append(f"{right} on {table}")
                    owner.execute(f"GRANT {right} ON {SCHEMA}.{table} TO {name}")
            owner.execute(f"REVOKE USAGE ON SEQUENCE {SCHEMA}.jobs_id_seq FROM {name}")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT nextval('{SCHEMA}.jobs_id_seq')")
    assert not needless, ", ".join(needless)


def test_a_missing_right_is_named_before_a_worker_starts(database_url: str, role: tuple[str, str]) -> None:
    name, url = role
    schema_check.check(url)
    with psycopg.connect(direct(database_url), autocommit=True) as owner:
        owner.execute(f"REVOKE UPDATE ON sidejob.jobs FROM {name}")
        owner.execute(f"REVOKE USAGE ON SEQUENCE sidejob.jobs_id_seq FROM {name}")

    with pytest.raises(SchemaError) as refusal:
        schema_check.check(url)

    assert str(refusal.value) == (
        "The user in sidejob_database_url lacks rights in schema 'sidejob': UPDATE on jobs, USAGE on jobs_id_seq. As "
        "the schema's owner run what `celery -A <app> sidejob db grants <user>` prints."
    )
    with pytest.raises(SchemaError, match=r"^The user in sidejob_failover_urls lacks rights"):
        schema_check.check(url, setting="sidejob_failover_urls")


def test_a_right_that_is_taken_away_later_is_named(database_url: str, role: tuple[str, str]) -> None:
    name, url = role
    connections = Connections(url, SCHEMA)
    with psycopg.connect(direct(database_url), autocommit=True) as owner:
        owner.execute(f"REVOKE SELECT ON sidejob.aliases FROM {name}")
    try:
        with pytest.raises(SchemaError, match=r"lacks a right that 'read' needs .*aliases.*`.* db grants <user>`"):
            connections.run(Statement("SELECT name FROM {aliases}"))
    finally:
        connections.close()


def test_a_role_with_a_name_that_must_be_quoted(database_url: str) -> None:
    written = io.StringIO()
    tables.write_grants("a schema", 'the "role"', written)

    assert 'ON "a schema"."jobs" TO "the ""role""";' in written.getvalue()


def test_who_may_not_ask_for_the_cluster_lends_a_transaction_all_the_same(
    database_url: str, role: tuple[str, str]
) -> None:
    """Which then is told from that of another cluster by the schema's name and the database's number alone."""
    with psycopg.connect(direct(database_url), autocommit=True) as owner:
        owner.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")
    connections = Connections(role[1], SCHEMA)
    try:
        with psycopg.connect(role[1]) as lent:
            assert connections.borrow(lent).run(Statement("SELECT 7 AS seven"))[0].seven == 7
    finally:
        connections.close()


def test_who_may_not_ask_for_the_cluster_upgrades_and_starts_with_a_direct_url_all_the_same(
    database_url: str, role: tuple[str, str]
) -> None:
    """The URLs are told from those of two databases by the databases' numbers alone."""
    with psycopg.connect(direct(database_url), autocommit=True) as owner:
        owner.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")

    assert schema_check.check_urls(role[1], role[1]) is None
