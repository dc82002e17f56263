"""The board in `examples/grafana_board.json` asks for what there is; where Prometheus is installed, it finds it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from celery_sidejob import RunningJob
from celery_sidejob.embedded.server import free_port
from celery_sidejob.operations.runs import recovery
from celery_sidejob.prometheus import SideJobCollector, exposition
from celery_sidejob.store import measured
from celery_sidejob.store.measured import MeasuredConnections
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

EXAMPLES = Path(__file__).parent.parent / "examples"
BOARD = json.loads((EXAMPLES / "grafana_board.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
WINDOW = "20s"
QUEUE = "mail"


def fails(job: RunningJob) -> None:
    raise ValueError("no")


def retries(job: RunningJob) -> None:
    if job.run_no == 1:
        raise job.retry(countdown=0)
    job.set(tried=2)
    job.checkpoint()


class Store:
    """A store with at least one of everything that the board shows, whose totals grow with each `work`."""

    def __init__(self, stage: Stage) -> None:
        assert isinstance(stage.runtime.connections, MeasuredConnections)
        self.stage, self.connections = stage, stage.runtime.connections
        stage.sidejob.queue(QUEUE).configure(limit=3)
        self.work()
        late = stage.job(queue=QUEUE)
        stage.job(countdown=60)
        stage.runtime.connections.write_behind_now()
        stage.sql("UPDATE messages SET due_at = now() - interval '9 s', published_at = NULL WHERE job_id = %s", late.id)
        stage.sql("UPDATE timers SET due_at = now() - interval '7 s'")

    def work(self) -> None:
        """Have runs complete, fail, be tried again and be lost."""
        stage = self.stage
        stage.run(stage.job(queue=QUEUE))
        with pytest.raises(ValueError, match="no"):
            stage.run(stage.job(fails, queue=QUEUE))
        retried = stage.job(retries, queue=QUEUE)
        stage.run(retried)
        stage.run(retried)
        lost, worker = stage.job(queue=QUEUE), stage.new_worker()
        hold = stage.claim(lost, worker_id=worker)
        assert hold is not None
        stage.declare_dead(worker)
        assert recovery.rescue(stage.runtime, lost.id, run_no=hold.run_no, worker_id=worker)
        stage.run(lost)
        self.connections.transact(
            "count", lambda executor: measured.add_totals(executor, {("tasks_buried", "failed"): 1})
        )
        self.connections.record()


@pytest.fixture
def store(stage: Stage) -> Iterator[Store]:
    assert isinstance(stage.runtime.connections, MeasuredConnections)
    measures = stage.runtime.connections.measures
    measures.take()
    measures.begin()
    yield Store(stage)
    measures.end()
    measures.take()


def labels_of(store: Store) -> dict[str, set[str]]:
    """The labels of each series that is exposed, by its name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition(store.stage.sidejob)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_expression_asks_for_series_and_labels_that_there_are(store: Store) -> None:
    there = labels_of(store)
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            asked = re.findall(r"(sidejob_\w+)(?:\{([^}]*)\})?", expression)
            assert asked, expression
            assert {name for name, _ in asked} <= there.keys(), expression
            for name, matchers in asked:
                assert set(re.findall(r"(\w+)=", matchers)) <= there[name], expression
                for by in re.findall(r"by \(([^)]*)\)", expression):
                    assert set(by.split(", ")) <= there[name], expression
            kept = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, expression


def test_every_variable_is_of_a_label_that_there_is(store: Store) -> None:
    there = labels_of(store)
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert label == name
            assert label in there[metric]
    used = set(re.findall(r"\$(?:{)?([a-z]+)", json.dumps(BOARD["panels"])))
    assert used == VARIABLES.keys()


def test_panels_have_names_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    assert all(panel["description"] for panel in PANELS)


def test_the_board_shows_all_that_its_page_names() -> None:
    """Totals, tasks, times, queues, the dead set, workers and schedules; times as quantiles and as heatmaps."""
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for name in (
        "task_run_seconds", "task_wait_seconds", "task_failures_total", "task_retries_total", "task_losses_total",
        "queue_depth", "queue_running", "dead_entries", "dead_group_entries", "workers", "made_by_schedules_total",
    ):  # fmt: skip
        assert any(f"sidejob_{name}" in expression for expression in expressions), name
    assert sum(panel["type"] == "heatmap" for panel in PANELS) == 2


class Prometheus:
    """A Prometheus on the loopback address that scrapes one endpoint, and reads the example's alarms."""

    def __init__(self, program: str, directory: Path, processes: Processes, endpoint: int) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(EXAMPLES / "prometheus_alerts.yml")],
            "scrape_configs": [{"job_name": "sidejob", "static_configs": [{"targets": [f"127.0.0.1:{endpoint}"]}]}],
        }
        file, port = directory / "prometheus.yml", free_port()
        file.write_text(yaml.safe_dump(config))
        processes.start(
            [program, f"--config.file={file}", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address=127.0.0.1:{port}"], name="prometheus",
        )  # fmt: skip
        self._address = f"http://127.0.0.1:{port}"

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now, and return its series; none as long as the server does not answer."""
        try:
            with urlopen(f"{self._address}/api/v1/query?{urlencode({'query': expression})}", timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return []

    def rules(self) -> list[dict[str, Any]]:
        """The alarms, as the server has evaluated them."""
        with urlopen(f"{self._address}/api/v1/rules", timeout=10) as answer:
            return [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]


def as_shown(expression: str) -> str:
    """What Grafana asks with all queues and all tasks chosen."""
    for variable, text in (("$__rate_interval", WINDOW), ("$__range", WINDOW), ("$queue", ".*"), ("$task", ".*")):
        expression = expression.replace(variable, text)
    return expression


def test_prometheus_finds_data_for_every_expression(store: Store, tmp_path: Path, processes: Processes) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT LOOKED AT: there is no `prometheus` on the path (Debian: apt install prometheus)")
    registry = CollectorRegistry()
    registry.register(SideJobCollector(store.stage.sidejob))
    server, _ = start_http_server(0, "127.0.0.1", registry)
    try:
        prometheus = Prometheus(program, tmp_path, processes, server.server_port)

        def runs() -> float:
            return sum(float(row["value"][1]) for row in prometheus.ask("sidejob_task_run_seconds_count"))

        before = wait_until(runs, timeout=30, message="the first scrape")
        store.work()
        wait_until(lambda: runs() > before, timeout=30, message="a scrape of what has run since")
        for panel in PANELS:
            for target in panel["targets"]:
                found = prometheus.ask(as_shown(target["expr"]))
                assert found, f"{panel['title']}: no data for {target['expr']}"
                assert not any(row["value"][1] == "NaN" for row in found), f"{panel['title']}: {found}"
        wait_until(
            lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"},
            timeout=30,
            message="all alarms to be sound",
        )
    finally:
        server.shutdown()
        server.server_close()
