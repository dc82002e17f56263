"""The dead list: messages that are delivered to no worker until a person decides."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from hashlib import sha1
from typing import Any

from kombu.utils.json import dumps, loads
from redis import Redis

from ...model.messages import Cursor
from .. import dead_list
from ..dead_list import DAY_S, DeadMessage, headers_in, log_dropped
from ..quarantine import SUSPECT
from .records import BELL_MS
from .scripts import BOUND_DEAD, DELIVER_AGAIN, Keys

PAGE = 100


def _read(text: bytes) -> DeadMessage:
    """Read an entry; an entry from another program is no message of any queue."""
    name = sha1(text, usedforsecurity=False).hexdigest()[:12]
    try:
        entry = json.loads(text)
        return DeadMessage(
            text,
            name,
            entry["queue"],
            entry["task_id"],
            entry["reason"],
            datetime.fromtimestamp(entry["at"], UTC),
            entry["message"],
            headers_in(entry["message"], "headers"),
            entry["list"],
        )
    except Exception:  # whatever another program has put there
        return DeadMessage(text, name, "", None, "no entry of this transport", datetime.fromtimestamp(0, UTC), "", {})


class DeadList(dead_list.DeadList):
    """The dead list of one broker."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    @classmethod
    def of(cls, channel: Any) -> DeadList:
        """Return the dead list of a channel's broker (maybe kombu's): server, database and prefix identify the list."""
        return cls(Redis(connection_pool=channel.pool), Keys(channel.global_keyprefix, channel.sep))

    def __len__(self) -> int:
        return int(self._client.llen(self._keys.dead))

    def page(self, cursor: Cursor) -> tuple[Cursor, list[DeadMessage]]:
        """Return the page behind a cursor, and the new cursor: the beginning, if an earlier entry was removed."""
        first = max(cursor.number - 1, 0)  # with the entry before, if there is one
        texts: list[bytes] = self._client.lrange(self._keys.dead, first, cursor.number + PAGE - 1)
        if cursor.number:
            if not texts or texts[0] != cursor.last:
                return self.page(Cursor())
            del texts[0]
        return cursor, [_read(text) for text in texts]

    def bound(self, *, limit: int | None, days: float | None) -> int:
        """Drop the oldest entries beyond `limit`, and those older than `days`; each is logged. Returns how many.

        If the process dies in between, some dropped entries are not logged.
        """
        since = 0.0 if days is None else time.time() - days * DAY_S
        dropped = 0
        while True:
            gone = BOUND_DEAD.run(self._client, [self._keys.dead], [-1 if limit is None else limit, since, PAGE])
            entries = map(_read, gone)
            log_dropped(((one.queue, one.task_id, one.at) for one in entries), limit=limit, days=days)
            dropped += len(gone)
            if len(gone) < PAGE:
                return dropped

    def delete(self, text: bytes) -> bool:
        """Remove an entry; False if it was already removed."""
        return bool(self._client.lrem(self._keys.dead, 1, text))

    def deliver_again(self, dead: DeadMessage) -> bool:
        """Deliver a message again as a fresh one; False if it was retried or deleted meanwhile.

        Raises ValueError for an entry that is no message, and would be back at once.
        """
        try:
            message = loads(dead.message)
            for name in ("delivery_count", SUSPECT):
                message["properties"].pop(name, None)
            message["headers"]
        except Exception:  # of whatever decodes a type in it
            raise ValueError(f"{dead.id} is not a valid message: {dead.reason}") from None
        keys = [self._keys.dead, dead.list_key, self._keys.bell(dead.queue)]
        return bool(DELIVER_AGAIN.run(self._client, keys, [dead.text, dumps(message), BELL_MS]))
