"""Finds the app of a task of `@sidejob_task` or of a pickled handle: a process may have several apps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery, _state

from ..model import urls
from ..model.errors import SettingsError
from ..operations.runtime import Runtime

DEFAULT = "default"
"""The name of the app that Celery makes if no app exists, or if the thread has none."""


def present() -> Celery:
    """Return the current app, or another one if only that has a SideJob.

    Celery's current app belongs to a thread: in all other threads it is the default app, which has no SideJob.
    """
    current = _current()
    known = _known()
    if getattr(current, "sidejob", None) is None and len(known) == 1:
        return known[0]
    return current if current is not None else _state.get_current_app()


def runtime_for(app: Celery, what: str) -> Runtime:
    """Return the runtime of an app; if the app has no SideJob, SettingsError says that `what` needs one."""
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None:
        raise SettingsError(f"{what}, but {_why_without(app)}")
    runtime: Runtime = sidejob.runtime
    return runtime


def _why_without(app: Celery) -> str:
    """Say why an app has no SideJob, and what to do."""
    if app is not _state.default_app or app.main != DEFAULT:
        return "its app has no SideJob: call SideJob(app)."
    if _known():
        return (
            "this thread has no current app, and several apps here have a SideJob: call set_default() of the app that "
            "is meant."
        )
    return (
        "nobody has imported the module with your app: the current app is Celery's default app, which has no SideJob. "
        "Import that module before the first call; in Django do it in the project's __init__.py, with "
        "`from .celery import app as celery_app`."
    )


def origin_of(runtime: Runtime) -> tuple[str, ...] | None:
    """Return the name and the schema by which a pickled handle finds its app again; None for the only app here.

    The store's URL is not among them: another process may use another URL, and it may contain a password.
    """
    known = _known()
    if len(known) < 2:
        return None
    made = (app for app in known if app.sidejob._runtime is not None)
    own = next((app for app in made if app.sidejob._runtime.connections is runtime.connections), None)
    return None if own is None else _names(own)


def runtime_of(origin: Sequence[str] | None) -> Runtime:
    """Return the runtime of the app that a handle comes from; without an origin, of the present app or the only one."""
    known = _known()
    if origin is not None and len(known) > 1:
        known = [app for app in known if _is_from(app, origin)]
        if not known:
            raise SettingsError(
                f"A job handle comes from the app {origin[0]!r} with the schema {origin[1]!r}, and none of the apps "
                "here has these: give the app the same name, Celery(name), wherever its handles are used."
            )
        if len({_database(app) for app in known}) > 1:
            raise SettingsError(
                f"A job handle comes from the app {origin[0]!r} with the schema {origin[1]!r}, and several apps here "
                "have these, with stores of their own: give each app its own name, Celery(name)."
            )
    current = _current()
    if len(known) != 1 and current in known:
        known = [current]
    if not known:
        raise SettingsError("This job handle belongs to no store: make `SideJob(app)` before a handle is used.")
    runtime: Runtime = known[-1].sidejob.runtime
    return runtime


def every_app() -> list[Celery]:
    """Return this process's apps, with or without a SideJob."""
    return list(_state._get_active_apps())


def _known() -> list[Celery]:
    """Return this process's apps that have a SideJob, the oldest first; without closed apps."""
    apps = [app for app in every_app() if getattr(app, "sidejob", None) is not None]
    return sorted(apps, key=lambda app: app.sidejob._number)


def _current() -> Any:
    """Return the current app without making one."""
    return _state._tls.current_app or _state.default_app


def _is_from(app: Celery, origin: Sequence[str]) -> bool:
    try:
        return _names(app) == tuple(origin)
    except SettingsError:  # the app's settings are wrong
        return False


def _database(app: Celery) -> tuple[str, str] | None:
    url = app.sidejob.settings.database_url
    return None if url is None else urls.address(url)


def _names(app: Celery) -> tuple[str, str]:
    return app.main or "", app.sidejob.settings.schema
