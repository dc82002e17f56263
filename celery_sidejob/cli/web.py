"""`web`: serves the web page, and makes entries for its users."""

from __future__ import annotations

import ipaddress
import logging
import secrets
from typing import Any

import click

from .command import Failed, commands, load_modules, output_of, sidejob_of
from .output import Output, table_if_any

ADMIN = "admin"
"""The user of a page on loopback for which no users are set."""


@commands.group(invoke_without_command=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address on which it listens.")
@click.option("--port", default=8555, show_default=True, type=click.IntRange(0, 65535), help="The port.")
@click.pass_context
def web(context: click.Context, host: str, port: int) -> None:
    """Serve a web page for people: jobs, queues, workers, the dead set. It needs the extra 'web'.

    Who may log in is set in sidejob_web_users. Without it the page has one user and a password that is printed here and
    ends with this process, and listens on this machine only.
    """
    if context.invoked_subcommand is None:
        output = output_of(context)
        with sidejob_of(context.obj.app) as sidejob:
            _serve(sidejob, output, host, port)


@web.command("user", has_json=False)
@click.argument("name")
@click.option("--role", type=click.Choice(["read", "operate"]), default="read", show_default=True)
@click.password_option()
def make_user(sidejob: Any, output: Output, name: str, role: str, password: str) -> None:
    """Print an entry for sidejob_web_users: a name with its role and its password's hash."""
    from ..web.users import Role, hashed  # imported here: its libraries come with an extra

    entry = hashed(password, Role[role.upper()])
    output.answer({name: entry}, f"{name!r}: {entry!r}")


@web.group()
def token() -> None:
    """Make, list and revoke tokens, by which programs use the HTTP API."""


@token.command()
@click.argument("name")
@click.option("--scope", "scopes", type=click.Choice(["read", "write", "operate"]), multiple=True, required=True)
def add(sidejob: Any, output: Output, name: str, scopes: tuple[str, ...]) -> None:
    """Make a token, and print it; it cannot be shown again."""
    from ..web.users import make_token  # imported here: its libraries come with an extra

    made = make_token(sidejob.runtime, name, scopes)
    output.answer({"name": name, "token": made}, made)


@token.command("list")
def list_tokens(sidejob: Any, output: Output) -> None:
    """List the tokens: names, scopes and ages, never the tokens themselves."""
    from ..web.users import all_tokens

    found = all_tokens(sidejob.runtime)
    rows = [(one["name"], ", ".join(one["scopes"]), one["created_at"]) for one in found]
    output.answer(found, table_if_any("Token", "Scopes", "Made", rows=rows) or "There is no token.")


@token.command()
@click.argument("name")
def revoke(sidejob: Any, output: Output, name: str) -> None:
    """Revoke a token, at once."""
    from ..web.users import revoke_token

    if not revoke_token(sidejob.runtime, name):
        raise Failed(f"There is no token {name!r}.")
    output.answer({"name": name, "revoked": True}, f"Token {name} is revoked.")


def _serve(sidejob: Any, output: Output, host: str, port: int) -> None:
    from ..web.server import serve  # imported here: its libraries come with an extra

    load_modules(sidejob)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("celery_sidejob").setLevel(logging.INFO)  # it says who does what
    if not sidejob.settings.web_users and not _is_loopback(host):
        raise Failed(
            f"Anyone who reaches {host} could try to log in, and sidejob_web_users is not set: set it (`celery -A "
            "<app> sidejob web user NAME` makes an entry), or listen on 127.0.0.1."
        )
    password = None if sidejob.settings.web_users else secrets.token_urlsafe(12)
    if password is not None:
        output.note(f"sidejob_web_users is not set. Until this process ends, log in as {ADMIN} with {password}")
    serve(sidejob, host, port, users=None if password is None else {ADMIN: password}, said=output.note)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
