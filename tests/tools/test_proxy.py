"""The proxy fails in the ways it promises: shown on a tiny echo server, and on Postgres for the lost answer."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from tests.tools.proxy import Mode, TcpProxy
from tests.tools.waiting import wait_until

SOON = 0.2  # how long a byte that must not come is waited for


class EchoServer(socketserver.ThreadingTCPServer):
    """Answers each line with itself; remembers what it was sent and which connections ended."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.received: list[bytes] = []
        self.endings: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Echo(socketserver.StreamRequestHandler):
    server: EchoServer

    def handle(self) -> None:
        try:
            for line in self.rfile:
                self.server.received.append(line)
                self.wfile.write(line)
            self.server.endings.append("end of file")
        except ConnectionError:
            self.server.endings.append("reset")


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with EchoServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


class Client:
    """A line at a time, with a deadline on each."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.socket = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def receive(self, timeout: float = 10) -> bytes:
        self.socket.settimeout(timeout)
        return self.socket.recv(1024)

    def ask(self, line: bytes) -> bytes:
        self.send(line)
        return self.receive()


def test_bytes_go_through_and_are_counted(proxy: TcpProxy) -> None:
    with Client(proxy) as one, Client(proxy) as other:
        assert one.ask(b"hello\n") == b"hello\n"
        assert other.ask(b"you\n") == b"you\n"
        assert proxy.open_connections == 2

    assert proxy.connections == 2
    assert proxy.bytes_up == proxy.bytes_down == 10
    wait_until(lambda: proxy.open_connections == 0)


def test_an_end_of_file_goes_through(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as client:
        client.send(b"last\n")
        client.socket.shutdown(socket.SHUT_WR)

        assert client.receive() == b"last\n"
        assert client.receive() == b""
    assert echo.endings == ["end of file"]


def test_refusing_resets_what_is_open_and_refuses_connects(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as client:
        client.ask(b"hello\n")
        proxy.refuse()

        assert proxy.mode is Mode.REFUSING
        with pytest.raises(ConnectionResetError):
            client.receive()
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    wait_until(lambda: echo.endings == ["reset"])

    proxy.pass_through()
    with Client(proxy) as client:
        assert client.ask(b"again\n") == b"again\n"


def test_a_black_hole_accepts_and_never_answers(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as before:
        before.ask(b"hello\n")
        proxy.black_hole()
        sent = proxy.bytes_up

        with Client(proxy) as after:
            before.send(b"swallowed\n")
            after.send(b"also\n")
            for client in (before, after):
                with pytest.raises(TimeoutError):
                    client.receive(timeout=SOON)
            assert proxy.connections == 2
            assert (proxy.bytes_up, echo.received) == (sent, [b"hello\n"])

            proxy.pass_through()
            assert before.receive() == b"swallowed\n"
            assert after.receive() == b"also\n"


def test_a_black_hole_can_be_cut(proxy: TcpProxy) -> None:
    proxy.black_hole()
    with Client(proxy) as client:
        wait_until(lambda: proxy.open_connections == 1)
        proxy.cut()

        with pytest.raises(ConnectionResetError):
            client.receive()


def test_a_delay_holds_bytes_both_ways(proxy: TcpProxy) -> None:
    with Client(proxy) as client:
        client.ask(b"hello\n")
        proxy.delay(0.1)
        started = time.monotonic()

        assert client.ask(b"late\n") == b"late\n"
        assert time.monotonic() - started >= 0.2

        proxy.pass_through()
        assert client.ask(b"prompt\n") == b"prompt\n"


def test_a_cut_resets_what_is_open_and_serves_the_next(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as one, Client(proxy) as other:
        one.ask(b"1\n")
        other.ask(b"2\n")
        proxy.cut()

        for client in (one, other):
            with pytest.raises(ConnectionResetError):
                client.receive()
        assert proxy.open_connections == 0
    with Client(proxy) as client:
        assert client.ask(b"3\n") == b"3\n"
    wait_until(lambda: sorted(echo.endings) == ["end of file", "reset", "reset"])


def test_the_answer_is_lost_after_the_server_has_done_it(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as client, Client(proxy) as bystander:
        client.ask(b"begin\n")
        bystander.ask(b"begin\n")
        cut_done = proxy.cut_after(b"COMMIT")
        assert client.ask(b"insert\n") == b"insert\n"
        assert not cut_done.is_set()

        with pytest.raises(ConnectionResetError):
            client.ask(b"COMMIT\n")

        assert cut_done.wait(10)
        assert b"COMMIT\n" in echo.received
        assert bystander.ask(b"COMMIT\n") == b"COMMIT\n"  # one shot, one connection
    wait_until(lambda: echo.endings == ["end of file", "end of file"])


def test_the_answer_may_be_delivered_before_the_cut(proxy: TcpProxy) -> None:
    with Client(proxy) as client:
        cut_done = proxy.cut_after(b"COMMIT", answer=True)

        assert client.ask(b"COMMIT\n") == b"COMMIT\n"
        assert cut_done.wait(10)
        with pytest.raises(ConnectionResetError):
            client.receive()


@pytest.mark.parametrize("answer", [False, True])
def test_a_pattern_from_the_server_cuts(proxy: TcpProxy, answer: bool) -> None:
    with Client(proxy) as client:
        cut_done = proxy.cut_after(b"two", direction="down", answer=answer)
        assert client.ask(b"one\n") == b"one\n"

        client.send(b"two\n")
        assert cut_done.wait(10)
        if answer:
            assert client.receive() == b"two\n"
        with pytest.raises(ConnectionResetError):
            client.receive()


def test_a_pattern_may_come_in_pieces(proxy: TcpProxy, echo: EchoServer) -> None:
    with Client(proxy) as client:
        cut_done = proxy.cut_after(b"COM\nMIT")
        assert client.ask(b"COM\n") == b"COM\n"
        with pytest.raises(ConnectionResetError):
            client.ask(b"MIT\n")

    assert cut_done.is_set()
    assert echo.received == [b"COM\n", b"MIT\n"]


def test_what_went_by_before_arming_does_not_count(proxy: TcpProxy) -> None:
    with Client(proxy) as client:
        proxy.cut_after(b"never")
        client.ask(b"COM\n")
        cut_done = proxy.cut_after(b"COM\nMIT")

        assert client.ask(b"MIT\n") == b"MIT\n"
        assert not cut_done.is_set()


def test_a_server_that_is_not_there_is_a_reset(echo: EchoServer) -> None:
    free = socket.socket()
    free.bind(("127.0.0.1", 0))  # bound and not listening: refuses
    with free, TcpProxy("127.0.0.1", free.getsockname()[1]) as proxy:
        with pytest.raises(ConnectionResetError), Client(proxy) as client:
            client.receive()


def test_a_unix_socket_can_be_the_target(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with TcpProxy.to(f"redis+socket://{path}?virtual_host=1") as proxy, Client(proxy) as client:
            client.send(b"hello\n")
            server, _ = listener.accept()
            with server:
                assert server.recv(1024) == b"hello\n"


@pytest.mark.parametrize(
    ("url", "target", "through"),
    [
        (
            "postgresql://me:pw@db:5433/app?connect_timeout=3",
            ("db", 5433),
            "postgresql://me:pw@127.0.0.1:{port}/app?connect_timeout=3&sslmode=disable&gssencmode=disable",
        ),
        (
            "postgresql+psycopg://me@/app?host=/run/Pg&port=5433&sslmode=prefer",
            ("/run/Pg/.s.PGSQL.5433", 0),
            "postgresql+psycopg://me@127.0.0.1:{port}/app?sslmode=prefer&gssencmode=disable",
        ),
        (
            "postgresql://me@%2Frun%2FPg/app",
            ("/run/Pg/.s.PGSQL.5432", 0),
            "postgresql://me@127.0.0.1:{port}/app?sslmode=disable&gssencmode=disable",
        ),
        ("redis://:pw@localhost/3", ("localhost", 6379), "redis://:pw@127.0.0.1:{port}/3"),
        ("redis+socket:///run/r.sock?virtual_host=3", ("/run/r.sock", 0), "redis://127.0.0.1:{port}/3"),
        ("unix:///run/r.sock?db=3", ("/run/r.sock", 0), "redis://127.0.0.1:{port}/3"),
        ("amqp://guest:guest@mq:5673//", ("mq", 5673), "amqp://guest:guest@127.0.0.1:{port}//"),
    ],
)
def test_urls_lead_through_the_proxy(url: str, target: tuple[str, int], through: str) -> None:
    with TcpProxy.to(url) as proxy:
        assert (proxy.target_host, proxy.target_port) == target
        assert proxy.url_for(url) == through.format(port=proxy.port)


def test_a_commit_whose_answer_was_lost_is_there(empty_database_url: str) -> None:
    with TcpProxy.to(empty_database_url) as proxy, psycopg.connect(empty_database_url) as witness:
        witness.execute("CREATE TABLE seen (id int)")
        witness.commit()
        with psycopg.connect(proxy.url_for(empty_database_url)) as connection:
            connection.execute("INSERT INTO seen VALUES (1)")
            cut_done = proxy.cut_after(b"COMMIT")
            with pytest.raises(psycopg.OperationalError):
                connection.commit()

        assert cut_done.is_set()
        assert witness.execute("SELECT count(*) FROM seen").fetchone() == (1,)


def test_redis_goes_through(redis_url: str) -> None:
    with TcpProxy.to(redis_url) as proxy, redis.Redis.from_url(proxy.url_for(redis_url)) as through:
        assert through.set("key", "value")
        assert proxy.bytes_up > 0
