"""Becomes another program, which ends with its owner and may run under another account.

A server runs it as a script: ``trampoline.py OWNER_PID SIGNAL UID GID PROGRAM ARGUMENT…``. A UID of -1 keeps
our own account. It is a script and not a ``preexec_fn``, because Python code between fork and exec can deadlock if the
owner has threads. It runs without site-packages and imports nothing of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(owner: int, orphan_signal: int, uid: int, gid: int, command: list[str]) -> None:
    """Replace this process with the command; returns only if the owner has died already."""
    if uid != -1:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # After the change of account, which clears it; the exec below keeps it.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, orphan_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) is refused")
        if os.getppid() != owner:
            return  # The owner died before the line above: no signal will come, so the program must not start.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # our owner had them blocked while it started us
    os.execv(command[0], command)


if __name__ == "__main__":
    owner, orphan_signal, uid, gid = map(int, sys.argv[1:5])
    main(owner, orphan_signal, uid, gid, sys.argv[5:])
