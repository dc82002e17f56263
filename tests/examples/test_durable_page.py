"""The first lines of `docs/durable.md` are run as they are written: the task survives a `kill -9` in its middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.examples.test_guides import blocks
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import ROOT, Processes, environment

PAGE = ROOT / "docs" / "durable.md"


@KOMBU_5_7
def test_the_task_survives(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    module = blocks(PAGE, "python")[0]
    assert module.startswith("# mail.py\n")
    (tmp_path / "mail.py").write_text(module.replace("///mail", f"//{empty_database_url.partition('://')[2]}"))
    shown = [line.partition("  #")[0].rstrip() for line in blocks(PAGE, "")[0].splitlines()]
    _, upgrade, worker, call, _, kill, again = shown
    assert worker.removesuffix(" &") == again == "celery -A mail worker"
    assert kill.startswith("kill -9 ")

    def type_in(command: str) -> None:
        subprocess.run(
            command, shell=True, check=True, cwd=tmp_path, timeout=60,
            env={**environment({}), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        )  # fmt: skip

    type_in(upgrade)
    killed = processes.start_worker("mail", env={}, cwd=tmp_path, concurrency=1)
    type_in(call)
    killed.wait_for_log("Task mail.send_mail", timeout=30)
    killed.kill()
    second = processes.start_worker("mail", env={}, cwd=tmp_path, concurrency=1)
    second.wait_for_log("(mail.send_mail) comes back from a worker that is gone", timeout=30)
    second.wait_for_log("sent to ada@example.com", timeout=30)
    assert "sent to" not in killed.log()
