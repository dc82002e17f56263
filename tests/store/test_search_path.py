"""Whoever may create something in a schema on the search_path has it called in place of nothing of ours.

`public` is on it, and up to Postgres 14 anybody may create there. Postgres looks into its own schema first, but what
fits a call exactly wins over what fits it with a conversion, wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from typing import LiteralString

import psycopg
import pytest

from celery_sidejob.store.schema import migrate
from tests.store.schema.test_schema import SCHEMA, UTILITY
from tests.tools.databases import Databases
from tests.tools.statements import numbered, statements

ATTACK = """
DO $do$
DECLARE one record; types regtype[] := '{text,name,varchar,json,int2,int4,int8,float4,float8,numeric,oid,interval,
    timestamptz,date,boolean,bytea,text[],int2[],int4[],int8[],float8[],timestamptz[],bytea[]}';
  kinds text := 'ssssnnnnnnntttbcaaaaaaa';
BEGIN
  FOR one IN
    SELECT o.name, l.type AS l, r.type AS r, o.result::text AS t,
      coalesce(l.type::text || ', ', '') || r.type::text AS arguments
    FROM (SELECT DISTINCT ON (p.oprname, p.oprleft = 0) p.oprname AS name, p.oprleft = 0 AS prefix,
        p.oprresult::regtype AS result
      FROM pg_operator p WHERE p.oprname = ANY(current_setting('attack.by')::text[])
      ORDER BY 1, 2, p.oprresult = 'boolean'::regtype DESC, 3) o
    CROSS JOIN unnest(types, string_to_array(kinds, NULL)) AS r(type, kind)
    LEFT JOIN unnest(types, string_to_array(kinds, NULL)) AS l(type, kind) ON NOT o.prefix
    WHERE (o.prefix OR o.name = '||' OR l.kind = r.kind OR l.kind || r.kind IN ('tn', 'nt', 'sn'))
      AND NOT EXISTS (SELECT FROM pg_operator p
        WHERE p.oprname = o.name AND p.oprleft = coalesce(l.type, 0::oid) AND p.oprright = r.type)
  LOOP
    IF to_regprocedure(format('public.%I(%s)', 'taken ' || one.t, one.arguments)) IS NULL THEN
      EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L', 'taken ' || one.t,
        one.arguments, one.t, 'BEGIN RAISE ''this was called''; END');
    END IF;
    EXECUTE format('CREATE OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = public.%I)', one.name,
      'LEFTARG = ' || one.l::text || ',', one.r, 'taken ' || one.t);
  END LOOP;
END $do$"""
"""An operator for each pair of types, or type, for which Postgres itself has none, and may convert."""

FOUND = """
SELECT o.oprleft::regtype || ' ' || o.oprname || ' ' || o.oprright::regtype
FROM pg_depend d JOIN pg_operator o ON o.oid = d.refobjid AND d.refclassid = 'pg_operator'::regclass
WHERE o.oprnamespace = 'public'::regnamespace AND d.classid <> 'pg_operator'::regclass"""
BY_PROBE = " AND d.classid = 'pg_proc'::regclass AND d.objid = to_regproc('public.probe')"


def operators() -> list[str]:
    """What looks like an operator in our statements, and what other syntax stands for."""
    texts = (re.sub(r"--.*|'[^']*'|%\(\w+\)s", "", one.text.replace("%%", "%")) for one in statements().values())
    found = {word for text in texts for word in re.findall(r"[-+*/<>=~!@#%^&|`?]+", text)}
    return sorted(found | {"=", "<>", "<", ">", "<=", ">=", "~~", "!~~"})


@pytest.fixture(scope="module")
def attacked(databases: Databases) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A database in which somebody has made such operators in `public`, before our schema was made."""
    with databases.fresh() as name, psycopg.connect(databases.url_of(name), prepare_threshold=None) as connection:
        if connection.info.server_version < 140000:
            pytest.skip("only Postgres 14 and newer tell what a statement calls")
        connection.execute("SELECT set_config('attack.by', %s::text[]::text, false)", [operators()])
        connection.execute("SET LOCAL search_path = pg_catalog")  # or it would fall for its own operators
        connection.execute(ATTACK)
        connection.execute("ANALYZE pg_depend; ANALYZE pg_operator; ANALYZE pg_proc")
        connection.commit()
        migrate.upgrade(databases.url_of(name))
        yield connection


def called(connection: psycopg.Connection[tuple[object, ...]], by: LiteralString = "") -> set[str]:
    """Which of those operators something uses."""
    connection.execute("SET LOCAL search_path = pg_catalog")
    return {str(row[0]) for row in connection.execute(FOUND + by)}


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
        return called(connection, BY_PROBE)


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


def test_nothing_that_a_dba_runs_by_hand_calls_an_operator_of_somebody_else(
    attacked: psycopg.Connection[tuple[object, ...]],
) -> None:
    written = StringIO()
    migrate.upgrade_sql("by_hand", written)
    with psycopg.connect(attacked.info.dsn, password=attacked.info.password, autocommit=True) as connection:
        connection.execute(written.getvalue())  # type: ignore[arg-type]
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
