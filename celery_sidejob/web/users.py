"""The people who may use the web page (roles, passwords, the limit of failed logins, sessions), and programs' tokens.

A signed cookie says who has logged in, and each form has a token that only the page itself can know.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.requests import Request
from starlette.responses import Response

from ..model.checks import check_texts
from ..model.errors import InvalidValueError
from ..operations.runtime import Runtime
from ..store import web_tokens

FAILURES = 5
"""How many logins may fail for one name, or from one address. From the last on, others are refused for `PENALTY_S`."""
PENALTY_S = 60.0
REMEMBERED = 10_000
"""The most names and addresses whose failures are remembered; beyond that the oldest are forgotten."""
SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""The cost of a password's hash: 16 MB and about 40 ms for each try, as OWASP advises."""
COOKIE = "sidejob_web"
LASTS_S = 12 * 3600
"""How long a session lasts: a working day."""


class Role(IntEnum):
    """What a user may do; a role includes those below it."""

    READ = 1
    OPERATE = 2


@dataclass(frozen=True, slots=True)
class User:
    """A person who has logged in."""

    name: str
    role: Role


def hashed(password: str, role: Role) -> str:
    """Return the value for a user in `sidejob_web_users`: the role, and the password's salted hash."""
    salt = secrets.token_hex(16)
    return f"{role.name.lower()}:scrypt:{salt}:{_hash(password, salt)}"


class Users:
    """The users of `sidejob_web_users`, and the failed logins of this process."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._nobody = hashed(secrets.token_urlsafe(), Role.READ)

    def find(self, name: str, mark: str) -> User | None:
        """Return the user of a session, unless the user is gone or has another password or role since."""
        given = self._users.get(name)
        return _user(name, given) if given is not None and hmac.compare_digest(self.mark_of(name), mark) else None

    def mark_of(self, name: str) -> str:
        """Return what a session keeps of the user's entry: it changes with the password and the role."""
        return hashlib.sha256(self._users[name].encode()).hexdigest()[:16]

    def admit(self, name: str, address: str) -> float:
        """Return 0 if a password may be tried for this name, from this address; else for how many seconds none may.

        The try counts as failed until `log_in` knows better: of many at once no more are admitted.
        """
        keys, now = _keys(name, address), time.monotonic()
        with self._lock:
            found = {key: self._failures.get(key, (0, now)) for key in keys}
            wait_s = max(began + PENALTY_S - now if count >= FAILURES else 0.0 for count, began in found.values())
            if wait_s > 0:
                return wait_s
            for key, (count, began) in found.items():
                self._failures.pop(key, None)
                count = count + 1 if now - began < PENALTY_S else 1
                self._failures[key] = (count, now if count in (1, FAILURES) else began)
            while len(self._failures) > REMEMBERED:
                self._failures.popitem(last=False)
        return 0.0

    def log_in(self, name: str, password: str, address: str) -> User | None:
        """Return the user if the password is right. An unknown name takes as long as a known one."""
        given = self._users.get(name)
        _, _, salt, kept = (given or self._nobody).split(":")
        if not hmac.compare_digest(_hash(password, salt), kept) or given is None:
            return None
        with self._lock:
            for key in _keys(name, address):
                count, began = self._failures.get(key, (1, 0.0))
                self._failures[key] = (max(0, count - 1), began)  # other tries may have begun a new minute
        return _user(name, given)


def _keys(name: str, address: str) -> tuple[str, str]:
    return f"name {name}", f"address {address}"


def _user(name: str, given: str) -> User:
    return User(name, Role[given.partition(":")[0].upper()])


def _hash(password: str, salt: str) -> str:
    return hashlib.scrypt(password.encode("utf-8", "surrogatepass"), salt=bytes.fromhex(salt), dklen=32, **SCRYPT).hex()


# -- sessions ----------------------------------------------------------------------------------------------------------


class Sessions:
    """Signs and reads the cookies of sessions."""

    def __init__(self, secret: str | None, users: Users) -> None:
        self._secret = secret or secrets.token_hex(32)
        """Without `sidejob_web_secret` sessions end with this process, and no other process knows them."""
        self._users = users
        self._signer = URLSafeTimedSerializer(self._secret, salt="celery_sidejob.web session")

    def user_of(self, request: Request) -> User | None:
        """Return who has logged in; None for a cookie that is missing, forged or too old, or of a user who is gone."""
        kept = self._read(request)
        return None if kept is None else self._users.find(kept["name"], kept["mark"])

    def begin(self, request: Request, response: Response, user: User) -> None:
        """Set the cookie of a new session. `Secure` always: browsers accept that from loopback without TLS too."""
        kept = {"name": user.name, "mark": self._users.mark_of(user.name), "key": secrets.token_hex(8)}
        response.set_cookie(value=self._signer.dumps(kept), max_age=LASTS_S, **_cookie(request))

    def end(self, request: Request, response: Response) -> None:
        """Remove the cookie."""
        response.delete_cookie(**_cookie(request))

    def token_of(self, request: Request, user: User) -> str:
        """Return the token that the forms of this session have."""
        kept = self._read(request) or {}
        signed = f"form {user.name} {kept.get('key')}"
        return hmac.digest(self._secret.encode(), signed.encode(), "sha256").hex()

    def is_from_our_form(self, request: Request, user: User, token: str) -> bool:
        """Tell whether a request comes from a form of this session."""
        return is_from_here(request) and hmac.compare_digest(self.token_of(request, user).encode(), token.encode())

    def _read(self, request: Request) -> dict[str, str] | None:
        try:
            kept: dict[str, str] = self._signer.loads(request.cookies.get(COOKIE, ""), max_age=LASTS_S)
        except BadData:
            return None
        return kept


def is_from_here(request: Request) -> bool:
    """Tell whether a browser says that a page of this site sends the request; programs say nothing, and may."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return False
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def _cookie(request: Request) -> dict[str, Any]:
    path = request.scope.get("root_path") or "/"
    return {"key": COOKIE, "path": path, "secure": True, "httponly": True, "samesite": "lax"}


# -- tokens of the HTTP API --------------------------------------------------------------------------------------------

SCOPES = ("read", "write", "operate")
"""`read` reads; `write` makes jobs, packets and state; `operate` does what an operator does on the page."""
PREFIX = "sjt_"


@dataclass(frozen=True, slots=True)
class Token:
    """A program that may use the API. The token itself is 256 random bits, shown once; the store keeps its hash."""

    name: str
    scopes: frozenset[str]
    hash: str


def make_token(runtime: Runtime, name: str, scopes: Iterable[str]) -> str:
    """Make a token, and return it; it cannot be read again."""
    check_texts(name=name)
    wanted = [scope for scope in SCOPES if scope in set(scopes)]
    if not name or not wanted:
        raise InvalidValueError("A token has a name, and at least one scope.")
    token = PREFIX + secrets.token_urlsafe(32)
    made = runtime.connections.transact(
        "token", lambda executor: web_tokens.add(executor, name, hash_=_digest(token), scopes=wanted)
    )
    if not made:
        raise InvalidValueError(f"There is a token {name!r} already: revoke it first, or give this one another name.")
    return token


def find_token(runtime: Runtime, token: str) -> Token | None:
    """Return the name and the scopes of a token; None if it was never made, or was revoked."""
    if not token.startswith(PREFIX):
        return None
    row = web_tokens.find(runtime.connections, hash_ := _digest(token))
    return None if row is None else Token(row.name, frozenset(row.scopes), hash_)


def all_tokens(runtime: Runtime) -> list[dict[str, Any]]:
    """Return the names, scopes and ages of all tokens."""
    return [row._asdict() for row in web_tokens.list_all(runtime.connections)]


def revoke_token(runtime: Runtime, name: str) -> bool:
    """Revoke a token at once; returns whether there was one."""
    return runtime.connections.transact("token", lambda executor: web_tokens.revoke(executor, name))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
