"""Whoever may create something in a schema on the search_path has it called in place of nothing of ours.

`public` is on it, and up to Postgres 14 anybody may create there. Postgres looks into its own schema first, but what
fits a call exactly wins over what fits it with a conversion, wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest

from celery_sidejob.store.schema import migrate
from tests.store.schema.test_schema import SCHEMA, UTILITY
from tests.tools.databases import Databases
from tests.tools.statements import numbered, statements

ATTACK = """
DO $do$
DECLARE l text; r text; o text; t text;
  types text[] := '{text,name,varchar,json,bytea,boolean,int2,int4,int8,float8,numeric,interval,timestamptz,oid,text[],
    int8[],float8[]}';
BEGIN
  FOREACH l IN ARRAY types LOOP FOREACH r IN ARRAY types LOOP
    FOREACH t IN ARRAY ARRAY['boolean', 'text', l] LOOP
      CONTINUE WHEN to_regprocedure(format('public."taken_%s"(%s, %s)', t, l, r)) IS NOT NULL;
      EXECUTE format('CREATE FUNCTION public."taken_%s"(%s, %s) RETURNS %s LANGUAGE plpgsql AS %L', t, l, r, t,
        'BEGIN RAISE ''this was called''; END');
    END LOOP;
    FOREACH o IN ARRAY '{=,<>,<,>,<=,>=,~~,+,-,*,/,||,->,->>}'::text[] LOOP
      CONTINUE WHEN EXISTS (SELECT FROM pg_operator
        WHERE oprname = o AND oprleft = l::regtype AND oprright = r::regtype);
      t := CASE WHEN o IN ('=', '<>', '<', '>', '<=', '>=', '~~') THEN 'boolean' WHEN o = '->>' THEN 'text' ELSE l END;
      EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public."taken_%s")',
        o, l, r, t);
    END LOOP;
  END LOOP; END LOOP;
END $do$"""
"""An operator for each pair of types for which Postgres itself has none, and would convert."""

FOUND = """
SELECT o.oprleft::regtype || ' ' || o.oprname || ' ' || o.oprright::regtype
FROM pg_depend d JOIN pg_operator o ON o.oid = d.refobjid AND d.refclassid = 'pg_operator'::regclass
WHERE o.oprnamespace = 'public'::regnamespace AND d.classid <> 'pg_operator'::regclass"""


@pytest.fixture(scope="module")
def attacked(databases: Databases) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A database in which somebody has made such operators in `public`, before our schema was made."""
    with databases.fresh() as name, psycopg.connect(databases.url_of(name), prepare_threshold=None) as connection:
        if connection.info.server_version < 140000:
            pytest.skip("only Postgres 14 and newer tell what a statement calls")
        connection.execute(ATTACK)
        connection.commit()
        migrate.upgrade(databases.url_of(name))
        yield connection


def called(connection: psycopg.Connection[tuple[object, ...]]) -> set[str]:
    """Which of those operators something uses."""
    connection.execute("SET LOCAL search_path = pg_catalog")
    return {str(row[0]) for row in connection.execute(FOUND)}


def taken(connection: psycopg.Connection[tuple[object, ...]], text: str, *, typed: bool) -> set[str]:
    """Which of those operators a statement would call; `typed`: psycopg says that small numbers are smallints."""
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL search_path = public")
        kinds = kinds_of(connection, text)
        if typed:
            said = ", ".join("smallint" if kind in ("integer", "bigint", "real") else "unknown" for kind in kinds)
            kinds = kinds_of(connection, text, f"({said})" if said else "")
        made = f"CREATE FUNCTION public.probe({', '.join(kinds)}) RETURNS void BEGIN ATOMIC {text}; END"
        connection.execute(made)  # type: ignore[arg-type]
        return called(connection)


def kinds_of(connection: psycopg.Connection[tuple[object, ...]], text: str, said: str = "") -> list[str]:
    """The types of a statement's parameters, as Postgres finds them out."""
    connection.execute(f"PREPARE probe{said} AS {text}")  # type: ignore[arg-type]
    (kinds,) = connection.execute("SELECT parameter_types::text[] FROM pg_prepared_statements").fetchone()  # type: ignore[misc]
    connection.execute("DEALLOCATE probe")
    return list(kinds)  # type: ignore[call-overload]


def test_no_statement_calls_an_operator_of_somebody_else(
    attacked: psycopg.Connection[tuple[object, ...]],
) -> None:
    found: dict[str, object] = {}
    for where, statement in statements().items():
        if UTILITY.match(statement.text):
            continue
        text, _ = numbered(statement, SCHEMA)
        for typed in (False, True):
            try:
                calls = taken(attacked, text, typed=typed)
            except psycopg.Error as error:
                calls = {str(error)}
            if calls:
                found[where] = calls
    assert found == {}, "give what is between these operators the types that Postgres' own takes"


def test_nothing_in_the_schema_calls_an_operator_of_somebody_else(
    attacked: psycopg.Connection[tuple[object, ...]],
) -> None:
    with attacked.transaction(force_rollback=True):
        assert called(attacked) == set()


def test_our_own_functions_look_nowhere_else(attacked: psycopg.Connection[tuple[object, ...]]) -> None:
    found = attacked.execute(
        "SELECT proname FROM pg_catalog.pg_proc WHERE pronamespace = %s::regnamespace"
        " AND 'search_path=pg_catalog, pg_temp' <> ALL(coalesce(proconfig, '{}'))", [SCHEMA],
    )  # fmt: skip
    assert found.fetchall() == []


def test_every_function_is_called_by_its_full_name(attacked: psycopg.Connection[tuple[object, ...]]) -> None:
    known = {name for (name,) in attacked.execute("SELECT DISTINCT proname::text FROM pg_catalog.pg_proc")}
    bare = {}
    for where, statement in statements().items():
        text = re.sub(r"--.*|\bextract\(epoch FROM", "", statement.render(SCHEMA))
        text = re.sub(r"\bunnest\((?=[^()]*(\([^()]*\)[^()]*)*,)", "", text)  # of several arrays it is syntax
        found = {
            match[2]
            for match in re.finditer(rf'(pg_catalog\.|"{SCHEMA}"\.)?\b(\w+)\(', text)
            if match[2] in known and not match[1]
        }
        catalogs = set(re.findall(r"(?<!pg_catalog\.)\bpg_(?!catalog\b)\w+(?=\s)(?!\()", text)) & set(
            re.findall(r"\b(?:FROM|JOIN)\s+(pg_\w+)\b(?!\.)", text)
        )
        if found | catalogs:
            bare[where] = found | catalogs
    assert bare == {}
