"""Browsers of the web page, and programs that use its API: what they send goes to the real app."""

from __future__ import annotations

import re
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer ones would have httpx2, which older ones do not know
    from starlette.testclient import TestClient

from celery_sidejob.web.app import site_app
from celery_sidejob.web.server import config_of
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Role, hashed
from tests.tools.waiting import wait_until

PASSWORDS = {"ann": "correct horse", "ron": "battery staple"}
ENTRIES = {"ann": hashed(PASSWORDS["ann"], Role.OPERATE), "ron": hashed(PASSWORDS["ron"], Role.READ)}


class Browser(TestClient):
    """A browser that follows no redirect by itself."""

    def log_in(self, name: str, password: str | None = None) -> httpx.Response:
        """Send the form of the login page."""
        return self.post("/login", data={"name": name, "password": PASSWORDS[name] if password is None else password})

    def text(self, path: str) -> str:
        """Return a page, which must be there."""
        found = self.get(path)
        assert found.status_code == 200, (path, found.status_code, found.text)
        return found.text

    @property
    def token(self) -> str:
        """The token that the forms of this session have."""
        found = re.search(r'name="token" value="([0-9a-f]{64})"', self.get("/workers").text)
        assert found is not None
        return found[1]

    def submit(self, path: str, **fields: str) -> httpx.Response:
        """Send a form of a page."""
        return self.post(path, data={"token": self.token, **fields})


API = "/api/v1"


class Program:
    """A program with a token."""

    def __init__(self, browser: Browser, token: str) -> None:
        self._browser, self.token = browser, token
        self._headers = {"authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Send a request."""
        headers = {**self._headers, **more.pop("headers", {})}
        given = {} if body is None else {"json": body}
        return self._browser.request(method, API + path, headers=headers, **given, **more)

    def get(self, path: str, code: int = 200, **query: Any) -> Any:
        """Return what a GET answers."""
        found = self.ask("GET", path, params=query)
        assert found.status_code == code, found.text
        return found.json()

    def post(self, path: str, code: int = 200, method: str = "POST", **body: Any) -> Any:
        """Return what is answered to a body."""
        found = self.ask(method, path, body)
        assert found.status_code == code, found.text
        return found.json()


def browser_of(site: Site) -> Browser:
    """A browser of nobody yet."""
    return Browser(site_app(site), base_url="https://page.example", follow_redirects=False)


# -- over a network --------------------------------------------------------------------------------------------------


@contextmanager
def serving(site: Site) -> Iterator[str]:
    """The address of a site that is served on a port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(config_of(site_app(site)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, message="the site to listen")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def connection_of(name: str, address: str) -> Iterator[httpx.Client]:
    """A connection of a user who has logged in to a site at an address."""
    with httpx.Client(base_url=address, timeout=60) as made:
        made.post("/login", data={"name": name, "password": PASSWORDS[name]})
        # The cookie is Secure, which browsers send to this machine all the same.
        made.headers["cookie"] = "; ".join(f"{each.name}={each.value}" for each in made.cookies.jar)
        yield made


def live_at(page: str) -> str:
    """Where a page is told of changes."""
    found = re.search(r'data-live="([^"]+)"', page)
    assert found is not None
    return found[1].replace("&amp;", "&")


@contextmanager
def events(client: httpx.Client, path: str) -> Iterator[Iterator[str]]:
    """The events of a page, from the first on."""
    with client.stream("GET", path) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = (line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: "))
        assert next(names) == "listening"
        yield names
