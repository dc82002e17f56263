"""Read-only views for commands and dashboards. The running side never imports this."""

from __future__ import annotations

from typing import Any

from .operations.runtime import Runtime
from .store import dead, jobs, messages, workers


class Inspection:
    """Looks at one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def stats(self) -> dict[str, Any]:
        """Return what a person or a monitor wants to know first, as JSON values."""
        connections = self._runtime.connections
        return {
            "jobs": jobs.count(connections, "status"),
            "queues": {
                row.queue: {
                    "messages": row.messages,
                    "unpublished": row.unpublished,
                    "running": row.running,
                    "oldest_due_s": max(0.0, row.oldest_due_s) if row.oldest_due_s is not None else None,
                }
                for row in messages.depth(connections)
            },
            "dead": dead.count(connections),
            "workers": [
                {
                    "id": row.id,
                    "ident": row.ident,
                    "alive": row.dead_at is None,
                    "suspected": row.suspect_at is not None,
                }
                for row in workers.list_all(connections)
            ],
        }
