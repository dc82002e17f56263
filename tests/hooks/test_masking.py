"""No setting that holds a URL leaves the process with its password, whatever its name and its form."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery import Celery
from celery.worker import control

from celery_sidejob import SettingsError
from celery_sidejob.hooks.broker import broker_check
from celery_sidejob.hooks.configuration import broker_family, broker_identity, broker_is_store, masked_text
from celery_sidejob.hooks.steps import DisconnectionStep
from celery_sidejob.model.settings import SETTINGS
from tests.tools.apps import make_app
from tests.tools.versions import KOMBU_5_7

PASSWORD = "hunter2"
URL = f"postgresql://ann:{PASSWORD}@127.0.0.1:1/shop"
REDIS = f"redis://:{PASSWORD}@127.0.0.1:1/0"
SECRET = [setting for setting in SETTINGS if setting.kind.secret]
FORMS: dict[str, Any] = {
    "a URL": URL,
    "a URL without a user": REDIS,
    "a password that is not escaped": f"redis://:a/b;c@d,{PASSWORD}@h/0",
    "several": f"{REDIS};sidejob://:{PASSWORD}@b",
    "several, separated by commas": f"{URL},{URL}",
    "a parameter": f"postgresql://h/shop?user=ann&password={PASSWORD}&sslmode=require",
    "libpq's own form": f"host=h password='{PASSWORD} and more' dbname=shop",
    "bytes": URL.encode(),
    "a list": [URL, REDIS],
    "a tuple of lists": ([URL], [REDIS]),
    "a set": {URL},
    "a dict": {"one": URL, "two": {"three": [REDIS]}},
    "keys of a dict": {URL: 1},
    "a dict in a list": [{"password": PASSWORD, "host": "h"}],
    "an object": kombu.Connection(REDIS),
    "an object that shows all": SimpleNamespace(url=URL),
}


def shown(app: Celery) -> str:
    """All that leaves the process: what remote control answers, with and without defaults, and a bug report."""
    state = SimpleNamespace(app=app)
    conf = [repr(control.conf(state, with_defaults=defaults)) for defaults in (False, True)]
    return "\n".join([*conf, repr(control.report(state)), app.bugreport(), app.conf.humanize()])


def made(**settings: Any) -> Celery:
    """An app with the extension and these settings."""
    app = make_app("shop")
    app.conf.update(settings)
    return app


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["shop_replica", "SHOP_REPLICA", *(setting.key for setting in SECRET)])
def test_a_setting_of_any_form_is_shown_without_its_password(key: str, form: str) -> None:
    text = shown(made(**{key: FORMS[form], "shop_hours": [9, "to", 17]}))
    assert PASSWORD not in text
    assert "'shop_hours': [9, 'to', 17]" in text


def test_every_setting_that_holds_a_url_is_a_secret_and_who_may_log_in() -> None:
    urls = {setting.name for setting in SETTINGS if "url" in setting.name}
    assert urls | {"web_users", "web_secret"} == {setting.name for setting in SECRET}


@pytest.mark.parametrize("namespace", ["CELERY", "celery", "SHOP_"])
def test_settings_in_a_namespace_are_shown_without_passwords(namespace: str) -> None:
    app = make_app("shop", broker=None)
    prefix = namespace.rstrip("_") + "_"
    given = {prefix + (key.upper() if namespace.isupper() else key): URL for key in ["sidejob_direct_url", "a_replica"]}
    app.config_from_object(given, namespace=namespace)
    assert PASSWORD not in shown(app)
    app.config_from_object({"a_replica": REDIS}, force=True)
    assert PASSWORD not in shown(app), "it is masked after it was loaded again"


def test_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SECRET:
        monkeypatch.setenv(setting.variable, URL)
    assert PASSWORD not in shown(made())


BROKERS = [
    {"broker_url": f"{REDIS};{REDIS}"},
    {"broker_url": [REDIS, REDIS]},
    {"broker_read_url": REDIS, "broker_write_url": f"{REDIS};{REDIS}"},
    {"broker_url": f"sentinel://:{PASSWORD}@h:1", "broker_transport_options": {
        "master_name": "m", "sentinel_kwargs": {"password": PASSWORD}}},
    {"broker_url": REDIS, "broker_transport_options": {"also": REDIS}},
    pytest.param(
        {"broker_url": "sidejobpg://", "sidejob_database_url": URL, "sidejob_direct_url": URL},
        marks=pytest.mark.skipif(kombu.VERSION[:2] < (5, 7), reason="sidejobpg:// needs kombu 5.7"),
    ),
    {"result_backend": f"{REDIS};{REDIS}"},
    {"result_backend": f"db+{URL}"},
]  # fmt: skip


@pytest.mark.parametrize("settings", BROKERS)
def test_brokers_and_backends_are_shown_without_passwords(settings: dict[str, Any]) -> None:
    app = made(**settings)
    assert PASSWORD not in shown(app)
    for connection in (app.connection_for_read(), app.connection_for_write()):
        stats = DisconnectionStep.info(
            DisconnectionStep.__new__(DisconnectionStep), SimpleNamespace(connection=connection)
        )
        assert PASSWORD not in repr(stats)
        assert stats["broker"]["transport"]


UNCLEAR = (
    "u:a/hunter2@h:1/0", "u:a#hunter2@h:1/0", "u:a?hunter2@h:1/0", "u:a@hunter2@h:1/0", "u:54/hunter2@h:1/0",
    "u:54#hunter2@h:1/0", "u:54?hunter2@h:1/0", "u:54/a@hunter2@h:1/0", "u:[hunter2@h:1/0", "u:a;hunter2@h:1/0",
    "u:hunter2", "h:1/0#hunter2", "h:1/0?password=hunter2", "h:1/0?PASSWORD=hunter2", "h:1/0?passw%6Frd=hunter2",
    "u:hunter2%zz@h:1/0", "u:a hunter2@h:1/0", "u:hunter2\n@h:1/0",
)  # fmt: skip
SCHEMES = ("sidejob", "sidejobpg", "sidejob-sentinel", "redis", "amqp")
WHOLE = (
    "sidejobpg:u:hunter2@h", "sidejobpg:/u:hunter2@h/x", "redis:u:hunter2@h", "u:hunter2@h",
    "redis+socket:///s?password=hunter2", "sidejob+socket://u:hunter2@/s", "sidejobpg://h:1,i:2/x?password=hunter2",
)  # fmt: skip


def said(call: Callable[[], Any]) -> str:
    """What a call returns or raises."""
    try:
        return str(call())
    except Exception as error:
        return "".join(traceback.format_exception_only(error))


@KOMBU_5_7
@pytest.mark.parametrize("urls", [[f"{scheme}://{rest}" for rest in UNCLEAR] for scheme in SCHEMES] + [[*WHOLE]])
def test_broker_urls_of_any_form_are_masked_or_refused(urls: list[str]) -> None:
    for url in urls:
        app = made(broker_url=url, broker_read_url=url, broker_write_url=url, sidejob_database_url=URL)

        def stats(app: Celery = app) -> Any:
            step = DisconnectionStep.__new__(DisconnectionStep)
            return DisconnectionStep.info(step, SimpleNamespace(connection=app.connection()))

        ways: list[Callable[[], Any]] = [
            lambda app=app: app.connection().as_uri(), lambda app=app: repr(app.connection()), stats,
            lambda app=app: broker_identity(app), lambda app=app: broker_family(app),
            lambda app=app: broker_is_store(app), lambda app=app: [*broker_check.findings(app)],
            lambda app=app: shown(app), lambda app=app: app.conf.table(),
            lambda url=url: make_app(sidejob_redis_url=url).sidejob.settings,
        ]  # fmt: skip
        assert [(url, place) for place, way in enumerate(ways) if PASSWORD in said(way)] == []


@KOMBU_5_7
@pytest.mark.parametrize("url", ["sidejobpg://u:54#hunter2@h:1/x", "sidejob://u:54/hunter2@h:1/0"])
def test_a_transport_without_an_app_shows_no_password(url: str) -> None:
    connection = kombu.Connection(url)
    assert PASSWORD not in said(connection.as_uri)
    assert PASSWORD not in said(connection.connect)


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"broker_url .* cannot be read: its form is not clear: .* %2F, %23"):
        made(broker_url="redis://u:54/hunter2@h:1/0").connection()


def test_what_celery_has_masked_stays_as_it_is() -> None:
    shown_by_celery = "sentinel://:********@h1:26379;sentinel://ann:********@h2:26379/0"
    assert masked_text(shown_by_celery) == shown_by_celery
    assert masked_text("redis://:***hunter2@h") == "redis://********@h"


def test_what_is_no_secret_stays_as_it_is() -> None:
    text = "see https://docs.example/a?b=c, redis://127.0.0.1:6379/0 and amqp://h//"
    assert masked_text(text) == text
    app = made(broker_url="redis://127.0.0.1:6379/5", shop_rates={"a": 1.5, "b": None}, sidejob_lease=30)
    table = app.conf.table()
    assert (table["shop_rates"], table["sidejob_lease"]) == ({"a": 1.5, "b": None}, 30)
    assert table["broker_url"].replace(":********@", "") == "redis://127.0.0.1:6379/5", "as Celery shows it"
    assert app.conf.table(censored=False)["broker_url"] == "redis://127.0.0.1:6379/5"
