"""The HTTP API below /api/v1: who may call an operation, what it is given, and what it answers, in JSON.

A call with an `Idempotency-Key` that is sent again gets the first answer.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ..model.checks import is_keepable
from ..model.errors import DuplicateError, Overloaded, SideJobError, StoreUnavailableError
from ..model.logger import logger
from ..model.printable import plain
from ..operations.runtime import Runtime
from ..store import web_tokens
from ..store.statement import Transaction
from .site import AGAIN_S, PATIENCE_S, Refused, Site, Visit, as_route, read_body, status_of
from .users import Role, Token, User, find_token

PREFIX = "/api/v1"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
OVERHEAD = 64 * 1024
"""How many bytes a request may have beside the largest value, `sidejob_max_value_bytes`."""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters, or no body."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: `do` gets a `Call`, and returns what is answered as JSON."""

    method: str
    path: str
    scope: str
    do: Callable[[Call], Any]
    answer: Any
    body: type[msgspec.Struct] = Nothing
    query: type[msgspec.Struct] = Nothing
    status: int = 200

    @property
    def takes_key(self) -> bool:
        """Whether the header Idempotency-Key makes a repeated call do nothing more."""
        return self.method in ("POST", "PATCH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Visit):
    """One call of an operation."""

    body: Any
    query: Any

    @property
    def path(self) -> dict[str, str]:
        """The parameters in the path."""
        return self.request.path_params


def routes(site: Site, operations: tuple[Operation, ...]) -> list[Route]:
    """Return the routes of the API; the last answers what is no operation."""
    made = [
        Route(PREFIX + as_route(operation.path), _endpoint(site, operation), methods=[operation.method])
        for operation in operations
    ]

    async def other(request: Request) -> Response:
        of_path = (route.methods or () for route in made if route.matches(request.scope)[0] is Match.PARTIAL)
        allowed = ", ".join(sorted({method for methods in of_path for method in methods}))
        if allowed:
            return problem(405, "Method not allowed", f"This path takes {allowed}.", headers={"allow": allowed})
        return problem(404, "Not found", f"{PREFIX}/openapi.json lists the operations.")

    return [*made, Route(f"{PREFIX}/{{rest:sidejob_anything}}", other, methods=METHODS)]


def _endpoint(site: Site, operation: Operation) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            limit = site.sidejob.settings.max_value_bytes + OVERHEAD
            body = await read_body(request, limit) if operation.method != "GET" else b""
            return await run_in_threadpool(_answer, site, operation, request, body)
        except Exception as error:
            return _problem_of(error)

    return endpoint


def _answer(site: Site, operation: Operation, request: Request, body: bytes) -> Response:
    with site.sidejob.runtime.connections.talking(within_s=PATIENCE_S):
        token = _token(site, request)
        if operation.scope not in token.scopes:
            raise Refused(403, "Not allowed", f"The token {token.name!r} lacks the scope {operation.scope!r}.")
        user = User(f"token {token.name}", Role.READ)  # what it may do, its scopes say
        call = Call(site, request, user, body=_body(operation, request, body), query=_query(operation, request))
        if not all(map(is_keepable, (*request.path_params.values(), *request.query_params.values()))):
            raise Refused(400, "Refused", "The store keeps no text with a NUL or a lone surrogate.")

        def do() -> Response:
            try:
                return _json(operation.do(call), status=operation.status)
            except SideJobError as error:
                return _problem_of(error)

        return once(site.sidejob.runtime, token.hash, request, body, do) if operation.takes_key else do()


def _token(site: Site, request: Request) -> Token:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    found = find_token(site.sidejob.runtime, given.strip()) if kind.lower() == "bearer" else None
    if found is None:
        title, told = "No token", "Send the header `Authorization: Bearer TOKEN`"
        if given.strip():
            title, told = "No such token", "It was never made, or is revoked"
        told += "; `celery -A <app> sidejob web token add NAME` makes a token."
        raise Refused(401, title, told, headers={"www-authenticate": "Bearer"})
    return found


def _body(operation: Operation, request: Request, body: bytes) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise Refused(415, "No JSON", "Send the body as application/json.")
    try:
        return msgspec.json.decode(body or b"{}", type=operation.body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refused(400, "Not understood", f"The body is not what this operation takes: {error}") from error


def _query(operation: Operation, request: Request) -> Any:
    try:
        return msgspec.convert(dict(request.query_params), operation.query, strict=False)
    except msgspec.MsgspecError as error:
        raise Refused(400, "Not understood", f"The parameters are not what this operation takes: {error}") from error


def _json(document: Any, *, status: int, headers: dict[str, str] | None = None, kind: str = "json") -> Response:
    # Escaped, so that text of others cannot move the cursor of a terminal.
    text = json.dumps(document, default=plain, allow_nan=False)
    return Response(text, status_code=status, media_type=f"application/{kind}", headers=headers)


def problem(status: int, title: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """Return a problem document, RFC 9457."""
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    return _json(document, status=status, kind="problem+json", headers=headers)


def _problem_of(error: Exception) -> Response:
    if isinstance(error, Refused):
        return problem(error.status, error.title, error.told, headers=error.headers)
    told = str(error)
    name = next(one.__name__ for one in type(error).__mro__ if not one.__module__.startswith("celery_sidejob.store"))
    if isinstance(error, StoreUnavailableError):
        return problem(503, name, told, headers={"retry-after": str(AGAIN_S)})
    if isinstance(error, Overloaded):
        return problem(429, name, told, headers={"retry-after": str(max(1, round(error.retry_after)))}, pool=error.pool)
    if isinstance(error, DuplicateError):
        return problem(409, name, told, job=error.job_id, task_id=error.task_id)
    if isinstance(error, SideJobError):
        return problem(status_of(error), name, told)
    if isinstance(error, TypeError) and "(the running job is given by the worker)" in told:
        return problem(400, name, told)  # arguments that the task does not take
    logger.error("An operation of the HTTP API has failed", exc_info=error)
    return problem(500, "Something went wrong", "The log of this process says what.")


# -- a call that is sent again ---------------------------------------------------------------------------------------

LONGEST_KEY = 255
LONGEST_ANSWER = 1024 * 1024
"""The most bytes of an answer that is kept."""


def once(runtime: Runtime, token: str, request: Request, body: bytes, do: Callable[[], Response]) -> Response:
    """Answer a call by doing it, unless a call with its key was done by the same token within a day.

    The key is written in the transaction in which the call writes first. So a call that died before its commit is done
    when it is sent again. Of two at once, one waits for the other's transaction before it locks anything, and then
    finds the key. If a process dies between the commit and the answer, the key says that the call was done, and its
    answer is lost. A call that writes nothing here gets its key with its answer: until then a repeated one is done
    again.
    """
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
    key = request.headers.get("idempotency-key")
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


# -- OpenAPI ---------------------------------------------------------------------------------------------------------


def openapi(operations: tuple[Operation, ...], version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations, made from their code."""
    of_each = ((one.body, one.query, one.answer) for one in operations)
    kinds = list(dict.fromkeys(kind for kinds in of_each for kind in kinds if kind is not Nothing))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(
            operation, components, schema_of[operation.answer]
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "celery_sidejob", "version": version},
        "servers": [{"url": PREFIX}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {
                **components,
                "Problem": {
                    "type": "object",
                    "required": ["type", "title", "status", "detail"],
                    "properties": {
                        "type": {"type": "string"},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "detail": {"type": "string"},
                    },
                },
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, components: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in (part[1:-1] for part in operation.path.split("/") if part.startswith("{"))
    ]
    if operation.query is not Nothing:
        schema = components[operation.query.__name__]
        required = schema.get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": one}
            for name, one in schema["properties"].items()
        ]
    if operation.takes_key:
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}})
    found: dict[str, Any] = {
        "operationId": operation.do.__name__,
        "summary": (operation.do.__doc__ or "").strip().split("\n")[0],
        "x-scope": operation.scope,
        "parameters": parameters,
        "responses": {
            str(operation.status): {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            "default": {
                "description": "A problem document.",
                "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        },
    }
    if operation.body is not Nothing:
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return found
