"""Every ``sidejob_*`` setting: declared once, read once, checked and frozen.

The configuration goes before the environment, the environment before the default. A misspelt key in the configuration
is an error. A variable of the environment counts as misspelt only if it is close to a setting's name, because other
programs use the prefix too (Kubernetes sets ``SIDEJOB_SERVICE_HOST``).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from . import urls
from .checks import MOST_S, SECONDS, SLIP, in_seconds, is_number, is_seconds, nearest
from .errors import SettingsError
from .queue import is_declaration
from .retention import FORM, FORM_BY_TASK, Retention, from_text, is_retention, is_retention_by_task
from .schedule import is_declaration as is_schedules


@dataclass(frozen=True)
class Kind:
    """A kind of setting: `convert` makes the setting's value from a value of the configuration.

    `from_text` turns the text of an environment variable into a value as in the configuration, or raises ValueError.
    `secret` values are never shown.
    """

    expected: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    from_text: Callable[[str], Any] = str
    secret: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    default: Any
    kind: Kind
    meaning: str

    @property
    def key(self) -> str:
        """The key in ``app.conf``."""
        return f"sidejob_{self.name}"

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return self.key.upper()


# --- Kinds of settings. They stand first because the class body below uses them. -------------------------------------


def _is_text(pattern: str = ".+") -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, (list, tuple)) and all(map(fits, values))


def _is_duration(value: Any) -> bool:
    return is_seconds(in_seconds(value))


def _is_store_url(value: Any) -> bool:
    return isinstance(value, str) and urls.is_clear(urls.spelled_out(value))


def _or_none(kind: Kind) -> Kind:
    """The same kind, or None; in the environment the word ``none``."""
    return dataclasses.replace(
        kind,
        expected=f"{kind.expected}, or None",
        fits=lambda value: value is None or kind.fits(value),
        convert=lambda value: None if value is None else kind.convert(value),
        from_text=lambda text: None if text.strip().lower() == "none" else kind.from_text(text),
    )


_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _list_from(text: str) -> list[str]:
    return [item for item in (part.strip() for part in text.split(",")) if item]


def _urls_from(text: str) -> list[str]:
    # Not every comma ends a URL: postgresql://one,two/shop names two hosts.
    return [url.strip() for url in re.split(r",(?=\s*[\w+]+://)", text)]


_STORE_URL = Kind(
    f"a URL that begins with postgresql:// or postgresql+psycopg:// ({urls.ESCAPED})",
    _is_store_url,
    urls.spelled_out,
    secret=True,
)
_STORE_URLS = Kind(
    f"a list of URLs that begin with postgresql:// ({urls.ESCAPED})",
    _is_list_of(_is_store_url),
    lambda given: tuple(map(urls.spelled_out, given)),
    _urls_from,
    secret=True,
)
_REDIS_URL = Kind(
    f"a URL, such as redis://localhost:6379/0 ({urls.ESCAPED})",
    lambda url: _is_text(r"[\w+]+://.*")(url) and urls.are_clear_for_broker(url),
    secret=True,
)
_SCHEMA = Kind(
    "a plain identifier: lower-case letters, digits and underscores, no digit first, at most 63 characters, not pg_…",
    _is_text("(?!pg_)[a-z_][a-z0-9_]{0,62}"),
)
_PATH = Kind("a path", lambda path: isinstance(path, str | os.PathLike) and _is_text()(os.fspath(path)), os.fspath)
_GLOBS = Kind("a list of strings", _is_list_of(_is_text()), tuple, _list_from)
_QUEUE = Kind("a string", _is_text())
_SECONDS = Kind(f"{SECONDS}, or a timedelta", _is_duration, lambda value: float(in_seconds(value)), float)
_POSITIVE_SECONDS = dataclasses.replace(
    _SECONDS,
    expected=f"a number of seconds above 0, {MOST_S}, or a timedelta",
    fits=lambda value: _is_duration(value) and in_seconds(value) > 0,
)
_RETENTION = Kind(FORM, is_retention, Retention.of, from_text)
_RETENTION_BY_TASK = Kind(FORM_BY_TASK, is_retention_by_task, Retention.of, from_text)
_COUNT = Kind("a whole number, at least 1", lambda value: is_number(value, least=1), from_text=int)
_NUMBER = Kind("a whole number from 0 to 10,000", lambda value: is_number(value, most=10_000), from_text=int)
_BOOLEAN = Kind(
    "True or False (in the environment 1, true, yes, on, 0, false, no, off)",
    lambda value: isinstance(value, bool),
    from_text=lambda text: _BOOLEANS.get(text.strip().lower()),
)
_QUEUES = Kind(
    'a mapping of queues to settings, such as {"mail": {"limit": 5}}, set in the configuration: ordered, limit, '
    "limit_per_key, rate, pool",
    is_declaration,
    lambda given: {name: dict(settings) for name, settings in given.items()},
)
_SCHEDULES = Kind(
    'a mapping of names to schedules, such as {"report": {"task": "shop.report", "cron": "0 6 * * *"}}, set in the '
    "configuration",
    is_schedules,
    lambda given: {name: dict(schedule) for name, schedule in given.items()},
)
_USER = re.compile("(read|operate):scrypt:[0-9a-f]{32}:[0-9a-f]{64}")
_WEB_USERS = Kind(
    "a mapping of names to what `celery -A <app> sidejob web user NAME` prints, in the environment NAME=…,NAME=…",
    lambda users: (
        isinstance(users, Mapping)
        and all(_is_text()(name) and isinstance(entry, str) and _USER.fullmatch(entry) for name, entry in users.items())
    ),
    dict,
    lambda text: dict(user.partition("=")[::2] for user in _list_from(text)),
    secret=True,
)
_SECRET = Kind("a text of at least 32 characters", _is_text(".{32,}"), secret=True)
_STORE_DOWN = Kind('"error" or "publish"', lambda value: value in ("error", "publish"))
_CALLABLE = Kind("a callable, set in the configuration (the environment cannot hold one)", callable)


def _setting(default: Any, kind: Kind, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "meaning": meaning}, repr=not kind.secret)


NO_STORE = (
    "sidejob_database_url is not set: give the store's URL as app.conf.sidejob_database_url or as "
    "SIDEJOB_DATABASE_URL in the environment."
)

# --- The settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The app's ``sidejob_*`` settings, with defaults filled in. Times are in seconds."""

    database_url: str | None = _setting(None, _or_none(_STORE_URL), "the store")
    direct_url: str | None = _setting(
        None, _or_none(_STORE_URL), "the store, reached without the pooling proxy that database_url goes through"
    )
    failover_urls: tuple[str, ...] = _setting(
        (), _STORE_URLS, "further stores for durable tasks only, in the order in which they are tried"
    )
    schema: str = _setting("sidejob", _SCHEMA, "the schema in the store; a schema belongs to one app and one broker")
    durable_tasks: tuple[str, ...] = _setting(
        (), _GLOBS, "patterns of task names that are made durable without touching their code"
    )
    lease: float = _setting(20.0, _SECONDS, "how long a worker may be silent before its runs begin elsewhere")
    heartbeat_interval: float = _setting(2.0, _POSITIVE_SECONDS, "how often a worker reports that it is alive")
    heartbeat_file: str | None = _setting(
        None, _or_none(_PATH), "a file that each heartbeat of a worker touches, for a liveness probe"
    )
    lock_grace: float = _setting(1.5, _SECONDS, "how long a worker whose liveness lock is free may stay silent")
    lost_after: float = _setting(
        30.0, _POSITIVE_SECONDS, "when a message that nobody claimed is checked first; the interval doubles each time"
    )
    max_losses: int = _setting(
        3, _COUNT, "how many runs in a row may be lost before the job or durable task goes to the dead set"
    )
    poll_interval: float = _setting(30.0, _POSITIVE_SECONDS, "how often the beat entry `celery-sidejob-poll` sweeps")
    poll_queue: str | None = _setting(None, _or_none(_QUEUE), "the queue of that entry; None is `task_default_queue`")
    worker_services: bool = _setting(True, _BOOLEAN, "whether workers sweep; one at a time does for each schema")
    sync_threads: int = _setting(
        10, _COUNT, "how many bodies that are no `async def` run at once in a worker with the pool `asyncio`"
    )
    on_store_down: str = _setting(
        "error",
        _STORE_DOWN,
        "what a call of a durable task does if no store answers: `error` raises, `publish` sends it without a row",
    )
    timer_horizon: float = _setting(
        60.0, _SECONDS, "durable tasks whose eta is further away than this wait in the store"
    )
    retention: Retention | None = _setting(  # noqa: RUF009 - a Retention cannot be changed, ruff only does not know it
        None, _or_none(_RETENTION), "how long finished jobs are kept, and how many; None is all for ever"
    )
    dead_retention: Retention | None = _setting(  # noqa: RUF009 - as above
        Retention(timedelta(days=180)),
        _or_none(_RETENTION_BY_TASK),
        "how long entries of the dead set are kept, and how many; None is all for ever",
    )
    history: int = _setting(
        100, _NUMBER, "how many runs, and how many own entries, the history of a job keeps; 0 keeps no history"
    )
    task_history: int = _setting(
        0,
        _NUMBER,
        "how many of the durable tasks that ended last are kept for `sidejob tasks --finished`; 0 keeps none",
    )
    stats_history: int = _setting(
        30,
        _NUMBER,
        "for how many days the statistics of runs and steps are kept, by queue, task and step; 0 keeps none",
    )
    queues: dict[str, dict[str, Any]] | None = _setting(  # noqa: RUF009 - as above
        None, _or_none(_QUEUES), "the settings of managed queues, applied when they differ from the last declaration"
    )
    schedules: dict[str, dict[str, Any]] | None = _setting(  # noqa: RUF009 - as above
        None,
        _or_none(_SCHEDULES),
        "schedules, applied when they differ from the last declaration; one that is not declared any more is deleted",
    )
    max_value_bytes: int = _setting(
        1_000_000, _COUNT, "the size limit of a packet, a state value and the arguments of a job, as JSON text"
    )
    redis_url: str | None = _setting(
        None,
        _or_none(_REDIS_URL),
        "the Redis for announcements; None is the broker, if that is a Redis, or else the store",
    )
    redact: Callable[[Any], Any] | None = _setting(  # noqa: RUF009 - the default is None, shared by all harmlessly
        None, _or_none(_CALLABLE), "applied to arguments, state and tracebacks wherever they are shown or logged"
    )
    web_users: dict[str, str] | None = _setting(  # noqa: RUF009 - as above
        None,
        _or_none(_WEB_USERS),
        "who may log in on the web page: names, with role and password as `sidejob web user` prints them",
    )
    web_secret: str | None = _setting(
        None, _or_none(_SECRET), "signs the sessions of the web page; None is a new secret in each process"
    )

    @property
    def store_may_be_broker(self) -> bool:
        """Whether the store may be the broker too: there is one store."""
        return self.database_url is not None and not self.failover_urls

    def require_database_url(self) -> str:
        """Return the store's URL, or say how to set it."""
        if self.database_url is None:
            raise SettingsError(NO_STORE)
        return self.database_url

    def redacted(self, value: Any) -> Any:
        """Apply `sidejob_redact` to arguments, an error or a traceback; if it raises, the whole value is hidden."""
        if self.redact is None or value is None:
            return value
        try:
            return self.redact(value)
        except Exception as error:
            return f"(not shown: sidejob_redact raised {type(error).__name__})"


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(field.name, field.default, field.metadata["kind"], field.metadata["meaning"])
    for field in dataclasses.fields(Settings)
)
"""All settings. Their reader, the errors and docs/settings.md are derived from it."""


def read_settings(lookup: Mapping[str, Any], environ: Mapping[str, str], *, namespace: str | None = None) -> Settings:
    """Read the settings from the configuration and the environment; SettingsError names a wrong setting and the reason.

    `lookup` has all keys of the configuration as the user spelled them; `namespace` is the app's, as in Celery.
    """
    found = _find_in_configuration(lookup, namespace)
    _check_environment(environ)
    given: dict[str, Any] = {}
    spelled = {setting.name: setting.key for setting in SETTINGS}
    for setting in SETTINGS:
        text = environ.get(setting.variable, "").strip()
        if setting.name in found:
            given[setting.name], spelled[setting.name] = _parse_spellings(setting, found[setting.name])
        elif text:  # an empty variable counts as unset, as in compose files
            spelled[setting.name] = f"{setting.variable} (environment)"
            given[setting.name] = _parse(setting, spelled[setting.name], text, setting.kind.from_text)
    settings = Settings(**given)
    _check_contradictions(settings, spelled)
    return settings


def _find_in_configuration(lookup: Mapping[str, Any], namespace: str | None) -> dict[str, list[tuple[str, Any]]]:
    """Return for each setting that is given its spellings and their values."""
    by_key = {setting.key: setting for setting in SETTINGS}
    prefix = namespace.rstrip("_") + "_" if namespace else ""
    found: dict[str, list[tuple[str, Any]]] = {}
    for spelling, value in lookup.items():
        if not isinstance(spelling, str):
            continue
        in_namespace = spelling.lower().startswith(prefix.lower())
        before, bare = (spelling[: len(prefix)], spelling[len(prefix) :]) if in_namespace else ("", spelling)
        key = bare.lower()
        if not key.startswith("sidejob_"):
            continue
        if key not in by_key or bare not in (key, key.upper()):
            near = nearest(key, by_key)
            hint = f" Did you mean {before}{near if bare.islower() else near.upper()}?" if near else ""
            raise SettingsError(f"unknown setting {spelling}: correct its name, or remove it.{hint}")
        found.setdefault(by_key[key].name, []).append((spelling, value))
    return found


def _check_environment(environ: Mapping[str, str]) -> None:
    names = {setting.name for setting in SETTINGS}
    for variable, text in environ.items():
        name = variable.removeprefix("SIDEJOB_").lower()
        if not variable.startswith("SIDEJOB_") or not text.strip() or name in names:
            continue
        near = nearest(name, names, like=SLIP)
        if near:
            raise SettingsError(f"unknown variable {variable} (environment); did you mean SIDEJOB_{near.upper()}?")


def _parse_spellings(setting: Setting, spellings: list[tuple[str, Any]]) -> tuple[Any, str]:
    values = [_parse(setting, spelling, value, lambda given: given) for spelling, value in spellings]
    for (spelling, _), value in zip(spellings, values, strict=True):
        if value != values[0]:
            raise SettingsError(f"{spellings[0][0]} and {spelling} are the same setting with two values; keep one")
    return values[0], spellings[0][0]


def _parse(setting: Setting, spelling: str, given: Any, from_given: Callable[[Any], Any]) -> Any:
    kind = setting.kind
    with suppress(ValueError):
        value = from_given(given)
        if kind.fits(value):
            return kind.convert(value)
    hidden = f"a {type(given).__name__} (not shown, for it may hold a password)"
    shown = hidden if kind.secret and given != "" else repr(given)
    raise SettingsError(f"{spelling} must be {kind.expected}; it is {shown}")


def _check_contradictions(settings: Settings, spelled: Mapping[str, str]) -> None:
    if settings.lease <= 2 * settings.heartbeat_interval:
        raise SettingsError(
            f"{spelled['lease']} ({settings.lease:g} s) must be more than twice "
            f"{spelled['heartbeat_interval']} ({settings.heartbeat_interval:g} s): "
            "else one late heartbeat would look like a death"
        )
    if settings.direct_url is not None and settings.database_url is None:
        raise SettingsError(
            f"{spelled['direct_url']} is set without {spelled['database_url']}: it is a second way to the same store"
        )
    _check_failover(settings, spelled)


def _check_failover(settings: Settings, spelled: Mapping[str, str]) -> None:
    if settings.failover_urls and settings.database_url is None:
        raise SettingsError(
            f"{spelled['failover_urls']} is set without {spelled['database_url']}: those stores follow the first one"
        )
    seen = {}
    if settings.database_url is not None:
        seen[urls.address(settings.database_url)] = spelled["database_url"]
    for number, url in enumerate(settings.failover_urls, 1):
        name = f"number {number} of {spelled['failover_urls']}"
        before = seen.setdefault(urls.address(url), name)
        if before != name:
            raise SettingsError(f"{name} is the same store as {before}: each must be a database of its own")
