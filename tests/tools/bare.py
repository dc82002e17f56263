"""A bare system: a root file system as an installer leaves it, in which a test types what the pages show.

`./run bare` prepares the root file system, and SIDEJOB_TEST_ROOT names it. It is never written to: each test has an
overlay, processes, mounts and a network of its own. The kernel removes them when the first process in there ends, and
that one ends with the test, even after `kill -9`. Two things differ from a machine of that system. Nothing starts
services, since the first process is no systemd; `apt` is followed by what systemd would do. And a question of apt or
sudo is answered beforehand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT

VARIABLE = "SIDEJOB_TEST_ROOT"
PROGRAMS = ("unshare", "nsenter", "slirp4netns")
USER = "dev"
HOME = f"/home/{USER}"
COMMAND_S = 600
"""For a line such as `sudo apt install …` or `pip install …`, which fetches things."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# Standard input is a pipe of the test's: `cat` ends with the test. The shell stays, and reaps orphans as an init does.
_PREPARE = """
set -eu
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
cd "$2/root"
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t devpts devpts dev/pts
hostname bare
chroot . useradd --create-home --shell /bin/bash "$3"
mv clone "home/$3/celery_sidejob"
chroot . chown -R "$3:" "/home/$3"
touch prepared
cat
exit
"""

# What systemd does after `apt install`. Each is known by its init script, and one that runs already is left alone.
_START_SERVICES = """
for service in postgresql redis-server; do
    if [ -x /etc/init.d/$service ]; then /etc/init.d/$service status >/dev/null || /etc/init.d/$service start; fi
done
"""


class Terminal:
    """A login shell of the bare system's user, in which lines are typed one after the other."""

    def __init__(self, bare: BareSystem, name: str) -> None:
        self.name = name
        self._bare = bare
        self._typed = 0
        self._log = (bare.directory / f"{name}.log").open("ab")
        self._shell = subprocess.Popen(
            [*bare.enter, "su", "--login", USER], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )
        self.run("export PYTHONUNBUFFERED=1")  # what is written to a terminal is seen at once

    def run(self, text: str, timeout: float = COMMAND_S) -> str:
        """Type these lines; each must succeed. Returns what they wrote."""
        begin = len(self.log())
        for line in text.splitlines():
            if line.split("#")[0].strip():
                self._finish(line, timeout)
                if " apt install " in line:
                    self._bare.as_root(_START_SERVICES)
        return self.log()[begin:]

    def start(self, line: str, until: str, timeout: float = 180.0) -> None:
        """Type a line that does not end, such as a worker's, and wait for a text of its output."""
        script = self._script(line)
        begin = len(self.log())
        self._send(script)
        try:
            wait_until(lambda: until in self.log()[begin:], timeout=timeout, message=f"{until!r} of: {line}")
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{self.log()}") from None

    def log(self) -> str:
        """Return all that was written in this terminal."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        """Close the shell; what runs in it ends with the system."""
        with self._shell, self._log:
            self._shell.kill()

    def _finish(self, line: str, timeout: float) -> None:
        script = self._script(line)
        done = self._bare.path(f"{script}.done")
        self._send(f"{script}; echo $? >{script}.part; mv {script}.part {script}.done")
        try:
            wait_until(lambda: done.exists() or self._shell.poll() is not None, timeout=timeout, message=line)
        except TimeoutError:
            raise TimeoutError(f"{line}\n{self.log()}") from None
        code = done.read_text().strip() if done.exists() else "the shell has ended"
        assert code == "0", f"{self.name}: {code} of: {line}\n{self.log()}"

    def _script(self, line: str) -> str:
        """Write a line into a file that the shell reads as if it was typed, and return the command for that."""
        self._typed += 1
        script = f"/tmp/{self.name}-{self._typed}"
        self._bare.path(script).write_text(f"{line}\n")
        self._log.write(f"$ {line}\n".encode())
        self._log.flush()
        return script

    def _send(self, command: str) -> None:
        script, _, rest = command.partition(";")
        assert self._shell.stdin is not None
        self._shell.stdin.write(f". {script} </dev/null{';' if rest else ''}{rest}\n".encode())
        self._shell.stdin.flush()


class BareSystem:
    """A running copy of the root file system, with a clone of this repository in the home of its user."""

    def __init__(self, directory: Path, pid: int) -> None:
        self.directory = directory
        self.enter = (
            *("nsenter", "--target", str(pid), "--mount", "--pid", "--net", "--uts"),
            *("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "chroot", str(directory / "root")),
        )
        self._root = Path(f"/proc/{pid}/root{directory}/root")
        self._terminals: list[Terminal] = []

    def terminal(self, name: str) -> Terminal:
        """Open a terminal."""
        self._terminals.append(Terminal(self, name))
        return self._terminals[-1]

    def path(self, name: str) -> Path:
        """Return where a file of the bare system lies for this process."""
        return self._root / name.lstrip("/")

    def write(self, name: str, text: str) -> None:
        """Write a file in the user's home, as with an editor."""
        self.path(f"{HOME}/{name}").write_text(text)

    def as_root(self, script: str) -> None:
        """Run a shell script as the system's root."""
        with (self.directory / "root.log").open("ab") as log:
            subprocess.run([*self.enter, "sh", "-c", script], check=True, stdout=log, stderr=log, timeout=COMMAND_S)

    def close(self) -> None:
        """Close the terminals."""
        for terminal in self._terminals:
            terminal.close()


def needed() -> Path:
    """Return the prepared root file system; skips the test where there is none, or nothing may be mounted."""
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"there is no bare system: {VARIABLE} names no root file system; ./run bare prepares one")
    if os.geteuid() != 0:
        pytest.skip(f"only root may enter the bare system that {VARIABLE} names")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"the bare system that {VARIABLE} names needs {' and '.join(missing)}")
    return Path(root)


@contextmanager
def bare_system(root: Path) -> Iterator[BareSystem]:
    """Have a bare system within the block. Its files lie beside the root file system until the block ends."""
    directory = Path(tempfile.mkdtemp(prefix="bare-", dir=root.parent))
    try:
        with _running(root, directory) as bare:
            yield bare
    finally:
        shutil.rmtree(directory)


@contextmanager
def _running(root: Path, directory: Path) -> Iterator[BareSystem]:
    for name in ("upper", "work", "root"):
        (directory / name).mkdir()
    (directory / "upper").chmod(0o755)
    _copy_clone(directory / "upper/clone")
    _write_settings(directory / "upper/etc")
    with (directory / "system.log").open("ab") as log, ExitStack() as stack:
        first = stack.enter_context(
            _held(
                ["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--kill-child", "sh", "-c", _PREPARE, "sh",
                 str(root), str(directory), USER],
                log,
            )
        )  # fmt: skip
        pid = wait_until(lambda: _child(first.pid), timeout=10, message="the first process of the bare system")
        slirp = ["slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", "--exit-fd=0"]
        stack.enter_context(_held([*slirp, str(pid), "tap0"], log))
        bare = BareSystem(directory, pid)
        stack.callback(bare.close)
        wait_until(lambda: bare.path("prepared").exists() or first.poll() is not None, timeout=30, message="the mounts")
        assert first.poll() is None, (directory / "system.log").read_text()
        yield bare


@contextmanager
def _held(command: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process within the block that ends when its standard input does, so also with the test's process."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as process:
        yield process


def _child(pid: int) -> int | None:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else None


def _copy_clone(target: Path) -> None:
    """Copy what a clone of this tree holds, as it is here now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def _write_settings(etc: Path) -> None:
    """Answer the questions of apt and sudo, and let names be resolved and packages be found as they are here."""
    for name, text in {
        "hosts": "127.0.0.1 localhost bare\n",
        "resolv.conf": Path("/etc/resolv.conf").read_text(),
        "apt/apt.conf.d/99yes": 'APT::Get::Assume-Yes "true";\n',
        f"sudoers.d/{USER}": f"{USER} ALL=(ALL) NOPASSWD: ALL\n",
        "pip.conf": "\n".join(["[global]", *_pip_settings(etc)]),
    }.items():
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text(text)


def _pip_settings(etc: Path) -> Iterator[str]:
    for key in ("index-url", "proxy"):
        found = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", f"global.{key}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if found.returncode == 0:
            yield f"{key} = {found.stdout.strip()}"
    if CERTIFICATES.exists():  # an index may have a certificate that only this machine knows
        etc.mkdir(parents=True, exist_ok=True)
        shutil.copy(CERTIFICATES, etc / "certificates-of-the-tests.crt")
        yield "cert = /etc/certificates-of-the-tests.crt"
