"""The account for a server that refuses to run as root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        """Tell by the mode bits whether this account may enter the directory and everything above it.

        An access control list may say otherwise. Then binaries are copied needlessly, or the server's log names the
        path that it could not reach.
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
    """Return the account that runs a server if we are root; None if we are not root."""
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
    """Make the account the owner of a new path."""
    if account is None:
        return
    try:
        os.chown(path, account.uid, account.gid)
    except OSError as error:  # in a user namespace, root may have no other users
        raise ServerError(f"We are root, but cannot hand {path} to user {account.name}: {error.strerror}") from error


def temporary_path(account: Account | None = None, *, longest: int | None = None) -> Path:
    """Return the path for a new directory in which we may write and which the account can reach.

    Its length is at most ``longest`` bytes.
    """
    name = f"sidejob-{secrets.token_hex(8)}"  # unguessable, so that no other user makes it first
    for parent in _temporary_directories():
        path = parent / name
        is_short = longest is None or len(os.fsencode(path)) <= longest
        if is_short and os.access(parent, os.W_OK | os.X_OK) and (account is None or account.can_enter(parent)):
            return path
    who = "us" if account is None else f"us and user {account.name}"
    raise ServerError(f"No temporary directory has a short path and lets {who} in; set TMPDIR to one that does.")


def _temporary_directories() -> Iterator[Path]:
    """Yield the directories for temporary files, the user's choice first.

    `tempfile` would write a file to try a directory, and a process that is killed just then leaves the file behind.
    """
    chosen = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    yield from (Path(path).absolute() for path in (*chosen, "/tmp", "/var/tmp") if path)


def copy_for_everyone(source: Path, target: Path) -> None:
    """Copy a tree of programs so that every account can run them; the originals stay as they are."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a", "doc", "man"))
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            runnable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runnable else 0o644)
