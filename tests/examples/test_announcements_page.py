"""The example of `docs/announcements.md` runs as it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sidejob import RunningJob
from tests.examples.test_guides import blocks
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT


def test_the_example_keeps_the_log_and_follows_a_job(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where the example writes
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace(app=stage.app))
    shown, _ = blocks(ROOT / "docs" / "announcements.md", "python")
    assert shown.startswith("# follow.py")
    names: dict[str, Any] = {"__name__": "follow"}
    exec(compile(shown, "follow.py", "exec"), names)

    log = names["keep_log"].enqueue(aliases=["log"])
    stage.drain()

    def body(job: RunningJob) -> None:
        job.output("o").write(1)

    job = stage.job(body)
    with in_thread(lambda: names["follow"](job)):
        wait_until(lambda: "queued" in capsys.readouterr().out, message="the job's status to be printed")
        stage.drain()
    assert capsys.readouterr().out.split() == ["running", "completed"]
    (line,) = (tmp_path / "shop.log").read_text().splitlines()
    assert "'outport': 'o', 'data': [1]" in line
    assert log.refresh().status == "completed"
