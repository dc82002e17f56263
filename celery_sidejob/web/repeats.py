"""A call of the HTTP API that is sent again with its Idempotency-Key does nothing again, and gets the same answer.

The key is written in the transaction in which the call writes first. So a call that died before its commit is done
when it is sent again. Of two at once, one waits for the other's transaction before it locks anything, and then finds
the key. If a process dies between the commit and the answer, the key says that the call was done, and its answer is
lost. A call that writes nothing here gets its key with its answer: until then a repeated one is done again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from ..model.errors import StoreUnavailableError
from ..operations.runtime import Runtime
from ..store import web_tokens
from ..store.statement import Transaction
from .site import Refused

HEADER = "idempotency-key"
LONGEST_KEY = 255
LONGEST_ANSWER = 1024 * 1024
"""The most bytes of an answer that is kept."""


def once(runtime: Runtime, token: str, request: Request, body: bytes, do: Callable[[], Response]) -> Response:
    """Answer a call by doing it, unless a call with its key was done by the same token within a day."""
    key = _key(request)
    if key is None:
        return do()
    asked = sha256(f"{request.method} {request.scope['path']}\n".encode() + body).hexdigest()
    kept = _kept(runtime, token, key, asked)
    if kept is not None:
        return kept

    call = str(uuid.uuid4())

    def note(executor: Transaction) -> None:
        if web_tokens.has_written(executor) and not web_tokens.note_call(
            executor, token, key, request=asked, call=call
        ):
            raise _taken()

    try:
        with runtime.connections.beside(partial(web_tokens.take_turn, token=token, key=key, call=call), note):
            done = do()
        if done.status_code < 500:
            keep = partial(_keep, token=token, key=key, asked=asked, call=call, done=done)
            with suppress(StoreUnavailableError):  # it is done, and this call gets its answer
                runtime.connections.transact("answer", keep)
        return done
    except Refused:  # it has changed nothing, though it may have locked rows: it may be corrected, and sent again
        runtime.connections.transact("answer", partial(web_tokens.forget_call, token=token, key=key, call=call))
        kept = _kept(runtime, token, key, asked)
        if kept is None:
            raise
        return kept  # of a call at the same time, which has done what was left to do


def _key(request: Request) -> str | None:
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= LONGEST_KEY:
        raise Refused(400, "Refused", f"An Idempotency-Key has 1 to {LONGEST_KEY} characters.")
    return key


def _keep(executor: Transaction, *, token: str, key: str, asked: str, call: str, done: Response) -> None:
    """Keep an answer. One of 400 or more is kept only if the call has written something: else it may be corrected.

    Raises Refused if there was nothing to do here because another call with this key, at the same time, has done it.
    """
    if len(done.body) > LONGEST_ANSWER:
        return
    found = web_tokens.find_answer(executor, token, key)
    if found is not None and found.call != call:
        raise _taken()
    # Without a note yet if nothing was written in this store.
    if done.status_code < 400 and not web_tokens.note_call(executor, token, key, request=asked, call=call):
        raise _taken()
    web_tokens.keep_answer(executor, token, key, call=call, code=done.status_code, answer=bytes(done.body).decode())


def _kept(runtime: Runtime, token: str, key: str, asked: str) -> Response | None:
    row = web_tokens.find_answer(runtime.connections, token, key)
    if row is None:
        return None
    if row.request != asked:
        raise Refused(422, "Another call", "Another call had this Idempotency-Key: give each call a key of its own.")
    if row.answer is None:
        raise _taken()
    kind = "json" if row.code < 400 else "problem+json"
    return Response(row.answer, row.code, {"idempotency-replayed": "true"}, media_type=f"application/{kind}")


def _taken() -> Refused:
    told = (
        "A call with this Idempotency-Key is in progress, or was done and its answer is lost: its process has died. "
        "This call has done nothing. Ask again, or see what the first call has done."
    )
    return Refused(409, "Done, and the answer is not known", told, headers={"retry-after": "1"})
