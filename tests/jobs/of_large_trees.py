"""A process that terminates or deletes a tree, seven jobs in a transaction, and may be killed on its way.

DATABASE_URL=… python -m tests.jobs.of_large_trees terminate|delete ID
"""

from __future__ import annotations

import os
import sys

from celery_sidejob.operations import lock_set
from celery_sidejob.operations.changes import deletion, follow_up
from tests.tools.apps import make_app


def main() -> None:
    """Terminate or delete it."""
    lock_set.TOGETHER = deletion.TOGETHER = 10
    follow_up.TREE_PAGE = deletion.PART = 7
    app = make_app("trees", broker="memory://", sidejob_database_url=os.environ["DATABASE_URL"])
    root = app.sidejob.get(int(sys.argv[2]))
    if sys.argv[1] == "terminate":
        root.terminate(recursive=True)
    else:
        root.delete()


if __name__ == "__main__":
    main()
