"""Calls of durable tasks while the one store is killed, frozen or cut off end as `sidejob_on_store_down` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from celery_sidejob import StoreUnavailableError, embedded
from celery_sidejob.operations import stores
from tests.acceptance.test_durable import APP, TIMEOUT_S, Site
from tests.tools.brokers import APART, Broker
from tests.tools.databases import prepare_template
from tests.tools.freezing import frozen
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

Away = Callable[[embedded.Postgres, TcpProxy], AbstractContextManager[None]]


@contextmanager
def killed(postgres: embedded.Postgres, proxy: TcpProxy) -> Iterator[None]:
    """`kill -9`."""
    postgres.kill()
    yield
    postgres.start()


@contextmanager
def stopped(postgres: embedded.Postgres, proxy: TcpProxy) -> Iterator[None]:
    """SIGSTOP: it takes connections and statements, and does them when it goes on."""
    with frozen(postgres.pid):
        yield


@contextmanager
def cut_off(postgres: embedded.Postgres, proxy: TcpProxy) -> Iterator[None]:
    """A network that swallows everything."""
    proxy.black_hole()
    yield
    proxy.pass_through()


@pytest.mark.brokers("redis", only=APART, reason="is another Postgres here than the store, which no app may have")
@pytest.mark.parametrize("away", [killed, stopped, cut_off])
def test_a_call_ends_and_nothing_runs_twice(
    away: Away, own_postgres: embedded.Postgres, broker: Broker, record: Record, processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prepare_template(own_postgres.url)
    with TcpProxy.to(own_postgres.url) as proxy:
        site = Site(own_postgres.url, broker, record, processes)
        clients = {
            how: site.client(sidejob_database_url=proxy.url_for(own_postgres.url), sidejob_on_store_down=how)
            for how in ("error", "publish")
        }
        for client in clients.values():  # so that they are connected
            client.send_task(f"{APP}.noted", ("before",))
        wait_until(lambda: site.queued() == 2, message="both messages")  # RabbitMQ's quorum queues count them later

        monkeypatch.setattr(stores, "LONGEST_WAIT_S", 1.0)  # too short for a first connection on a busy machine
        monkeypatch.setattr(stores, "PAUSE_S", (3.0, 3.0))
        with away(own_postgres, proxy):
            for _ in range(2):
                with pytest.raises(StoreUnavailableError) as refused:
                    clients["error"].send_task(f"{APP}.noted", ("refused",))
            if away is not killed:  # the second call did not wait once more
                assert "none is asked just now" in str(refused.value)
            published = [clients["publish"].send_task(f"{APP}.noted", ("published",)) for _ in range(2)]
            wait_until(lambda: site.queued() == 4, message="all four messages")

        site.worker()
        for result in published:
            assert result.get(timeout=TIMEOUT_S) == "published"
        wait_until(lambda: clients["error"].send_task(f"{APP}.noted", ("after",)), timeout=TIMEOUT_S)
        site.wait_quiet()
        assert [len(site.ran(result)) for result in published] == [1, 1]
        runs = [line["value"] for line in site.record.of("ran")]
        # What was refused may have been done after all, by a server that was frozen: the call said so.
        assert sorted(set(runs) - {"refused"}) == ["after", "before", "published"]
        assert (runs.count("before"), runs.count("after"), runs.count("refused") <= 1) == (2, 1, True)
        assert site.dead() == []
        site.close()
