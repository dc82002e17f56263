"""Sessions: a signed cookie says who has logged in, and each form has a token that only the page itself can know."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.requests import Request
from starlette.responses import Response

from .users import User, Users

COOKIE = "sidejob_web"
LASTS_S = 12 * 3600
"""How long a session lasts: a working day."""


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
        response.set_cookie(
            COOKIE,
            self._signer.dumps(kept),
            max_age=LASTS_S,
            path=_path(request),
            secure=True,
            httponly=True,
            samesite="lax",
        )

    def end(self, request: Request, response: Response) -> None:
        """Remove the cookie."""
        response.delete_cookie(COOKIE, path=_path(request), secure=True, httponly=True, samesite="lax")

    def token_of(self, request: Request, user: User) -> str:
        """Return the token that the forms of this session have."""
        kept = self._read(request) or {}
        return hmac.new(
            self._secret.encode(), f"form {user.name} {kept.get('key')}".encode(), hashlib.sha256
        ).hexdigest()

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


def _path(request: Request) -> str:
    return request.scope.get("root_path") or "/"
