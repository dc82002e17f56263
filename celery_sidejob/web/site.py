"""The web page as an ASGI app: who may see which page, and what every answer has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..model.checks import is_keepable
from ..model.errors import SideJobError, StoreUnavailableError
from ..model.logger import logger
from ..model.names import storable
from .rendering import SAID, environment
from .users import Role, Sessions, User, Users, is_from_here

Authenticate = Callable[[Request], tuple[str, str] | None]
"""Returns (name, role) of the person who sends a request, as another site knows them; None for a stranger."""

PATIENCE_S = 10.0
"""How long a page waits for one answer of the store."""
BODY_S = 30.0
"""How many seconds the body of a request may take."""
AGAIN_S = 5
"""After so many seconds a page that the store has not answered asks again."""
LONGEST_FORM = 64 * 1024
"""The most bytes of a form."""
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
LIVE = "/live"
"""Where the paths begin by which open pages are told of changes; the path of the page follows."""
SEEN = "seen"
"""The parameter with the digest of the content that an open page shows."""
RENEWS = "x-renews"
"""The header of a request by which an open page asks for its new content."""
STATIC = Path(__file__).with_name("static")


class Refused(Exception):
    """Ends a request with a page that says why."""

    def __init__(self, status: int, title: str, told: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(told)
        self.status, self.title, self.told, self.headers = status, title, told, headers or {}


@dataclass(frozen=True)
class Shown:
    """A page that is to be made from a template."""

    template: str
    context: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """Tells whether the content has changed."""
        return sha256(repr(self.context).encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a user, as the functions that make pages get it."""

    site: Site
    request: Request
    user: User
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def sidejob(self) -> Any:
        """The app's SideJob."""
        return self.site.sidejob

    @property
    def root(self) -> str:
        """The path below which this site is mounted."""
        return str(self.request.scope.get("root_path", ""))

    @property
    def asked(self) -> Mapping[str, str]:
        """The parameters of the URL that have a value."""
        return {name: value for name, value in self.request.query_params.items() if value}

    @property
    def key(self) -> str:
        """The path and the parameters that decide on the content of the page: the same for all who have it open."""
        path = self.request.url.path.removeprefix(self.root).removeprefix(LIVE)
        given = ((name, value) for name, value in self.request.query_params.items() if name not in (SEEN, "said"))
        return f"{path}?{urlencode(sorted(given))}"

    def show(self, template: str, **context: Any) -> Shown:
        """Return a page."""
        return Shown(template, context)

    def go(self, path: str) -> Response:
        """Send the browser to another page of this site."""
        return RedirectResponse(self.root + path, status_code=303)


Page = Callable[[Visit], Response | Shown]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A page, and who may see it."""

    path: str
    page: Page
    method: str = "GET"
    role: Role = Role.READ
    price: int = 0
    """At most so many statements make the page; given for a page that is live."""
    is_of_job: bool = False
    """Whether a live page changes only with the job of its path."""


class _Anything(StringConvertor):
    """A part of a path that may have slashes, and line breaks, which Starlette's `path` has not."""

    regex = "(?s:.+)"


register_url_convertor("sidejob_anything", _Anything())


def as_route(path: str) -> str:
    """Return a path for Starlette's routes: names of tasks, queues, pools and schedules may be any text."""
    is_of_name = path.startswith(("/tasks/{", "/queues/{", "/pools/{", "/schedules/{"))
    return path.replace("}", ":sidejob_anything}", 1) if is_of_name else path


class Site:
    """The parts that all pages of one app share."""

    def __init__(
        self, sidejob: Any, users: Users, auth: Authenticate | None, *, secret: str | None = None, is_live: bool = True
    ) -> None:
        self.sidejob = sidejob
        self.users = users
        self.sessions = Sessions(secret or sidejob.settings.web_secret, users)
        self.is_live = is_live
        """Whether pages are told of changes; not where one answer keeps a thread of the server."""
        self.kept: dict[str, Shown] = {}
        """The newest content of pages that are open, by the keys of their visits."""
        self._auth = auth
        self._templates = environment()

    def app(self, entries: Sequence[Entry], more: Sequence[Route] = ()) -> ASGIApp:
        """Return the ASGI app of these pages, and of more routes."""
        routes = [*more, Route("/healthz", _healthz), Mount("/static", StaticFiles(directory=STATIC))]
        routes += [Route(as_route(entry.path), self._endpoint(entry), methods=[entry.method]) for entry in entries]
        if self._auth is None:
            routes.append(Route("/login", self._login, methods=["GET", "POST"]))
            routes.append(Route("/logout", self._logout, methods=["POST"]))
        app = Starlette(
            routes=routes, exception_handlers=dict.fromkeys((HTTPException, Refused, Exception), self._told)
        )
        return _with_headers(app)

    def show(
        self, request: Request, template: str, *, user: User | None, status: int = 200, **context: Any
    ) -> Response:
        """Return a page made from a template."""
        token = "" if user is None else self.sessions.token_of(request, user)
        text = self._templates.get_template(template).render(
            root=request.scope.get("root_path", ""),
            user=user,
            token=token,
            here=request.url.path,
            may_operate=user is not None and user.role >= Role.OPERATE,
            may_log_out=self._auth is None,
            app_name=self.name,
            said=SAID.get(request.query_params.get("said", "")),
            **context,
        )
        return HTMLResponse(text, status_code=status)

    @property
    def name(self) -> str:
        """The name of the Celery app."""
        return str(self.sidejob.app.main or "celery")

    def user_of(self, request: Request) -> User | None:
        """Return who sends a request; None for a stranger."""
        if self._auth is None:
            return self.sessions.user_of(request)
        found = self._auth(request)
        return None if found is None else User(storable(found[0]), Role[found[1].upper()])

    # -- every page ----------------------------------------------------------------------------------------------

    def _endpoint(self, entry: Entry) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            user = await run_in_threadpool(self.user_of, request)
            if user is None:
                return self._ask_to_log_in(request)
            form = await _form_of(request) if entry.method == "POST" else {}
            if entry.method == "POST" and not self.sessions.is_from_our_form(request, user, form.get("token", "")):
                raise Refused(403, "Not sent from this page", "Go back, load the page again, and send it once more.")
            if user.role < entry.role:
                raise Refused(403, "Not allowed", f"{user.name} may read, and not operate.")
            return await run_in_threadpool(self._answer, entry, Visit(self, request, user, form))

        return endpoint

    def _answer(self, entry: Entry, visit: Visit) -> Response:
        kept = self.kept.get(visit.key) if entry.price and RENEWS in visit.request.headers else None
        shown = kept or self.guarded(entry.page, visit)
        if isinstance(shown, Response):
            return shown
        live_at = None
        if self.is_live and entry.price:
            path, _, query = visit.key.partition("?")
            live_at = f"{visit.root}{LIVE}{path}?{query}{'&' if query else ''}{SEEN}={shown.digest}"
        return self.show(visit.request, shown.template, user=visit.user, live_at=live_at, **shown.context)

    def guarded(self, page: Callable[[Visit], T], visit: Visit) -> T:
        """Return what a function makes of a visit; an error of the package ends the request with a page that says why.

        No answer of the store is waited for longer than people wait.
        """
        given = (*visit.request.path_params.values(), *visit.request.query_params.values(), *visit.form.values())
        if not all(map(is_keepable, given)):
            raise Refused(400, "Refused", "The store keeps no text with a NUL or a lone surrogate.")
        try:
            with self.sidejob.runtime.connections.talking(within_s=PATIENCE_S):
                return page(visit)
        except StoreUnavailableError as error:
            is_form = visit.request.method == "POST"
            told = "Once the store answers, see what was done before you send it again."
            if not is_form:
                told = f"This page asks again every {AGAIN_S} seconds. If the store is well, narrow the filters."
            headers = {} if is_form else {"retry-after": str(AGAIN_S)}
            raise Refused(503, "The store does not answer", f"{error} {told}", headers=headers) from error
        except SideJobError as error:
            status = status_of(error)
            raise Refused(status, "Not found" if status == 404 else "Refused", str(error)) from error

    # -- login ---------------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        target = _within(request.query_params.get("next", "/"))
        show = partial(self.show, request, "login.html", user=None, target=target)
        if request.method != "POST":
            return show(told=None)
        form = await _form_of(request)
        if not is_from_here(request):
            raise Refused(403, "Not sent from this page", "Open the login page of this site, and log in there.")
        name, address = form.get("name", ""), request.client.host if request.client else ""
        waits_s = ceil(self.users.admit(name, address))
        if waits_s:
            shown = show(status=429, told=f"Too many logins have failed. Try again in {waits_s} seconds.")
            shown.headers["retry-after"] = str(waits_s)
            return shown
        user = await run_in_threadpool(self.users.log_in, name, form.get("password", ""), address)
        if user is None:
            logger.warning("A login on the web page has failed: name %r from %s", name[:80], address)
            return show(status=403, told="This name and password do not match.")
        response = RedirectResponse(request.scope.get("root_path", "") + target, status_code=303)
        self.sessions.begin(request, response, user)
        return response

    async def _logout(self, request: Request) -> Response:
        response = RedirectResponse(f"{request.scope.get('root_path', '')}/login", status_code=303)
        user = self.user_of(request)
        if user is not None and not self.sessions.is_from_our_form(
            request, user, (await _form_of(request)).get("token", "")
        ):
            raise Refused(403, "Not sent from this page", "Go back, load the page again, and log out there.")
        self.sessions.end(request, response)
        return response

    def _ask_to_log_in(self, request: Request) -> Response:
        if self._auth is not None or request.method == "POST":
            raise Refused(403, "Not logged in", "Log in first.")
        root = request.scope.get("root_path", "")
        wanted = request.url.path.removeprefix(root) + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{root}/login?next={quote(_within(wanted), safe='/')}", status_code=303)

    # -- errors --------------------------------------------------------------------------------------------------

    async def _told(self, request: Request, error: Exception) -> Response:
        """Say why a request has ended with an error.

        Nothing is said of an unexpected error: its text may have values of users. Its traceback is in the log.
        """
        if isinstance(error, HTTPException):
            told = "There is no such page." if error.status_code == 404 else error.detail
            error = Refused(error.status_code, error.detail, told)
        elif not isinstance(error, Refused):
            error = Refused(500, "Something went wrong", "The log of this process says what.")
        try:
            user = await run_in_threadpool(self.user_of, request)
        except Exception:  # of the `auth` of another site: it was told of already, where it was asked first
            user = None
        said = {"title": error.title, "told": error.told, "again_s": error.headers.get("retry-after")}
        shown = self.show(request, "error.html", user=user, status=error.status, **said)
        shown.headers.update(error.headers)
        return shown


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Add the headers of security to every answer, and forbid that anything but files is kept."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        is_file = scope.get("path", "").removeprefix(scope.get("root_path", "")).startswith("/static/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                kept = is_file and message["status"] < 400
                headers["cache-control"] = "public, max-age=300" if kept else "no-store"
            await send(message)

        await app(scope, receive, send_with_headers if scope["type"] == "http" else send)

    return call


def status_of(error: SideJobError) -> int:
    """Return the status of the answer to a request that the package refuses."""
    return 404 if isinstance(error, LookupError) else 400 if isinstance(error, ValueError) else 409


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request, of at most so many bytes."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise Refused(413, "Too large", f"A body has at most {limit:,} bytes here.")
    except TimeoutError:
        raise Refused(408, "Too slow", f"A body comes to its end within {BODY_S:g} seconds here.") from None
    except ClientDisconnect:
        raise Refused(400, "Incomplete", "The body has not come to its end.") from None
    return bytes(body)


async def _form_of(request: Request) -> dict[str, str]:
    """Read a form; the last of several values of a field counts."""
    text = (await read_body(request, LONGEST_FORM)).decode("utf-8", "replace")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200))
    except ValueError:
        raise Refused(400, "Too large", "A form has at most 200 fields.") from None


def _within(target: str) -> str:
    """Return a path of this site, or its first page: a link to the login page leads nowhere else after it."""
    inside = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if inside and target.isprintable() else "/"
