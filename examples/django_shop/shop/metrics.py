"""Serves Prometheus what `celery -A shop sidejob stats --prometheus` says: `python -m shop.metrics [PORT]`."""

import sys

from prometheus_client import REGISTRY, start_http_server

from celery_sidejob.prometheus import SideJobCollector

from .celery import sidejob


def main():
    """Serve until the process is ended; the store is read at each scrape."""
    REGISTRY.register(SideJobCollector(sidejob))
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9808
    server, thread = start_http_server(port)
    print(
        f"Serving metrics at http://127.0.0.1:{server.server_port}/metrics, and at every other address of this machine",
        flush=True,
    )
    thread.join()


if __name__ == "__main__":
    main()
