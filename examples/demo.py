"""The demo: a census of real Python files by two real workers, one of which is killed, and the broker emptied.

    ./run demo [PATH]     or     python examples/demo.py [PATH]

It needs no servers: it starts a Postgres and a Valkey of its own, unless SIDEJOB_DATABASE_URL or CELERY_BROKER_URL name
yours. What it started is gone when it ends, however it ends. The jobs themselves are in code_census.py.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # The imports take a second, in which there is nothing yet to be ended in good order.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from census_demo.demonstration import main

    sys.exit(main())
