"""The demo: a census of real Python files by two real workers, one of which is killed, and the broker emptied.

    ./run demo [--web] [--broker postgres|redis] [PATH]     or     python examples/demo.py …

It needs no servers: it starts its own Postgres, which is the broker too. With `--broker redis` it starts a Valkey as
well. SIDEJOB_DATABASE_URL and CELERY_BROKER_URL may name servers of yours. With `--web` it serves the web page of the
census, and stays until Ctrl-C.
Every server that it starts ends with it, even after `kill -9`. The jobs themselves are in code_census.py.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # During the imports, which take a second, there is nothing yet to clean up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from census_demo.demonstration import main

    sys.exit(main())
