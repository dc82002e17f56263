"""`asgi_app`: the web page of an app."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from ..model.errors import SettingsError
from . import api
from .actions import OPERATING
from .bulk import BULK
from .live import Live
from .operations import OPERATIONS
from .pages import READING
from .site import Authenticate, Site
from .users import Users


def asgi_app(
    sidejob: Any, auth: Authenticate | None = None, *, secret: str | None = None, is_live: bool = True
) -> ASGIApp:
    """Return the web page of an app's SideJob as an ASGI application, to be served alone or mounted in another.

    `sidejob_web_users` may log in. Or `auth` says who sends a request: it is called with Starlette's Request, and
    returns (name, role) with the role "read" or "operate", or None for a stranger. `secret` replaces
    `sidejob_web_secret`; without `is_live` no page is told of changes. Raises SettingsError without users and without
    `auth`.
    """
    users = Users({} if auth is not None else sidejob.settings.web_users or {})
    if auth is None and not users:
        raise SettingsError(
            "The web page has no users: set sidejob_web_users (`celery -A <app> sidejob web user NAME` makes an "
            "entry), or give asgi_app() an auth= function."
        )
    return site_app(Site(sidejob, users, auth, secret=secret, is_live=is_live))


def site_app(site: Site) -> ASGIApp:
    """Return the ASGI application of a site."""
    more = [*api.routes(site, OPERATIONS), *(Live(site).routes(READING) if site.is_live else ())]
    return site.app((*BULK, *READING, *OPERATING), more)
