"""The Redis scripts in `lua/`: sent by their hash, and as text to a server that does not know them yet."""

from __future__ import annotations

from collections.abc import Sequence
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
