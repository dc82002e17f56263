"""`docs/monitoring.md` has every metric and every check, and the example's alarms ask for metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from celery_sidejob.examination import Diagnosis
from celery_sidejob.hooks import task_options
from celery_sidejob.hooks.broker import broker_check
from celery_sidejob.prometheus import exposition
from tests.tools.in_process import Stage
from tests.tools.versions import KOMBU_5_7

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ALARMS = (ROOT / "examples" / "prometheus_alerts.yml").read_text()


def metrics(stage: Stage) -> set[str]:
    """The names of all metrics, as one asks for them."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(exposition(stage.sidejob))
    }


def test_the_page_has_every_metric_and_no_other(stage: Stage) -> None:
    assert set(re.findall(r"^\| `(sidejob_\w+)", PAGE, re.MULTILINE)) == metrics(stage)


def test_the_alarms_ask_for_metrics_that_there_are(stage: Stage) -> None:
    asked = set(re.findall(r"sidejob_[a-z_]+", ALARMS))

    assert {name.removesuffix("_bucket") for name in asked} <= metrics(stage)
    assert len(asked) > 10


@KOMBU_5_7
def test_the_page_has_every_check_and_no_other(stage: Stage, redis_url: str) -> None:
    stage.app.conf.broker_url = redis_url.replace("redis:", "sidejob:", 1)
    found = [
        *Diagnosis(stage.runtime, stage.sidejob.owner).findings(),
        *broker_check.findings(stage.app),
        *task_options.findings(stage.app),
    ]
    table = PAGE.partition("## What `doctor` looks at")[2].partition("## Logs")[0]

    documented = set(re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)) - {"check"}
    elsewhere = {"rabbitmq", "references", "event loop"}  # of brokers that this one is not, and of workers
    assert documented == {one.check for one in found} | elsewhere
