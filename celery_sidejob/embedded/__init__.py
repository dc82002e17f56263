"""Throwaway Postgres and Valkey for demos and tests, from PyPI wheels alone; nothing here is meant for production.

    with embedded.Postgres() as postgres, embedded.Valkey() as valkey:
        app.conf.update(broker_url=valkey.url, sidejob={"database_url": postgres.url})

They are direct children of this process and work as root too. When their owner dies, even by ``kill -9``, they leave,
and their temporary directories with them: a janitor, a small process beside each, sees to that. On Linux the servers do
not wait for it but leave when the *thread* that called ``start()`` ends: start them in a thread that lives as long as
they should, most simply the main one.
"""

from .postgres import Postgres
from .processes import ServerError
from .valkey import Valkey

__all__ = ["Postgres", "ServerError", "Valkey"]
