"""Throwaway Postgres and Valkey for demos and tests, from PyPI wheels alone; nothing here is meant for production.

    with embedded.Postgres() as postgres, embedded.Valkey() as valkey:
        app.conf.update(broker_url=valkey.url, sidejob={"database_url": postgres.url})

The servers are direct children of this process, and work as root too. Every process that a server starts ends with this
process, even after ``kill -9``, and its temporary directories are removed: a janitor, a small process beside each
server, does that. On Linux a server ends as soon as the *thread* that called ``start()`` does. So start it in a thread
that lives long enough, most simply the main one.
"""

from .postgres import Postgres
from .processes import ServerError
from .valkey import Valkey

__all__ = ["Postgres", "ServerError", "Valkey"]
