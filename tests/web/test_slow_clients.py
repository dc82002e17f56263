"""Clients that send or read slowly, or not at all: a real server gives them up, and serves the others meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from celery_sidejob.web.live import QUIET_S, Live
from celery_sidejob.web.site import LIVE, Site
from celery_sidejob.web.users import COOKIE
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

FOR_EVER_S = 60.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's patience is short."""
    monkeypatch.setattr("celery_sidejob.web.server.HEAD_S", 0.5)
    monkeypatch.setattr("celery_sidejob.web.site.BODY_S", 0.5)


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    to = urlsplit(address)
    with socket.create_connection((to.hostname, to.port), timeout=FOR_EVER_S) as client:
        yield client


def is_hung_up_on(client: socket.socket, text: bytes) -> bool:
    """Send a text byte by byte; tell whether the server hangs up before all of it is sent."""
    client.settimeout(0.05)
    for byte in text:
        try:
            client.send(bytes([byte]))
            if client.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


HEAD = b"GET /healthz HTTP/1.1\r\nhost: page\r\nx-slow: " + b"x" * 1000


def test_a_head_that_comes_byte_by_byte(address: str) -> None:
    with connected(address) as silent, connected(address) as slow:
        assert is_hung_up_on(slow, HEAD)
        assert silent.recv(1) == b"", "nor does it wait for one who says nothing"
    assert httpx.get(f"{address}/healthz").text == "ok\n"


def test_a_second_head_that_comes_byte_by_byte(address: str) -> None:
    with connected(address) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: page\r\n\r\n")
        found = b""
        while not found.endswith(b"ok\n"):
            found += client.recv(1000)
        assert is_hung_up_on(client, HEAD)


def test_a_body_that_does_not_come_to_its_end(address: str) -> None:
    for path in ("/login", "/api/v1/jobs"):
        with connected(address) as client:
            client.sendall(f"POST {path} HTTP/1.1\r\nhost: page\r\ncontent-length: 100\r\n\r\nname=".encode())
            assert b" 408 " in client.recv(1000)


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Live]:
    """What looks at open pages in the servers that begin after this."""
    made: list[Live] = []

    def live(site: Site) -> Live:
        made.append(Live(site))
        return made[-1]

    monkeypatch.setattr("celery_sidejob.web.app.Live", live)
    return made


def test_a_stream_of_events_that_is_not_read(stage: Stage, site: Site, lives: list[Live], address: str) -> None:
    job = stage.job()
    entry = {"name": "ron", "mark": site.users.mark_of("ron"), "key": "0"}
    cookie = f"{COOKIE}={site.sessions._signer.dumps(entry)}"
    with connected(address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(f"GET {LIVE}/jobs/{job.id} HTTP/1.1\r\nhost: page\r\ncookie: {cookie}\r\n\r\n".encode())
        wait_until(lambda: readers(lives) == 1, message="the stream to begin")
        for _ in range(20):
            stage.run(job)
            job.run()
        for path in ("/healthz", f"/jobs/{job.id}", "/jobs"):
            assert httpx.get(f"{address}{path}", headers={"cookie": cookie}).status_code == 200
    wait_until(lambda: readers(lives) == 0, message="the stream to end with its client", timeout=2 * QUIET_S)


def readers(lives: list[Live]) -> int:
    """How many pages are open."""
    return sum(len(view.readers) for live in lives for view in list(live._views.values()))
