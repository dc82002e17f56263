"""The web page of an app, for people: `asgi_app`, `wsgi_app` and `django_urls` serve it, as does `sidejob web`.

The running side never imports this folder. It needs the extra `web`.
"""

from __future__ import annotations

try:
    import itsdangerous as itsdangerous
    import jinja2 as jinja2
    import msgspec as msgspec
    import starlette as starlette
except ImportError as error:
    from ..model.errors import MissingLibraryError

    raise MissingLibraryError(
        f"The web page needs the library {error.name}: install celery-sidejob[web].", name=error.name
    ) from error

from .app import asgi_app, django_urls, wsgi_app

__all__ = ["asgi_app", "django_urls", "wsgi_app"]
