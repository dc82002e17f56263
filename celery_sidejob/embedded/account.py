"""The account for a server that refuses to run as root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .janitor import uninterrupted
from .processes import ServerError

OVERFLOW_ID = 65534
"""The uid and gid that Linux reserves for nobody, even without an account of that name."""


@dataclass(frozen=True)
class Account:
    """An existing account of the system; none is ever created."""

    name: str
    uid: int
    gid: int

    def can_enter(self, directory: Path) -> bool:
        """Tells whether this account may pass through the directory and everything above it, by the mode bits alone.

        An access list may say otherwise. Then binaries are copied that need not be, or the server's own log tells
        what it could not reach.
        """
        resolved = directory.resolve()
        return all(self._may_pass(step.stat()) for step in (resolved, *resolved.parents))

    def _may_pass(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)


def unprivileged_account() -> Account | None:
    """Returns the account that stands in for root, or None when we are not root and need no other."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    return Account(str(OVERFLOW_ID), OVERFLOW_ID, OVERFLOW_ID)


def own(path: Path, account: Account | None) -> None:
    """Makes the account the owner of a new path."""
    if account is None:
        return
    try:
        os.chown(path, account.uid, account.gid)
    except OSError as error:  # root of a user namespace without other users
        raise ServerError(f"We are root, but cannot hand {path} to user {account.name}: {error.strerror}") from error


def temporary_path(account: Account | None, *, longest: int | None = None) -> Path:
    """Returns a path for a new directory that the account can reach, in a temporary directory where we may make it.

    ``longest`` bounds its length, in bytes.
    """
    name = f"sidejob-{secrets.token_hex(8)}"  # not to be guessed, so that nobody has made it when we do
    for parent in _temporary_directories():
        path = parent / name
        if longest is not None and len(os.fsencode(path)) > longest:
            continue
        if os.access(parent, os.W_OK | os.X_OK) and (account is None or account.can_enter(parent)):
            return path
    who = "us" if account is None else f"us and user {account.name}"
    raise ServerError(f"No temporary directory has a short path and lets {who} in; set TMPDIR to one that does.")


def default_temporary_directory() -> Path:
    """Returns Python's own choice; raises FileNotFoundError if it finds no directory where one can write.

    Python tries each by writing a file there, and leaves the file behind when it is interrupted just then.
    """
    with uninterrupted():
        return Path(tempfile.gettempdir())


def _temporary_directories() -> Iterator[Path]:
    with suppress(FileNotFoundError):  # no directory where one can write
        yield default_temporary_directory()
    yield from (Path("/tmp"), Path("/var/tmp"))


def copy_for_everyone(source: Path, target: Path) -> None:
    """Copies a tree of programs so that every account can run them; the originals do not change."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a", "doc", "man"))
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            runnable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runnable else 0o644)
