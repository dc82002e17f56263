"""Who is let in: by TLS, with a password, as a user of a few rights, with credentials that somebody provides."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from kombu import Connection, Exchange, Queue

from celery_sidejob import embedded
from celery_sidejob.embedded.server import HOST
from celery_sidejob.transport.redis.transport import RIGHTS, UnsuitableServerError
from tests.transport.conftest import ours
from tests.transport.consuming import Consuming, publish

OPENSSL = shutil.which("openssl")
NAME, PASSWORD = "shop", "secret"


class Provider(redis.CredentialProvider):
    """Knows the user's name and password."""

    def get_credentials(self) -> tuple[str, str]:
        return NAME, PASSWORD


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine, which vouches for itself, and its key."""
    if OPENSSL is None:
        pytest.skip("there is no openssl on this machine, by which to make a certificate: TLS was not tested")
    made = tmp_path_factory.mktemp("tls")
    certificate, key = made / "certificate.pem", made / "key.pem"
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture
def tls_port(redis_url: str, certificate: tuple[Path, Path]) -> Iterator[int]:
    """The port on which this run's Redis answers by TLS: the one of the wheel is built without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    target = urlsplit(redis_url)
    with socket.create_server((HOST, 0)) as listening:

        def carry(source: Any, sink: Any) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with suppress(OSError):  # the end: nobody listens any more
                while True:
                    plain, _ = listening.accept()
                    threading.Thread(target=carry_both, args=(plain,), daemon=True).start()

        def carry_both(plain: socket.socket) -> None:
            with plain, suppress(OSError):
                with context.wrap_socket(plain, server_side=True) as client:
                    with socket.create_connection((target.hostname, target.port)) as server:
                        back = threading.Thread(target=carry, args=(server, client), daemon=True)
                        back.start()
                        carry(client, server)
                        back.join()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def test_a_certificate_is_verified(redis_url: str, tls_port: int, certificate: tuple[Path, Path]) -> None:
    parts = urlsplit(redis_url)
    url = f"sidejobs://:{parts.password}@{HOST}:{tls_port}{parts.path}" if parts.password else (
        f"sidejobs://{HOST}:{tls_port}{parts.path}"
    )  # fmt: skip
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"), Connection(url) as connection:
        connection.connect()
    with Connection(f"{url}?ssl_ca_certs={certificate[0]}") as connection:
        works(connection)


@pytest.mark.parametrize("scheme", ["sidejob", "sidejobs"])
def test_true_means_tls_with_a_certificate_that_is_verified(
    redis_url: str, tls_port: int, certificate: tuple[Path, Path], scheme: str
) -> None:
    parts = urlsplit(redis_url)
    url = parts._replace(scheme=scheme, netloc=f":{parts.password or ''}@{HOST}:{tls_port}").geturl()
    options = {"socket_timeout": 5}  # a server that waits for a greeting answers nothing else
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        Connection(url, ssl=True, transport_options=options).connect()
    with Connection(f"{url}?ssl_ca_certs={certificate[0]}", ssl=True) as connection:
        works(connection)
    with Connection(url, ssl={"ssl_ca_certs": str(certificate[0])}) as connection:
        works(connection)


@pytest.mark.parametrize("scheme", ["sidejob", "sidejobs", "sidejob-sentinel"])
def test_what_asks_for_tls_in_other_words_is_no_connection_without(scheme: str) -> None:
    assert Connection(f"{scheme}://host", ssl=True).transport.client.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    with pytest.raises(ValueError, match="broker_use_ssl is True or options such as"):
        Connection(f"{scheme}://host", ssl="required").connect()


@pytest.fixture
def shop(own_valkey: embedded.Valkey) -> Iterator[Any]:
    """Gives a user of a server some rights, and returns the URL by which it comes."""
    with redis.Redis.from_url(own_valkey.url) as server:

        def allow(*rights: str) -> str:
            server.execute_command("ACL", "SETUSER", NAME, "reset", "on", f">{PASSWORD}", *rights)
            return ours(own_valkey.url)

        yield allow


def test_who_may_use_it(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    needed = RIGHTS.removeprefix("It needs ").partition(";")[0].split()
    url = shop(*needed)
    place = urlsplit(url)
    with Connection(place._replace(netloc=f"{NAME}:{PASSWORD}@{HOST}:{place.port}").geturl()) as connection:
        works(connection)
    provided = place._replace(netloc=f"{HOST}:{place.port}", query=f"credential_provider={__name__}.Provider").geturl()
    with Connection(provided) as connection:
        works(connection)
    assert caplog.messages == []


def test_who_may_not_publish_is_told(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    place = urlsplit(shop("~*", "resetchannels", "+@all"))
    with Connection(place._replace(netloc=f"{NAME}:{PASSWORD}@{HOST}:{place.port}").geturl()) as connection:
        connection.connect()
    assert "no remote control" in caplog.text


def test_who_may_only_touch_what_has_the_prefix_may_use_it(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    url = urlsplit(shop("~shop:*", "resetchannels", "&shop:*", "+@all"))
    netloc = f"{NAME}:{PASSWORD}@{HOST}:{url.port}"
    options = {"global_keyprefix": "shop:"}
    with Connection(url._replace(netloc=netloc).geturl(), transport_options=options) as connection:
        consuming = Consuming(connection, "queue", prefetch=1)
        publish(connection, "queue", 1)
        assert consuming.take(1) == [1]
        consuming.messages[0].reject(requeue=True)
        assert consuming.take(1) == [1]
        consuming.close()
    assert caplog.messages == []


def test_who_may_publish_alone_is_refused(shop: Any) -> None:
    place = urlsplit(shop("~*", "&*", "+@pubsub"))
    url = place._replace(netloc=f"{NAME}:{PASSWORD}@{HOST}:{place.port}").geturl()
    with pytest.raises(UnsuitableServerError, match="does not give its user enough rights") as refused:
        Connection(url).connect()
    assert PASSWORD not in str(refused.value)


def works(connection: Connection) -> None:
    """Publish and consume, with a heart that beats, to all and to one."""
    news = Queue("news", Exchange("news", type="fanout"))
    consuming = Consuming(connection, "queue", news, prefetch=2)
    consuming.drain(0.05)
    publish(connection, "queue", 1)
    with connection.Producer() as producer:
        producer.publish(2, exchange=news.exchange, serializer="json")
    assert sorted(consuming.take(2)) == [1, 2]
    heart = consuming.channel.connection._heart
    assert heart.run_once().lost == ()
    for message in consuming.messages:
        message.ack()
    consuming.close()
