"""A process that publishes two messages on a channel, ten packets a page, and may be killed on its way.

DATABASE_URL=… python -m tests.operations.publisher
"""

from __future__ import annotations

import os

from celery_sidejob.operations.changes import follow_up, mailboxes
from tests.tools.apps import make_app

CHANNEL = "/news"


def main() -> None:
    """Publish 1, then 2."""
    follow_up.PAGE = 10
    mailboxes.FEW = 0
    app = make_app("publisher", broker="memory://", sidejob_database_url=os.environ["DATABASE_URL"])
    for message in (1, 2):
        app.sidejob.publish(CHANNEL, message)


if __name__ == "__main__":
    main()
