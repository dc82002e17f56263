"""Settings are found in every spelling, checked, and refused in the spelling found."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest

from celery_sidejob.model.errors import SettingsError
from celery_sidejob.model.retention import Retention
from celery_sidejob.model.settings import SETTINGS, Settings, read_settings

URL = "postgresql://localhost/shop"

# The table of settings.
USER = f"operate:scrypt:{'a' * 32}:{'0' * 64}"
DEFAULTS = {
    "database_url": None,
    "direct_url": None,
    "failover_urls": (),
    "schema": "sidejob",
    "durable_tasks": (),
    "lease": 20,
    "heartbeat_interval": 2,
    "heartbeat_file": None,
    "lock_grace": 1.5,
    "lost_after": 30,
    "max_losses": 3,
    "poll_interval": 30,
    "poll_queue": None,
    "worker_services": True,
    "sync_threads": 10,
    "on_store_down": "error",
    "timer_horizon": 60,
    "retention": None,
    "dead_retention": Retention(timedelta(days=180)),
    "history": 100,
    "stats_history": 30,
    "task_history": 0,
    "queues": None,
    "schedules": None,
    "max_value_bytes": 1_000_000,
    "redis_url": None,
    "web_users": None,
    "web_secret": None,
    "redact": None,
}


def redact(text):
    return "…"


# For each setting: what may be configured, and what is read.
GOOD = {
    "database_url": [(URL, URL), ("postgresql+psycopg://u:p@one,two/x", "postgresql+psycopg://u:p@one,two/x")],
    "direct_url": [(URL, URL), (None, None)],
    "failover_urls": [([URL], (URL,)), ((), ())],
    "schema": [("_a1", "_a1"), ("x" * 63, "x" * 63)],
    "durable_tasks": [(["shop.*", "mail"], ("shop.*", "mail"))],
    "lease": [(30, 30.0), (5.5, 5.5), (timedelta(minutes=1), 60.0)],
    "heartbeat_interval": [(1, 1.0), (0.1, 0.1)],
    "heartbeat_file": [("/run/shop/beat", "/run/shop/beat"), (Path("/run/beat"), "/run/beat"), (None, None)],
    "lock_grace": [(0, 0.0), (3, 3.0)],
    "lost_after": [(0.5, 0.5), (timedelta(minutes=2), 120.0)],
    "max_losses": [(1, 1)],
    "history": [(0, 0), (10_000, 10_000)],
    "stats_history": [(0, 0), (366, 366)],
    "task_history": [(0, 0), (5000, 5000)],
    "poll_interval": [(0.5, 0.5)],
    "poll_queue": [("sweep", "sweep"), (None, None)],
    "worker_services": [(False, False), (True, True)],
    "sync_threads": [(40, 40), (1, 1)],
    "on_store_down": [("publish", "publish"), ("error", "error")],
    "timer_horizon": [(0, 0.0)],
    "retention": [
        (timedelta(days=1), Retention(timedelta(days=1))),
        (60, Retention(timedelta(minutes=1))),
        (None, None),
        ({"older_than": 60, "keep": 5}, Retention(timedelta(minutes=1), 5)),
        ({"keep": 0}, Retention(keep=0)),
        ({"older_than": timedelta(hours=1), "keep": None}, Retention(timedelta(hours=1))),
    ],
    "schedules": [(None, None), ({"tick": {"task": "t", "every": 5}}, {"tick": {"task": "t", "every": 5}})],
    "queues": [(None, None), ({"mail": {"limit": 5, "rate": "600/m"}}, {"mail": {"limit": 5, "rate": "600/m"}})],
    "dead_retention": [
        (None, None),
        (0, Retention(timedelta(0))),
        ({"keep": 7}, Retention(keep=7)),
        (
            {"older_than": 60, "tasks": {"mail": 5, "ship": {"keep": 3}, "bill": None}},
            Retention(
                timedelta(minutes=1),
                tasks={"mail": Retention(timedelta(seconds=5)), "ship": Retention(keep=3), "bill": Retention()},
            ),
        ),
    ],
    "max_value_bytes": [(1, 1), (10**9, 10**9)],
    "web_users": [({"ann": USER}, {"ann": USER}), ({}, {}), (None, None)],
    "web_secret": [("s" * 32, "s" * 32), (None, None)],
    "redis_url": [("redis://h/0", "redis://h/0"), ("redis+socket:///x", "redis+socket:///x"), (None, None)],
    "redact": [(redact, redact), (None, None)],
}

BAD = {
    "database_url": ["mysql://h/x", "postgresqlx://h", "", 7, ["postgresql://h"]],
    "direct_url": ["sqlite://", False],
    "failover_urls": [URL, [7], ["mysql://h"], None],
    "schema": ["", "1a", "A", "a-b", "a.b", "x" * 64, "a\n", "pg_mine", None, 7],
    "durable_tasks": ["shop.*", [7], [""], None],
    "lease": [-1, "30", True, None, float("nan"), float("inf"), timedelta(-1)],
    "heartbeat_interval": [0, -1, "2"],
    "heartbeat_file": ["", 7, b"/run/beat"],
    "lock_grace": [-0.1, None],
    "lost_after": [-1, 0, "soon"],
    "max_losses": [0, -1, 1.5, True, "3", None],
    "history": [-1, 10_001, 1.5, True, "3", None],
    "stats_history": [-1, 10_001, 1.5, True, "3", None],
    "task_history": [-1, 10_001, 1.5, True, "3", None],
    "poll_interval": [0, -1, None, timedelta(0)],
    "poll_queue": ["", 7],
    "worker_services": ["yes", 1, None],
    "sync_threads": [0, -1, "10", 1.5, None],
    "on_store_down": ["raise", None, ["error"]],
    "timer_horizon": [-1],
    "retention": [
        -1,
        "1d",
        1e300,
        {},
        {"older_than": -1},
        {"keep": -1},
        {"keep": 1.5},
        {"older": 60},
        {"keep": None},
        {"keep": 5, "tasks": {"mail": 60}},
    ],
    "schedules": ["tick", {"": {}}, {"tick": 5}, {5: {}}],
    "queues": ["mail", {"": {}}, {"mail": 5}, {"mail": {"limit": 0}}, {"mail": {"limits": 5}}, {"mail": {"rate": "x"}}],
    "dead_retention": [
        -1,
        timedelta(-1),
        True,
        {"older_than": "1d", "keep": 5},
        {"tasks": {"mail": 60}},
        {"keep": 5, "tasks": ["mail"]},
        {"keep": 5, "tasks": {"mail": -1}},
        {"keep": 5, "tasks": {"": 60}},
        {"keep": 5, "tasks": {"mail": {"tasks": {}}}},
    ],
    "max_value_bytes": [0, -1, 1e6, "1MB"],
    "web_users": [USER, ["ann"], {"ann": "operate:pass"}, {"": USER}, {"ann": None}, {1: USER}],
    "web_secret": ["short", "", 7],
    "redis_url": ["localhost", 7, ""],
    "redact": ["shop.redact", 7],
}


def read(lookup=None, environ=None, **options):
    return read_settings(lookup or {}, environ or {}, **options)


def cases(table):
    # By its number where the text of a value differs from one process to the next, as an address does.
    return [
        pytest.param(name, case, id=f"{name}-{place}" if " at 0x" in repr(case) else f"{name}-{case!r:.40}")
        for name, found in table.items()
        for place, case in enumerate(found)
    ]


def also_needed(name):
    """What else must be set for this setting not to contradict."""
    return {"sidejob_database_url": "postgresql://first/x"} if name in ("direct_url", "failover_urls") else {}


def test_the_table_is_complete_and_has_the_defaults_of_the_contract():
    assert {setting.name: setting.default for setting in SETTINGS} == DEFAULTS
    assert {setting.name: getattr(read(), setting.name) for setting in SETTINGS} == DEFAULTS
    assert read() == Settings()
    assert set(GOOD) == set(BAD) == set(DEFAULTS)


def test_each_row_of_the_table_says_what_docs_need():
    for setting in SETTINGS:
        assert setting.key == f"sidejob_{setting.name}"
        assert setting.variable == setting.key.upper()
        assert setting.meaning
        assert "\n" not in setting.meaning


@pytest.mark.parametrize(("name", "case"), cases(GOOD))
def test_a_good_value_is_read(name, case):
    given, expected = case
    found = getattr(read({f"sidejob_{name}": given, **also_needed(name)}), name)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_bad_value_is_refused_in_the_spelling_found(name, value):
    for spelling, namespace in [
        (f"sidejob_{name}", None),
        (f"SIDEJOB_{name.upper()}", None),
        (f"CELERY_SIDEJOB_{name.upper()}", "CELERY"),
    ]:
        with pytest.raises(SettingsError, match=f"^{spelling} must be "):
            read({spelling: value}, namespace=namespace)


@pytest.mark.parametrize("name", ["database_url", "direct_url", "redis_url"])
def test_no_message_and_no_repr_shows_a_url(name):
    with pytest.raises(SettingsError) as refused:
        read({f"sidejob_{name}": "secret-password"})
    assert "secret" not in str(refused.value)
    if name != "redis_url":
        with pytest.raises(SettingsError, match="%23") as refused:
            read({f"sidejob_{name}": "postgresql://h/x#secret"})
        assert "secret" not in str(refused.value)
    good = {"sidejob_database_url": "postgresql://secret@h/x", f"sidejob_{name}": "postgresql://secret@h/x"}
    assert "secret" not in repr(read({**good, "sidejob_failover_urls": ["postgresql://secret@h"]}))


@pytest.mark.parametrize(
    ("spelling", "namespace"),
    [
        ("sidejob_lease", None),
        ("SIDEJOB_LEASE", None),
        ("sidejob_lease", "CELERY"),
        ("SIDEJOB_LEASE", "CELERY"),
        ("CELERY_SIDEJOB_LEASE", "CELERY"),
        ("CELERY_SIDEJOB_LEASE", "CELERY_"),
        ("celery_sidejob_lease", "celery"),
        ("SIDEJOB_SIDEJOB_LEASE", "SIDEJOB"),
    ],
)
def test_every_spelling_is_found(spelling, namespace):
    assert read({spelling: 33}, namespace=namespace).lease == 33


@pytest.mark.parametrize(
    ("spelling", "namespace", "suggestion"),
    [
        ("sidejob_leese", None, "sidejob_lease"),
        ("SIDEJOB_DATABASE_URI", None, "SIDEJOB_DATABASE_URL"),
        ("CELERY_SIDEJOB_MAX_LOSS", "CELERY", "CELERY_SIDEJOB_MAX_LOSSES"),
        ("SIDEJOB_RETENTON", "CELERY", "SIDEJOB_RETENTION"),
        ("Sidejob_Lease", None, "SIDEJOB_LEASE"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_suggested(spelling, namespace, suggestion):
    with pytest.raises(SettingsError, match=rf"^unknown setting {spelling}: .* Did you mean {suggestion}\?$"):
        read({spelling: 1}, namespace=namespace)


@pytest.mark.parametrize("spelling", ["sidejob_", "sidejob_colour"])
def test_nothing_far_fetched_is_suggested(spelling):
    with pytest.raises(SettingsError, match=rf"^unknown setting {spelling}: correct its name, or remove it.$"):
        read({spelling: 1})


def test_other_keys_are_nobodys_business_here():
    others = {
        "broker_url": "x",
        "SIDEJOBS": 1,
        "sidejob": 1,
        "CELERY_TASK_ALWAYS_EAGER": 1,
        7: 1,
        "MY_SIDEJOB_LEASE": 1,
    }
    assert read(others) == Settings()
    assert read({"SIDEJOB_TASK_ALWAYS_EAGER": True}, namespace="SIDEJOB") == Settings()


def test_one_setting_in_two_spellings_must_say_one_thing():
    same = {"sidejob_lease": 30, "SIDEJOB_LEASE": timedelta(seconds=30), "CELERY_SIDEJOB_LEASE": 30.0}
    assert read(same, namespace="CELERY").lease == 30
    with pytest.raises(SettingsError, match=r"^sidejob_lease and CELERY_SIDEJOB_LEASE are the same setting"):
        read({**same, "CELERY_SIDEJOB_LEASE": 31}, namespace="CELERY")


def test_the_configuration_goes_before_the_environment_and_that_before_the_default():
    environ = {"SIDEJOB_LEASE": "40", "SIDEJOB_MAX_LOSSES": "7"}
    settings = read({"sidejob_lease": 30}, environ)
    assert (settings.lease, settings.max_losses, settings.lost_after) == (30, 7, 30)
    assert read({"sidejob_redis_url": None}, {"SIDEJOB_REDIS_URL": "redis://h"}).redis_url is None
    # What the configuration overrides is not even looked at.
    assert read({"sidejob_lease": 30}, {"SIDEJOB_LEASE": "rubbish"}).lease == 30


def test_unknown_names_of_others_in_the_environment_are_ignored():
    others = {
        "SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_5432_TCP", "REDIS_PORT", "DATABASE_PORT", "DATABASE_SERVICE_HOST",
        "TEST_DATABASE_URL", "TEST_REDIS_URL", "TEST_AMQP_URL",
    }  # fmt: skip
    assert read({}, {f"SIDEJOB_{name}": "10.0.0.1" for name in others} | {"sidejob_lease": "99"}) == Settings()
    assert read({}, {"SIDEJOB_LESE": " "}) == Settings(), "an empty variable is one that is not set"


@pytest.mark.parametrize(
    ("name", "meant"), [("LESE", "LEASE"), ("DATABSE_URL", "DATABASE_URL"), ("MAX_LOSES", "MAX_LOSSES")]
)
def test_a_setting_that_is_misspelt_in_the_environment_is_refused(name, meant):
    with pytest.raises(SettingsError, match=rf"SIDEJOB_{name} \(environment\); did you mean SIDEJOB_{meant}\?"):
        read({}, {f"SIDEJOB_{name}": "30"})


def test_a_url_that_libpq_takes_and_sqlalchemy_does_not():
    settings = read({"sidejob_database_url": "postgres://me@host/shop", "sidejob_failover_urls": ["postgres://two/a"]})
    assert settings.database_url == "postgresql://me@host/shop"
    assert settings.failover_urls == ("postgresql://two/a",)


def test_an_empty_url_is_said_to_be_empty():
    with pytest.raises(SettingsError, match=r"^sidejob_database_url must be a URL .*; it is ''$"):
        read({"sidejob_database_url": ""})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("database_url", URL, URL),
        ("failover_urls", f"{URL}, postgresql://one,two/x", (URL, "postgresql://one,two/x")),
        ("durable_tasks", "shop.*, mail,", ("shop.*", "mail")),
        ("lease", " 30.5 ", 30.5),
        ("max_losses", "5", 5),
        ("max_value_bytes", "2000000", 2_000_000),
        ("on_store_down", "publish", "publish"),
        ("retention", "60", Retention(timedelta(minutes=1))),
        ("retention", "older_than=60, keep=1000", Retention(timedelta(minutes=1), 1000)),
        ("retention", "keep=0", Retention(keep=0)),
        ("dead_retention", "None", None),
        ("poll_queue", "sweep", "sweep"),
        *[("worker_services", text, True) for text in ("1", "true", "TRUE", "yes", "on")],
        *[("worker_services", text, False) for text in ("0", "false", "No", "off")],
        ("lease", "", 20.0),
        ("dead_retention", " ", Retention(timedelta(days=180))),
    ],
)
def test_the_environments_text_is_read(name, text, expected):
    assert getattr(read(also_needed(name), {f"SIDEJOB_{name.upper()}": text}), name) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lease", "30s"),
        ("lease", "nan"),
        ("lease", "none"),
        ("max_losses", "1.5"),
        ("max_losses", "0"),
        ("worker_services", "maybe"),
        ("database_url", "none://x"),
        ("failover_urls", "mysql://h"),
        ("redact", "shop.redact"),
        ("on_store_down", "PUBLISH"),
    ],
)
def test_bad_text_in_the_environment_is_refused_with_the_variables_name(name, text):
    with pytest.raises(SettingsError, match=rf"^SIDEJOB_{name.upper()} \(environment\) must be "):
        read({}, {f"SIDEJOB_{name.upper()}": text})


@pytest.mark.parametrize(
    ("lookup", "environ", "message"),
    [
        (
            {"sidejob_lease": 4},
            {},
            r"^sidejob_lease \(4 s\) must be more than twice sidejob_heartbeat_interval \(2 s\)",
        ),
        ({"CELERY_SIDEJOB_HEARTBEAT_INTERVAL": 10}, {}, r"twice CELERY_SIDEJOB_HEARTBEAT_INTERVAL \(10 s\)"),
        ({"sidejob_lease": 30}, {"SIDEJOB_HEARTBEAT_INTERVAL": "15"}, r"SIDEJOB_HEARTBEAT_INTERVAL \(environment\)"),
        ({"SIDEJOB_DIRECT_URL": URL}, {}, "^SIDEJOB_DIRECT_URL is set without sidejob_database_url"),
        ({"sidejob_failover_urls": [URL]}, {}, "^sidejob_failover_urls is set without sidejob_database_url"),
        *[
            (
                {"sidejob_database_url": "postgresql://one@host:5432/shop", "sidejob_failover_urls": [URL, again]},
                {},
                "^number 2 of sidejob_failover_urls is the same store as sidejob_database_url",
            )
            for again in (
                "postgresql://two:other@HOST/shop",
                "postgresql+psycopg://host/shop?connect_timeout=3",
                "postgresql:///shop?host=host",
            )
        ],
        (
            {"sidejob_database_url": "postgresql://h/x"},
            {"SIDEJOB_FAILOVER_URLS": f"{URL},{URL}"},
            r"^number 2 of SIDEJOB_FAILOVER_URLS \(environment\) is the same store as number 1",
        ),
    ],
)
def test_contradictions_are_refused_in_the_spelling_found(lookup, environ, message):
    with pytest.raises(SettingsError, match=message):
        read(lookup, environ, namespace="CELERY")


def test_settings_that_just_do_not_contradict_are_read():
    assert read({"sidejob_lease": 4.001}).lease == 4.001
    assert read({"sidejob_direct_url": URL}, {"SIDEJOB_DATABASE_URL": URL}).direct_url == URL
    several = ["postgresql://h:5433/x", "postgresql://h/y", "postgresql://i/x", "postgresql://h,i/x"]
    assert read({"sidejob_database_url": "postgresql://h/x", "sidejob_failover_urls": several}).failover_urls


def test_the_store_is_asked_for_only_where_it_is_needed():
    assert read({"sidejob_database_url": URL}).require_database_url() == URL
    with pytest.raises(SettingsError, match=r"give the store's URL as app\.conf\.sidejob_database_url"):
        read().require_database_url()


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().lease = 1
