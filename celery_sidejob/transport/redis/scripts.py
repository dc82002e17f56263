"""The Redis scripts in `lua/`, and every key that the transport uses in Redis beside kombu's own.

Scripts are sent by their hash, and as text to a server that does not know them yet. The keys begin with the app's
`global_keyprefix`, and redis-py sends them unchanged: kombu's prefixing clients do so only for the first key of a
script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError


class Script:
    """One script; its head describes `KEYS` and `ARGV`."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath("lua", f"{name}.lua").read_text()
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], arguments: Sequence[Any], *, by_text: bool = False) -> list[Any]:
        """Return the command that runs it; with the text it always works, and Redis then knows the hash."""
        head = ["EVAL", self.text] if by_text else ["EVALSHA", self.sha]
        return [*head, len(keys), *keys, *arguments]

    def run(self, client: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run it and return its answer, even on a server that was restarted or promoted by a failover."""
        try:
            return client.execute_command(*self.command(keys, arguments))
        except NoScriptError:
            return client.execute_command(*self.command(keys, arguments, by_text=True))


PUT = Script("put")
FETCH = Script("fetch")
GIVE_BACK = Script("give_back")
BEAT = Script("beat")
BOUND_DEAD = Script("bound_dead")
WAIT = Script("wait")
DELIVER_AGAIN = Script("deliver_again")


class Keys:
    """The keys of one broker."""

    def __init__(self, prefix: str, separator: str) -> None:
        """`separator`: the text between a queue and a priority in the name of a list (kombu's `sep`)."""
        self.prefix = prefix
        self._separator = separator
        self.consumers = f"{prefix}_sidejob.consumers"
        """A sorted set: the consumers, and until when each counts as alive (by Redis' clock, in milliseconds)."""
        self.recovering = f"{prefix}_sidejob.recovering"
        """A sorted set: consumers that are being recovered, and until when other hearts leave them alone."""
        self.era = f"{prefix}_sidejob.era"
        """A text that the first beat writes: a different text means that Redis has lost its data."""
        self.dead = f"{prefix}_sidejob.dead"
        """A list of JSON: messages that are not delivered again."""

    def held(self, consumer: str) -> str:
        """A hash: the messages of a consumer by their tokens, each with the list that it came from."""
        return f"{self.prefix}_sidejob.held.{consumer}"

    def waiting(self, consumer: str) -> str:
        """A set: the tokens of messages that a consumer holds and has not begun, as of its last beat."""
        return f"{self.prefix}_sidejob.waiting.{consumer}"

    def bell(self, queue: str) -> str:
        """A list with at most one empty element: a message has arrived that perhaps no consumer has seen."""
        return f"{self.prefix}_sidejob.bell.{queue}"

    def bells(self, queues: Iterable[str]) -> list[str]:
        """The bells of several queues."""
        return [self.bell(queue) for queue in queues]

    def kombu_list(self, name: str) -> str:
        """The list that kombu calls by this name."""
        return self.prefix + name

    def queue_of(self, list_key: str) -> str:
        """The queue that a list belongs to."""
        return list_key[len(self.prefix) :].rsplit(self._separator, 1)[0]

    def bells_of(self, list_keys: Sequence[str]) -> list[str]:
        """The bell of each list's queue."""
        return [self.bell(self.queue_of(key)) for key in list_keys]
