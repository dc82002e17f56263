"""A schema is made, brought up to date and told apart from others' by `migrate`, whoever else does the same."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

import psycopg
import pytest
from alembic.script import ScriptDirectory

from celery_sidejob.model.errors import SchemaError, StoreUnavailableError
from celery_sidejob.store import meta, workers
from celery_sidejob.store.connection.connections import Connections
from celery_sidejob.store.meta import REVISION
from celery_sidejob.store.schema import migrate, schema_check
from tests.tools.migrations import FURTHER, SECOND, add_migration, copied
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too

OWNER = {"app": "shop", "broker": "redis 0"}

# All that a schema is, as rows of text; two schemas of one name in two databases can be compared.
CATALOGUE = {
    "columns": """
        SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
          pg_get_expr(d.adbin, d.adrelid)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
          LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = to_regnamespace(%(schema)s) ORDER BY 1, 2""",
    "relations": """
        SELECT relname, relkind, reloptions, obj_description(oid, 'pg_class') FROM pg_class
        WHERE relnamespace = to_regnamespace(%(schema)s) ORDER BY 1""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = to_regnamespace(%(schema)s) ORDER BY 1, 2""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = %(schema)s ORDER BY 1",
}

CONCURRENT_INDEX = """
from alembic import op

revision = "NEXT"
down_revision = "HEAD"


def upgrade():
    with op.get_context().autocommit_block():
        op.execute("CREATE INDEX CONCURRENTLY jobs_task_idx ON sidejob.jobs (task)")
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Path]:
    """A copy of the migrations that this test may add to."""
    with copied(tmp_path) as copy:
        yield copy


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is lost with waiting for locks that are not given up."""
    monkeypatch.setattr(migrate, "UPGRADE_WAIT_S", 0.2)
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(migrate, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(migrate, "LOCK_PAUSE_S", 0.0)


def execute(url: str, statement: str, *parameters: object) -> list[tuple[object, ...]]:
    with psycopg.connect(direct(url), autocommit=True) as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


def catalogue(url: str, schema: str = "sidejob") -> dict[str, list[tuple[object, ...]]]:
    with psycopg.connect(direct(url)) as connection:
        return {part: connection.execute(query, {"schema": schema}).fetchall() for part, query in CATALOGUE.items()}


def facts(url: str) -> dict[object, object]:
    """What is recorded, but for the schema's random name."""
    return dict(execute(url, "SELECT key, value FROM sidejob.meta WHERE key <> 'identity'"))


# --- the migrations themselves ------------------------------------------------------------------------------------


def test_revisions_are_numbers_without_gaps() -> None:
    revisions = [script.revision for script in ScriptDirectory(str(migrate._scripts())).walk_revisions()]

    assert sorted(revisions) == [f"{number:04}" for number in range(1, len(revisions) + 1)]


def test_the_code_knows_the_newest_revision() -> None:
    assert ScriptDirectory(str(migrate._scripts())).get_current_head() == REVISION


def test_each_further_migration_rewrites_no_table_and_builds_its_indexes_concurrently(
    empty_database_url: str, scripts: Path
) -> None:
    url = empty_database_url
    add_migration(scripts, CONCURRENT_INDEX)
    files = """
        SELECT relname, pg_relation_filenode(oid) FROM pg_class
        WHERE relnamespace = 'sidejob'::regnamespace AND relkind IN ('r', 'i')"""
    migrate.upgrade(url, to="0001")
    execute(url, "INSERT INTO sidejob.jobs (task, queue) SELECT 't', 'q' FROM generate_series(1, 100)")
    for number in range(2, int(FURTHER) + 1):
        before = dict(execute(url, files))
        written = io.StringIO()
        migrate.upgrade_sql("sidejob", written, since=f"{number - 1:04}")
        made = re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?\S+\.(\w+)", written.getvalue())
        # What a step makes anew nobody waits for.
        written = re.sub(rf"CREATE INDEX \w+ ON \S+\.({'|'.join(made) or '-'}) ", "", written.getvalue())
        added = re.findall(r"CREATE (?:UNIQUE )?INDEX (\w+)", written)

        migrate.upgrade(url, to=f"{number:04}")

        after = dict(execute(url, files))
        assert {name: after[name] for name in before} == before
        assert set(added) <= {"CONCURRENTLY"}


@pytest.mark.parametrize("place", ["celery_sidejob/alembic", "alembic"])
def test_migrations_are_in_the_package_or_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(migrate, "__file__", str(tmp_path / "celery_sidejob" / "store" / "schema" / "migrate.py"))

    assert migrate._scripts() == tmp_path / place


def test_migrations_do_not_hide_the_library_of_the_same_name() -> None:
    assert not (migrate._scripts() / "__init__.py").exists()


# --- upgrade ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["postgresql://", "postgresql+psycopg://"])
def test_an_empty_database_gets_the_schema(empty_database_url: str, spelling: str) -> None:
    url = empty_database_url.replace("postgresql://", spelling)
    assert schema_check.current(url) is None

    assert migrate.upgrade(url, owner=OWNER) == REVISION

    assert schema_check.current(url) == REVISION
    assert facts(empty_database_url) == {**OWNER, "format": "1"}
    schema_check.check(url, owner=OWNER)


@pytest.mark.parametrize("schema", ["jobs_of_mine", "order"])
def test_the_schema_has_any_name(empty_database_url: str, schema: str) -> None:
    migrate.upgrade(empty_database_url, schema)

    schema_check.check(empty_database_url, schema)
    tables = execute(empty_database_url, "SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
    assert ("jobs",) in tables


def test_two_schemas_live_in_one_database(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, "one", owner={"app": "one", "broker": "redis 0"})
    migrate.upgrade(empty_database_url, "two", owner={"app": "two", "broker": "redis 1"})

    assert catalogue(empty_database_url, "one")["columns"] == catalogue(empty_database_url, "two")["columns"]


def test_twice_does_no_harm(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    before = catalogue(empty_database_url)

    assert migrate.upgrade(empty_database_url, owner=OWNER) == REVISION

    assert catalogue(empty_database_url) == before
    assert facts(empty_database_url) == {**OWNER, "format": "1"}


def test_the_owner_is_recorded_when_it_is_first_told(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    assert facts(empty_database_url) == {"format": "1"}
    schema_check.check(empty_database_url, owner=OWNER)

    migrate.upgrade(empty_database_url, owner=OWNER)
    assert facts(empty_database_url) == {**OWNER, "format": "1"}


def test_a_schema_that_somebody_else_made_is_filled_without_the_right_to_make_one(empty_database_url: str) -> None:
    with a_role(direct(empty_database_url)) as (role, url):
        execute(empty_database_url, f"CREATE SCHEMA sidejob AUTHORIZATION {role}")

        assert migrate.upgrade(url, owner=OWNER) == REVISION
        schema_check.check(url, owner=OWNER)


def test_several_processes_upgrade_at_once(empty_database_url: str) -> None:
    program = "import sys; from celery_sidejob.store.schema.migrate import upgrade; print(upgrade(sys.argv[1]))"
    upgrades = [
        subprocess.Popen(
            [sys.executable, "-c", program, empty_database_url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for _ in range(3)
    ]

    said = [upgrade.communicate(timeout=60) for upgrade in upgrades]

    assert said == [(f"{REVISION}\n", "")] * 3


def test_upgrades_of_one_schema_take_turns(empty_database_url: str) -> None:
    with ThreadPoolExecutor() as threads, psycopg.connect(direct(empty_database_url)) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s, hashtext('sidejob'))", [migrate.UPGRADE_LOCK])
        upgrading = threads.submit(migrate.upgrade, empty_database_url)
        wait_until(lambda: queries_of_upgrades(empty_database_url) == ["ROLLBACK"])  # it has asked
        assert migrate.upgrade(empty_database_url, "another") == REVISION
        assert schema_check.current(empty_database_url) is None

        other.commit()
        assert upgrading.result(30) == REVISION


@pytest.mark.usefixtures("impatient")
def test_an_upgrade_does_not_wait_for_ever_for_another(empty_database_url: str) -> None:
    with psycopg.connect(direct(empty_database_url)) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s, hashtext('sidejob'))", [migrate.UPGRADE_LOCK])

        with pytest.raises(
            SchemaError, match=r"Another upgrade of schema 'sidejob' .* by the session \d+ of .*; nothing was changed"
        ):
            migrate.upgrade(empty_database_url)
    assert execute(empty_database_url, "SELECT to_regnamespace('sidejob')") == [(None,)]


def test_a_second_migration_is_applied_to_what_is_there(empty_database_url: str, scripts: Path) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    execute(empty_database_url, "INSERT INTO sidejob.jobs (task, queue) VALUES ('t', 'q')")
    add_migration(scripts, SECOND)

    assert migrate.upgrade(empty_database_url, owner=OWNER) == FURTHER

    assert execute(empty_database_url, "SELECT task, colour FROM sidejob.jobs") == [("t", None)]


def test_a_migration_that_fails_leaves_the_revision_before_it(empty_database_url: str, scripts: Path) -> None:
    add_migration(scripts, SECOND + '    op.execute("SELECT 1 / 0")\n')

    with pytest.raises(Exception, match="division by zero"):
        migrate.upgrade(empty_database_url, owner=OWNER)

    assert schema_check.current(empty_database_url) == REVISION
    assert not execute(empty_database_url, "SELECT 1 FROM pg_attribute WHERE attname = 'colour'")


def test_a_migration_tries_again_for_a_table_that_is_in_use(
    empty_database_url: str, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(empty_database_url)
    add_migration(scripts, SECOND)
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(migrate, "LOCK_PAUSE_S", 0.0)
    monkeypatch.setattr(migrate, "LOCK_ATTEMPTS", 1000)
    tries = set()

    def has_tried_twice() -> bool:
        waiting = (
            "SELECT xact_start FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        tries.update(execute(empty_database_url, waiting))
        return len(tries) > 1  # each try is a transaction of its own

    with ThreadPoolExecutor() as threads, psycopg.connect(direct(empty_database_url)) as reader:
        reader.execute("SELECT count(*) FROM sidejob.jobs")
        upgrading = threads.submit(migrate.upgrade, empty_database_url)
        wait_until(has_tried_twice)
        reader.commit()
        assert upgrading.result(30) == FURTHER


@pytest.mark.usefixtures("impatient")
def test_a_table_that_stays_in_use_is_named(empty_database_url: str, scripts: Path) -> None:
    migrate.upgrade(empty_database_url)
    add_migration(scripts, SECOND)

    with psycopg.connect(direct(empty_database_url)) as reader:
        reader.execute("SELECT count(*) FROM sidejob.jobs")
        with pytest.raises(
            SchemaError, match=r"could not be migrated, after several attempts \(.*lock timeout\).*end the trans"
        ):
            migrate.upgrade(empty_database_url)

    assert schema_check.current(empty_database_url) == REVISION
    assert migrate.upgrade(empty_database_url) == FURTHER


def test_an_index_is_built_concurrently_while_another_upgrade_waits(empty_database_url: str, scripts: Path) -> None:
    migrate.upgrade(empty_database_url)
    add_migration(scripts, CONCURRENT_INDEX)

    def one_builds_and_one_waits() -> bool:
        queries = queries_of_upgrades(empty_database_url)
        return "ROLLBACK" in queries and any("CONCURRENTLY" in query for query in queries)

    with ThreadPoolExecutor() as threads, psycopg.connect(direct(empty_database_url)) as writer:
        writer.execute("INSERT INTO sidejob.jobs (task, queue) VALUES ('t', 'q')")
        upgrades = [threads.submit(migrate.upgrade, empty_database_url) for _ in range(2)]
        wait_until(one_builds_and_one_waits)
        writer.commit()
        assert [upgrade.result(30) for upgrade in upgrades] == [FURTHER, FURTHER]

    index = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('sidejob.jobs_task_idx')"
    assert execute(empty_database_url, index) == [(True,)]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [False, True])
def test_a_missing_schema_is_refused(empty_database_url: str, made: bool) -> None:
    if made:
        execute(empty_database_url, "CREATE SCHEMA sidejob")

    with pytest.raises(SchemaError) as refused:
        schema_check.check(empty_database_url)

    assert str(refused.value) == (
        "Schema 'sidejob' is missing, or it has no tables of ours: run `celery -A <app> sidejob db upgrade`."
    )


def test_an_older_schema_is_refused(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate.upgrade(empty_database_url)
    monkeypatch.setattr(meta, "REVISION", "0003")

    with pytest.raises(SchemaError) as refused:
        schema_check.check(empty_database_url)

    assert str(refused.value) == (
        "Schema 'sidejob' is at revision 0001, older than this version of celery_sidejob runs on (0002 or newer): "
        "run `celery -A <app> sidejob db upgrade`."
    )


@pytest.mark.parametrize("revision", ["0001", "0006"])
@pytest.mark.parametrize("act", [schema_check.current, schema_check.check, migrate.upgrade])
def test_a_schema_of_a_time_before_the_first_release_is_refused(empty_database_url: str, act, revision: str) -> None:
    """Its revisions have the same numbers, and its outbox had a column `look_at`."""
    migrate.upgrade(empty_database_url)
    execute(empty_database_url, "CREATE INDEX messages_queue_look_at_idx ON sidejob.messages (queue)")
    execute(empty_database_url, "UPDATE sidejob.alembic_version SET version_num = %s", revision)

    with pytest.raises(SchemaError) as refused:
        act(empty_database_url)

    assert str(refused.value) == (
        "Schema 'sidejob' is of a version before the first release, and no upgrade leads on from there: let its work "
        'end with that version, drop it (DROP SCHEMA "sidejob" CASCADE), and run `celery -A <app> sidejob db upgrade`.'
    )


@pytest.mark.parametrize("act", [schema_check.check, migrate.upgrade])
def test_a_newer_schema_is_refused(empty_database_url: str, act) -> None:
    migrate.upgrade(empty_database_url)
    execute(empty_database_url, "UPDATE sidejob.alembic_version SET version_num = '9999'")

    with pytest.raises(SchemaError) as refused:
        act(empty_database_url)

    assert str(refused.value) == (
        f"Schema 'sidejob' is at revision 9999, newer than this version of celery_sidejob knows ({REVISION}): "
        "upgrade the package celery-sidejob here."
    )


@pytest.mark.parametrize(
    ("distance", "refused"), [(-2, "older than"), (-1, None), (0, None), (1, None), (2, "newer than")]
)
def test_neighbouring_revisions_are_accepted_once_they_are_supported(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, distance: int, refused: str | None
) -> None:
    migrate.upgrade(empty_database_url)
    execute(empty_database_url, "UPDATE sidejob.alembic_version SET version_num = '0005'")
    monkeypatch.setattr(meta, "REVISION", f"{5 - distance:04}")

    with pytest.raises(SchemaError, match=refused) if refused else nullcontext():
        schema_check.check(empty_database_url)


REMEDY = (
    "One schema serves one app and one broker: set sidejob_schema to another name and run "
    "`celery -A <app> sidejob db upgrade`, or correct "
)
THE_APP = "the app's name, as in Celery('shop')"
THE_BROKER = "the broker (the family, virtual host or database number of broker_url, and its global_keyprefix)"
OTHERS = {
    "app": ({"app": "blog"}, f"the app 'shop', but here is the app 'blog'. {REMEDY}{THE_APP}."),
    "broker": ({"broker": "amqp /"}, f"the broker 'redis 0', but here is the broker 'amqp /'. {REMEDY}{THE_BROKER}."),
    "both": (
        {"app": "blog", "broker": "redis 1"},
        (
            f"the app 'shop' and the broker 'redis 0', but here is the app 'blog' and the broker 'redis 1'. {REMEDY}"
            f"{THE_APP} and {THE_BROKER}."
        ),
    ),
}


@pytest.mark.parametrize("act", [schema_check.check, migrate.upgrade])
@pytest.mark.parametrize("other", OTHERS)
def test_another_owner_is_refused(empty_database_url: str, act, other: str) -> None:
    owner, said = OTHERS[other]
    migrate.upgrade(empty_database_url, owner=OWNER)

    with pytest.raises(SchemaError) as refused:
        act(empty_database_url, owner={**OWNER, **owner})

    moved = (
        "If it has moved on purpose, stop all workers and run `celery -A <app> sidejob db reassign`. To change the "
        "broker without a stop, begin with `… db reassign --beside`."
    )
    assert str(refused.value) == f"Schema 'sidejob' belongs to {said} {moved}"
    assert facts(empty_database_url) == {**OWNER, "format": "1"}


def test_another_owner_migrates_nothing(empty_database_url: str, scripts: Path) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    add_migration(scripts, SECOND)

    with pytest.raises(SchemaError, match="belongs to the app 'shop'"):
        migrate.upgrade(empty_database_url, owner={**OWNER, "app": "blog"})

    assert schema_check.current(empty_database_url) == REVISION


@pytest.mark.parametrize("act", [schema_check.check, migrate.upgrade])
def test_another_format_is_refused(empty_database_url: str, act) -> None:
    migrate.upgrade(empty_database_url)
    execute(empty_database_url, "UPDATE sidejob.meta SET value = '2' WHERE key = 'format'")

    with pytest.raises(SchemaError, match="holds rows of format 2, this version of celery_sidejob reads 1: upgrade"):
        act(empty_database_url)


@pytest.mark.parametrize("revision", ["1975ea83b712", "0001"])
@pytest.mark.parametrize("act", [schema_check.current, schema_check.check, migrate.upgrade])
def test_another_programs_migrations_are_left_alone(empty_database_url: str, act, revision: str) -> None:
    execute(empty_database_url, "CREATE TABLE public.alembic_version (version_num varchar(32) NOT NULL)")
    execute(empty_database_url, "INSERT INTO public.alembic_version VALUES (%s)", revision)

    with pytest.raises(SchemaError, match=rf"'public' holds another program's migrations \(revision '{revision}'\)"):
        act(empty_database_url, "public")


def test_another_programs_tables_are_left_alone(empty_database_url: str) -> None:
    execute(empty_database_url, "CREATE TABLE public.jobs (mine int)")

    with pytest.raises(SchemaError, match=r"'public' holds tables of something else \(relation \"jobs\" already"):
        migrate.upgrade(empty_database_url, "public")

    assert schema_check.current(empty_database_url, "public") is None
    assert execute(empty_database_url, "SELECT to_regclass('public.meta')") == [(None,)]


@pytest.mark.parametrize("act", [schema_check.check, migrate.upgrade])
def test_a_missing_right_is_named(empty_database_url: str, act) -> None:
    migrate.upgrade(empty_database_url)

    with a_role(direct(empty_database_url)) as (_, url):
        with pytest.raises(
            SchemaError, match=r"lacks a right .*\(permission denied for schema sidejob\).*db grants <user>"
        ):
            act(url)


def test_who_may_not_make_the_schema_is_told_who_may(empty_database_url: str) -> None:
    with a_role(direct(empty_database_url)) as (_, url):
        with pytest.raises(SchemaError) as caught:
            migrate.upgrade(url)

    said = str(caught.value)
    assert said.startswith(
        "Schema 'sidejob' is not there yet, and the user in sidejob_database_url may not make it (perm"
    )
    assert "sidejob db upgrade` as a role that may create schemas in this database" in said
    assert "grants" not in said


@pytest.mark.parametrize("act", [schema_check.current, schema_check.check, migrate.upgrade])
def test_a_store_that_is_away_is_no_matter_of_the_schema(empty_database_url: str, act) -> None:
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        act(empty_database_url + "_gone")


def test_check_uses_connections_that_are_there(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    connections = Connections(empty_database_url, "sidejob")
    try:
        schema_check.check(connections, "sidejob", owner=OWNER)
        with pytest.raises(SchemaError, match="belongs to"):
            schema_check.check(connections, "sidejob", owner={**OWNER, "app": "blog"})
    finally:
        connections.close()


# --- what older workers need --------------------------------------------------------------------------------------

CONTRACTION = """
from alembic import op

revision = "NEXT"
down_revision = "HEAD"
oldest_worker = "HEAD"


def upgrade():
    op.execute("ALTER TABLE sidejob.jobs DROP COLUMN created_by")
"""


def test_nothing_is_taken_from_older_workers_that_run(
    empty_database_url: str, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = empty_database_url
    migrate.upgrade(url)
    with closing(Connections(url, "sidejob")) as connections:
        newer = workers.register(connections, "new:1:x")
        with monkeypatch.context() as patch:
            patch.setattr(meta, "REVISION", "0000")
            older = workers.register(connections, "old:77:x")
        assert execute(url, "SELECT ident, revision FROM sidejob.workers") == [
            ("new:1:x", REVISION),
            ("old:77:x", "0000"),
        ]
        add_migration(scripts, CONTRACTION)

        with pytest.raises(SchemaError) as refused:
            migrate.upgrade(url)

        assert str(refused.value) == (
            f"Revision {FURTHER} takes away what workers of a version before revision {REVISION} need, and of those "
            "some run: old pid 77. Deploy a newer version to them and run `celery -A <app> sidejob db upgrade` again; "
            "nothing was changed."
        )
        assert schema_check.current(url) == REVISION
        workers.leave(connections, older)
        assert migrate.upgrade(url) == FURTHER
        assert workers.beat(connections, newer, schema="sidejob")


# --- another owner on purpose -------------------------------------------------------------------------------------


def test_a_schema_is_given_to_another_broker_and_what_waits_is_published_there(empty_database_url: str) -> None:
    url, moved = empty_database_url, {**OWNER, "broker": "redis 1"}
    migrate.upgrade(url, owner=OWNER)
    execute(url, "INSERT INTO sidejob.jobs (task, queue) SELECT 't', 'q' FROM generate_series(1, 2500)")
    execute(
        url,
        """
        INSERT INTO sidejob.messages (task_id, job_id, for_run, queue, published_at, next_check_at, check_interval)
        SELECT 'm' || id, id, 1, 'q', now(), now() + interval '6 h', '6 h' FROM sidejob.jobs""",
    )

    assert migrate.reassign(url, owner=moved) == OWNER

    schema_check.check(url, owner=moved)
    with pytest.raises(SchemaError, match="belongs to the broker 'redis 1'"):
        schema_check.check(url, owner=OWNER)
    due = "SELECT count(*) FROM sidejob.messages WHERE published_at IS NULL AND next_check_at <= now()"
    assert execute(url, due) == [(2500,)]
    assert migrate.reassign(url, owner=moved) == moved


def test_a_schema_with_workers_that_run_is_not_given_away(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    with closing(Connections(empty_database_url, "sidejob")) as connections:
        running = [workers.register(connections, f"host{number}:7:x") for number in range(5)]

        with pytest.raises(SchemaError, match=r"workers that run \(host0 pid 7, host1 pid 7, host2 pid 7 and 2 more\)"):
            migrate.reassign(empty_database_url, owner={**OWNER, "app": "blog"})

        assert facts(empty_database_url) == {**OWNER, "format": "1"}
        migrate.reassign(empty_database_url, owner=OWNER)  # nothing changes hands
        for worker in running:
            workers.leave(connections, worker)
        assert migrate.reassign(empty_database_url, owner={**OWNER, "app": "blog"}) == OWNER


def test_two_brokers_are_served_until_the_schema_is_given_to_one(empty_database_url: str) -> None:
    url, other, third = empty_database_url, {**OWNER, "broker": "redis 1"}, {**OWNER, "broker": "redis 2"}
    migrate.upgrade(url, owner=OWNER)
    assert migrate.admit(url, owner=OWNER) == OWNER["broker"]  # nothing to do
    with pytest.raises(SchemaError, match="belongs to the broker"):
        schema_check.check(url, owner=other)

    assert migrate.admit(url, owner=other) == OWNER["broker"]
    assert migrate.admit(url, owner=other) == OWNER["broker"]  # once more

    for owner in (OWNER, other):
        schema_check.check(url, owner=owner)
        migrate.upgrade(url, owner=owner)
    for refused in (third, {**other, "app": "blog"}):
        with pytest.raises(SchemaError, match="belongs to the"):
            schema_check.check(url, owner=refused)
    with pytest.raises(SchemaError, match="has workers of two brokers already, 'redis 0' and 'redis 1': end that by"):
        migrate.admit(url, owner=third)
    with pytest.raises(SchemaError, match="belongs to the app"):
        migrate.admit(url, owner={**other, "app": "blog"})
    with closing(Connections(url, "sidejob")) as connections:
        old = workers.register(connections, "old:7:x", broker=OWNER["broker"])
        workers.register(connections, "new:8:x", broker=other["broker"])
        with pytest.raises(SchemaError, match=r"workers that run \(old pid 7\): stop them"):
            migrate.reassign(url, owner=other)
        with pytest.raises(SchemaError, match=r"workers that run \(new pid 8\): stop them"):
            migrate.reassign(url, owner=OWNER)
        with pytest.raises(SchemaError, match=r"workers that run \(old pid 7, new pid 8\): stop them"):
            migrate.reassign(url, owner=third)
        workers.leave(connections, old)
        assert migrate.reassign(url, owner=other) == OWNER  # workers of the broker that stays may run
    with pytest.raises(SchemaError, match="belongs to the broker 'redis 1'"):
        schema_check.check(url, owner=OWNER)


def test_what_waits_is_published_again_tasks_too(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url, owner=OWNER)
    execute(
        empty_database_url,
        """
        INSERT INTO sidejob.messages (task_id, task, generation, body, publication, queue, published_at,
          due_at, next_check_at, check_interval)
        SELECT 't' || n, 't', 1, 'x', '{}', 'q' || n % 2, now(), now() + n / 1200 * interval '1 h',
          now() + interval '6 h', '6 h'
        FROM generate_series(1, 1200) n""",
    )

    migrate.reassign(empty_database_url, owner={**OWNER, "broker": "redis 1"})

    checked = "SELECT count(*) FROM sidejob.messages WHERE published_at IS NULL AND next_check_at "
    assert execute(empty_database_url, checked + "<= now()") == [(1199,)]
    assert execute(empty_database_url, checked + "= due_at AND due_at > now()") == [(1,)]


def test_what_is_not_there_is_not_given_away(empty_database_url: str) -> None:
    with pytest.raises(SchemaError, match="missing"):
        migrate.reassign(empty_database_url, owner=OWNER)


# --- a name of its own --------------------------------------------------------------------------------------------


def test_each_schema_is_given_a_name_once(databases, empty_database_url: str) -> None:
    name = "SELECT value FROM sidejob.meta WHERE key = 'identity'"
    migrate.upgrade(empty_database_url)
    ((first,),) = execute(empty_database_url, name)
    migrate.upgrade(empty_database_url)
    assert execute(empty_database_url, name) == [(first,)]

    written = io.StringIO()
    migrate.upgrade_sql("sidejob", written)
    with databases.fresh() as other:
        execute(databases.url_of(other), written.getvalue())
        ((second,),) = execute(databases.url_of(other), name)
    assert first != second


# --- offline ------------------------------------------------------------------------------------------------------


def test_the_sql_for_a_dba_makes_the_same_schema(databases, empty_database_url: str) -> None:
    written = io.StringIO()
    migrate.upgrade_sql("sidejob", written, owner=OWNER)
    with databases.fresh() as name:
        by_hand = databases.url_of(name)
        execute(by_hand, written.getvalue())
        migrate.upgrade(empty_database_url, owner=OWNER)

        schema_check.check(by_hand, owner=OWNER)
        assert catalogue(by_hand) == catalogue(empty_database_url)
        assert facts(by_hand) == facts(empty_database_url)
        rows = "SELECT * FROM sidejob.leases"
        assert [row[:2] for row in execute(by_hand, rows)] == [row[:2] for row in execute(empty_database_url, rows)]


def test_the_sql_from_a_revision_on_is_what_was_added(empty_database_url: str, scripts: Path) -> None:
    migrate.upgrade(empty_database_url)
    add_migration(scripts)
    written = io.StringIO()
    migrate.upgrade_sql("sidejob", written, since=REVISION)

    for statement in written.getvalue().split(";"):  # as psql does: those outside of a transaction must stay there
        if statement.strip():
            execute(empty_database_url, statement)

    assert schema_check.current(empty_database_url) == FURTHER
    schema_check.check(empty_database_url)
    with pytest.raises(SchemaError, match="There is no revision '0'"):
        migrate.upgrade_sql("sidejob", written, since="0")


def test_the_sql_needs_no_database_and_names_no_owner_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()
    migrate.upgrade_sql("sidejob", written)

    begins = 'SET search_path = pg_catalog, pg_temp;\n\nCREATE SCHEMA IF NOT EXISTS "sidejob";\n'
    assert written.getvalue().startswith(begins)
    assert "'app'" not in written.getvalue()
    assert capsys.readouterr() == ("", "")


def test_what_looks_like_a_parameter_in_ddl_is_none(databases, empty_database_url: str, scripts: Path) -> None:
    remark = "100% of %s, %(name)s :name '':x'' a::b 12:30"
    jobs = scripts / "versions" / "0001_schema.py"
    last = "CREATE INDEX aliases_job_id_idx ON {s}.aliases (job_id);\n"
    assert last in jobs.read_text()
    jobs.write_text(jobs.read_text().replace(last, f"{last}COMMENT ON TABLE {{s}}.jobs IS '{remark}';\n"))
    written = io.StringIO()

    migrate.upgrade(empty_database_url)
    migrate.upgrade_sql("sidejob", written)
    with databases.fresh() as name:
        execute(databases.url_of(name), written.getvalue())

        for url in (empty_database_url, databases.url_of(name)):
            comment = execute(url, "SELECT obj_description('sidejob.jobs'::regclass, 'pg_class')")
            assert comment == [(remark.replace("''", "'"),)]


def test_upgrading_says_nothing(
    empty_database_url: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    migrate.upgrade(empty_database_url)
    schema_check.check(empty_database_url)

    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


# --- tools --------------------------------------------------------------------------------------------------------


def queries_of_upgrades(url: str) -> list[str]:
    """What each of our connections to this database does or has done last."""
    found = execute(
        url,
        "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'celery_sidejob'",
    )
    return [str(query) for (query,) in found]
