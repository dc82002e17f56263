"""A network that fails on request: a TCP proxy in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

T = TypeVar("T")
Direction = Literal["up", "down"]

CHUNK = 65_536
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() sends RST instead of FIN
DEFAULT_PORTS = {"postgresql": 5432, "postgres": 5432, "redis": 6379, "sidejob": 6379, "amqp": 5672, "pyamqp": 5672}


class Mode(enum.Enum):
    """What the proxy does with connects and bytes."""

    PASSING = "passing"
    REFUSING = "refusing"
    BLACK_HOLE = "black hole"


class TcpProxy:
    """Stands between a client and a server and fails in the way a test asks for.

    Modes, each left by calling another one's method:
        pass_through()   connects and bytes go through; what a black hole had swallowed goes on where it was
        delay(seconds)   the same, but each chunk is held that long, either way
        black_hole()     connects succeed and are never answered; nothing moves on the connections there are
        refuse()         connects are refused, the connections there are get RST
    Beside the modes:
        cut()            the connections there are get RST
        cut_after(...)   one connection gets RST once some bytes have gone over it, see there

    Each method returns when it has taken effect. The target is a host and a port, or a Unix socket (a path as host).
    """

    def __init__(self, target_host: str, target_port: int = 0) -> None:
        self.target_host = target_host
        self.target_port = target_port
        self.connections = 0
        """Accepted so far."""
        self.bytes_up = 0
        """Given to the server so far."""
        self.bytes_down = 0
        """Given to clients so far."""
        self.cut_done = threading.Event()
        """Set when `cut_after` has cut; cleared when it is armed."""
        self._mode = Mode.PASSING
        self._delay_s = 0.0
        self._trap: _Trap | None = None
        self._open: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._moving = asyncio.Event()
        self._moving.set()
        # Bound for as long as we live and never listening: while the listener is closed the port is still ours,
        # and connects to it are refused.
        self._reservation = _bind(0)
        self.port: int = self._reservation.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)

    @classmethod
    def to(cls, url: str) -> Self:
        """A proxy to the server that a postgres, redis or amqp URL names."""
        return cls(*_target_of(url))

    def url_for(self, url: str) -> str:
        """The same URL, through this proxy.

        A Postgres URL also gets sslmode and gssencmode "disable": behind encryption no pattern could be seen.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        scheme, path = parts.scheme, parts.path
        if _family(scheme) in ("unix", "redis+socket"):
            scheme, path = "redis", "/" + (query.pop("db", None) or query.pop("virtual_host", None) or "0").lstrip("/")
        if _family(scheme) in ("postgresql", "postgres"):
            query.pop("host", None)
            query.pop("port", None)
            query.setdefault("sslmode", "disable")
            query.setdefault("gssencmode", "disable")
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(
            (scheme, f"{credentials}{at}127.0.0.1:{self.port}", path, urlencode(query, quote_via=quote), "")
        )

    @property
    def mode(self) -> Mode:
        """What is done with connects and bytes now."""
        return self._mode

    @property
    def open_connections(self) -> int:
        """Clients connected now."""
        return sum(connection.has_client for connection in list(self._open))

    def pass_through(self) -> None:
        """Let connects and bytes through."""
        self._call(self._change_mode(Mode.PASSING))

    def delay(self, seconds: float) -> None:
        """Let connects and bytes through, holding each chunk for `seconds` on its way."""
        self._call(self._change_mode(Mode.PASSING, delay_s=seconds))

    def black_hole(self) -> None:
        """Accept and never answer; stop all bytes under way. Nobody is told."""
        self._call(self._change_mode(Mode.BLACK_HOLE))

    def refuse(self) -> None:
        """Refuse connects and reset the connections there are."""
        self._call(self._change_mode(Mode.REFUSING))

    def cut(self) -> None:
        """Reset the connections there are; new ones are served by the mode."""
        self._call(self._reset_all())

    def cut_after(self, pattern: bytes, direction: Direction = "up", answer: bool = False) -> threading.Event:
        """Reset the connection on which `pattern` goes by next, once; returns `cut_done`.

        up      the pattern reaches the server; the client is cut when the server answers, before the answer reaches
                it, or after that with `answer`. For "the server has done it and the answer was lost": b"COMMIT".
        down    the client is cut when the pattern comes from the server, before it reaches the client, or after that
                with `answer`.

        The server keeps its side until it has read everything it was sent, and then sees an ordinary end of file.
        With a pipelining client the answer seen first may be that to an earlier request: the one with the pattern
        is then still carried out, but perhaps after `cut_done`.
        """
        self._call(self._arm(_Trap(pattern, direction, answer)))
        return self.cut_done

    def start(self) -> Self:
        """Listen and serve; `with` does this."""
        self._thread.start()
        self._call(self._listen())
        return self

    def close(self) -> None:
        """Reset what is open and free the port; `with` does this."""
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._reservation.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Below here everything runs in the proxy's thread.

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` in the proxy's thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _change_mode(self, mode: Mode, *, delay_s: float = 0.0) -> None:
        self._mode, self._delay_s = mode, delay_s
        if mode is Mode.BLACK_HOLE:
            self._moving.clear()
        else:
            self._moving.set()
        if mode is Mode.REFUSING:
            self._stop_listening()
            await self._reset_all()
        else:
            await self._listen()

    async def _arm(self, trap: _Trap) -> None:
        self.cut_done.clear()
        for connection in self._open:
            connection.forget_seen()
        self._trap = trap

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bind(self.port)
            self._listener.listen(128)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        # Not loop.sock_accept(): cancelled at the wrong moment it loses a socket it has accepted.
        try:
            client, _ = listener.accept()
        except OSError:
            return  # the client has gone away in the meantime
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        connection = _Connection(self, client)
        self._open.add(connection)
        connection.task = self._loop.create_task(connection.serve())

    async def _reset_all(self) -> None:
        for connection in list(self._open):
            connection.reset_on_close()
            if connection.task is not None:
                await _cancel(connection.task)

    async def _shut(self) -> None:
        self._stop_listening()
        await self._reset_all()


@dataclass
class _Trap:
    pattern: bytes
    direction: Direction
    answer: bool


class _Connection:
    """One client and its server, until one of them ends or the proxy cuts them."""

    def __init__(self, proxy: TcpProxy, client: socket.socket) -> None:
        self.task: asyncio.Task[None] | None = None
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._sprung: _Trap | None = None
        self._pattern_sent = asyncio.Event()
        self.forget_seen()

    @property
    def has_client(self) -> bool:
        """Whether the client's side is still open."""
        return self._client.fileno() >= 0

    def forget_seen(self) -> None:
        """Look for a pattern only in what comes from now on."""
        self._seen: dict[Direction, bytes] = {"up": b"", "down": b""}

    def reset_on_close(self) -> None:
        """Make the end of this connection an RST to both sides instead of an end of file."""
        for side in (self._client, self._server):
            if side is not None and side.fileno() >= 0 and side.family == socket.AF_INET:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    async def serve(self) -> None:
        is_cut = False
        try:
            try:
                await self._proxy._moving.wait()
                await self._connect()
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump("up"))
                    pumps.create_task(self._pump("down"))
            except* _Cut:
                is_cut = True  # what is awaited in this block would end in a group, even a cancellation
            except* OSError:
                # The server is not there, or one side was reset: so is the other.
                self.reset_on_close()
            if is_cut:
                await self._cut_client()
        finally:
            self._proxy._open.discard(self)
            self._client.close()
            if self._server is not None:
                self._server.close()

    async def _connect(self) -> None:
        host, port = self._proxy.target_host, self._proxy.target_port
        if host.startswith("/"):
            self._server = socket.socket(socket.AF_UNIX)
            address: Any = host
        else:
            self._server = socket.socket(socket.AF_INET)
            self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = (socket.gethostbyname(host), port)
        self._server.setblocking(False)
        await self._proxy._loop.sock_connect(self._server, address)

    async def _pump(self, direction: Direction) -> None:
        """Move bytes in one direction until their source ends."""
        proxy, loop = self._proxy, self._proxy._loop
        assert self._server is not None
        source, sink = (self._client, self._server) if direction == "up" else (self._server, self._client)
        while chunk := await loop.sock_recv(source, CHUNK):
            if proxy._delay_s:
                await asyncio.sleep(proxy._delay_s)
            await proxy._moving.wait()
            cut = await self._is_where_to_cut(direction, chunk)
            if cut is not None and not cut.answer:
                raise _Cut
            # Counted first: who has received the bytes finds them counted.
            if direction == "up":
                proxy.bytes_up += len(chunk)
            else:
                proxy.bytes_down += len(chunk)
            await loop.sock_sendall(sink, chunk)
            if direction == "up":
                self._pattern_sent.set()
            if cut is not None:
                raise _Cut
        await proxy._moving.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _is_where_to_cut(self, direction: Direction, chunk: bytes) -> _Trap | None:
        """The trap, if the cut is to be made at this chunk."""
        if direction == "down" and self._sprung is not None:
            await self._pattern_sent.wait()
            return self._sprung
        trap = self._proxy._trap
        if trap is None or trap.direction != direction:
            return None
        seen = self._seen[direction] + chunk
        self._seen[direction] = seen[-len(trap.pattern) :]
        if trap.pattern not in seen:
            return None
        self._proxy._trap = None  # one shot
        if direction == "down":
            return trap
        self._sprung = trap
        self._pattern_sent.clear()
        return None

    async def _cut_client(self) -> None:
        """Reset the client, then let the server finish what it was sent."""
        self._proxy.cut_done.set()  # first: who has seen the reset finds it set
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._client.close()
        assert self._server is not None
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)
            while await self._proxy._loop.sock_recv(self._server, CHUNK):
                pass


class _Cut(Exception):
    """The trap of `cut_after` has been sprung on this connection."""


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setblocking(False)
    bound.bind(("127.0.0.1", port))
    return bound


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _family(scheme: str) -> str:
    """A URL's scheme without the driver: "postgresql+psycopg" is "postgresql"; "redis+socket" stays as it is."""
    return scheme if scheme == "redis+socket" else scheme.partition("+")[0]


def _target_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    family = _family(parts.scheme)
    if family in ("unix", "redis+socket"):
        return parts.path, 0
    # Not parts.hostname, which is in lower case: a directory of Unix sockets may stand here, percent-encoded.
    host, _, port = parts.netloc.rpartition("@")[2].partition(":")
    query = dict(parse_qsl(parts.query))
    host = query.get("host") or unquote(host) or "127.0.0.1"
    number = int(query.get("port") or port or DEFAULT_PORTS[family])
    return (f"{host}/.s.PGSQL.{number}", 0) if host.startswith("/") else (host, number)
