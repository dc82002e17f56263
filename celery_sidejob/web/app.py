"""The web page of an app: alone as ASGI (`asgi_app`), and inside a web application as ASGI, WSGI or in Django."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, MutableMapping
from typing import Any, cast

from starlette.types import ASGIApp

from ..model.errors import MissingLibraryError, SettingsError
from . import api
from .actions import BULK, OPERATING
from .live import Live
from .operations import OPERATIONS
from .pages import READING
from .site import Authenticate, Site
from .users import Users

USER = "celery_sidejob.web.user"
"""The key under which Django's user is handed on, as (name, role)."""


def asgi_app(
    sidejob: Any, auth: Authenticate | None = None, *, secret: str | None = None, is_live: bool = True
) -> ASGIApp:
    """Return the web page of an app's SideJob as an ASGI application, to be served alone or mounted in another.

    `sidejob_web_users` may log in. Or `auth` says who sends a request: it is called with Starlette's Request, and
    returns (name, role) with the role "read" or "operate", or None for a stranger. `secret` replaces
    `sidejob_web_secret`; without `is_live` no page is told of changes. Raises SettingsError without users and without
    `auth`.
    """
    users = {} if auth is not None else sidejob.settings.web_users or {}
    if auth is None and not users:
        raise SettingsError(
            "The web page has no users: set sidejob_web_users (`celery -A <app> sidejob web user NAME` makes an "
            "entry), or give asgi_app() an auth= function."
        )
    return site_app(Site(sidejob, Users(users), auth, secret=secret, is_live=is_live))


def site_app(site: Site) -> ASGIApp:
    """Return the ASGI application of a site."""
    more = [*api.routes(site, OPERATIONS), *(Live(site).routes(READING) if site.is_live else ())]
    return site.app((*BULK, *READING, *OPERATING), more)


def wsgi_app(sidejob: Any, auth: Authenticate | None = None, *, secret: str | None = None) -> Any:
    """Return the web page as a WSGI application; the parameters are those of `asgi_app`."""
    try:
        from a2wsgi import ASGIMiddleware
    except ImportError as error:
        raise MissingLibraryError(
            "The web page as a WSGI application needs the library a2wsgi: install celery-sidejob[web].", name="a2wsgi"
        ) from error
    app = cast(Any, asgi_app(sidejob, auth, secret=secret, is_live=False))  # a2wsgi has a type of its own for it
    made: dict[int, Any] = {}

    def application(environ: Any, start_response: Any) -> Any:
        pid = os.getpid()  # its event loop is a thread, which a fork, as by `gunicorn --preload`, leaves to the parent
        middleware = made.get(pid) or made.setdefault(pid, ASGIMiddleware(app))
        return middleware(environ, start_response)

    return application


def django_urls(sidejob: Any, may_operate: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return URL patterns for Django: ``path("sidejob/", include(django_urls(sidejob)))``.

    Staff may read. Superusers may operate, or the users for which `may_operate` returns True; anyone else is sent to
    the admin's login.
    """
    from asgiref.sync import async_to_sync
    from django.conf import settings
    from django.contrib.admin.views.decorators import staff_member_required
    from django.http import HttpResponse
    from django.urls import re_path
    from django.views.decorators.csrf import csrf_exempt

    app = asgi_app(sidejob, lambda request: request.scope.get(USER), secret=settings.SECRET_KEY, is_live=False)

    def page(request: Any, rest: str) -> Any:
        user = request.user
        operates = user.is_superuser if may_operate is None else may_operate(user)
        scope = _scope(request, rest, (user.get_username(), "operate" if operates else "read"))
        status, headers, body = async_to_sync(_answer)(app, scope, request.body)
        response = HttpResponse(body, status=status)
        for name, value in headers:
            response[name] = value
        return response

    # Its forms have tokens of their own, which are checked.
    return [re_path(r"^(?P<rest>(?s:.*))\Z", csrf_exempt(staff_member_required(page)))]


def _scope(request: Any, rest: str, user: tuple[str, str]) -> dict[str, Any]:
    root = request.path[: len(request.path) - len(rest)].rstrip("/") if rest else request.path.rstrip("/")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": f"{root}/{rest}",
        "raw_path": None,
        "root_path": root,
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1"),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in request.headers.items()],
        "client": (request.META.get("REMOTE_ADDR", ""), 0),
        "server": None,
        USER: user,
    }


async def _answer(
    app: ASGIApp, scope: MutableMapping[str, Any], body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Give an ASGI app one request, and return its whole answer."""
    status, headers, parts = 500, [], []

    unread = [body]

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Event().wait()  # Django does not tell that a browser has gone
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in message["headers"]]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)
