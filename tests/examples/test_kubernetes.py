"""The manifests of `examples/kubernetes`: they fit together, and what they start works, without a cluster."""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.examples.shops import DjangoShop
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT, Process, Processes, environment

MANIFESTS = ROOT / "examples" / "kubernetes"
RUN = "/run/shop"
SOFT_S = 2
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def documents() -> list[dict[str, Any]]:
    """Every object of every file."""
    return [found for file in sorted(MANIFESTS.glob("*.yaml")) for found in yaml.safe_load_all(file.read_text())]


def one(kind: str, name: str) -> dict[str, Any]:
    """The object of this kind and name."""
    (found,) = [found for found in documents() if (found["kind"], found["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> Iterator[dict[str, Any]]:
    """The specification of every pod."""
    for found in documents():
        if "template" in found.get("spec", {}):
            yield found["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


# -- they fit together ------------------------------------------------------------------------------------------------


def test_what_is_selected_is_there() -> None:
    labels = [found["spec"]["template"]["metadata"]["labels"] for found in documents() if found["kind"] == "Deployment"]
    for found in documents():
        spec = found.get("spec", {})
        if found["kind"] == "Service":
            assert spec["selector"] in labels
        elif found["kind"] == "ScaledObject":
            assert one("Deployment", spec["scaleTargetRef"]["name"])
        elif found["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert spec["selector"]["matchLabels"] in labels
    assert len(labels) == len({str(label) for label in labels})


def test_what_is_referred_to_is_there() -> None:
    names = {(found["kind"], found["metadata"]["name"]) for found in documents()}
    for pod in pods():
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in containers(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for source in container["envFrom"]:
                ((kind, reference),) = source.items()
                assert ({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"]) in names


def test_a_worker_gives_its_runs_back_before_it_is_killed() -> None:
    pod = one("Deployment", "shop-worker")["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert {"name": "REMAP_SIGTERM", "value": "SIGQUIT"} in worker["env"]
    soft_s = float(one("ConfigMap", "shop")["data"]["SOFT_SHUTDOWN_S"])
    assert soft_s + 20 <= pod["terminationGracePeriodSeconds"]


def test_the_schemas_of_kubernetes_know_all_fields() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, which is 100 MB")
    for found in documents():
        if found["apiVersion"].endswith("keda.sh/v1alpha1"):
            continue
        validator.validate(found, "1.31", strict=True)


# -- what they start works --------------------------------------------------------------------------------------------


class Cluster:
    """Runs containers as processes: their commands, their environment and their probes, with directories moved."""

    def __init__(self, shop: DjangoShop, directory: Path) -> None:
        self.shop = shop
        self._directory = directory
        self._run = directory / "run"
        self._run.mkdir()

    def run(self, container: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a container to its end."""
        return subprocess.run(
            [*self.shop.python(*self.command(container))], cwd=self.shop.directory,
            env=environment(self.env(container)), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def start(self, container: dict[str, Any]) -> Process:
        """Start a container."""
        return self.shop.start(*self.command(container), name=container["name"], **self.env(container))

    def passes(self, probe: dict[str, Any]) -> bool:
        """Ask a probe."""
        command = [self._moved(word) for word in probe["exec"]["command"]]
        return subprocess.run(command, check=False, timeout=probe["timeoutSeconds"]).returncode == 0

    def command(self, container: dict[str, Any]) -> list[str]:
        user = urlsplit(self.shop.database_url).username or getpass.getuser()  # the one who is sure to be there
        moved = {"0.0.0.0:8000": "127.0.0.1:0", "db grants shop_app)": f"db grants {user})"}
        words = [self._moved(word) for word in container["command"]]
        for there, here in moved.items():
            words = [word.replace(there, here) for word in words]
        return words

    def env(self, container: dict[str, Any]) -> dict[str, str]:
        """What the manifests give, where it does not name servers that are not here."""
        given: dict[str, str] = {}
        for source in container["envFrom"]:
            ((kind, reference),) = source.items()
            found = one({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"])
            given.update(found.get("data") or found["stringData"])
        given.update({item["name"]: self._moved(item["value"]) for item in container.get("env", ())})
        return {**given, **self.shop.env, "SOFT_SHUTDOWN_S": str(SOFT_S), "ALLOWED_HOSTS": "127.0.0.1"}

    def _moved(self, word: str) -> str:
        return word.replace(RUN, str(self._run))


@pytest.fixture
def cluster(tmp_path: Path, processes: Processes, empty_database_url: str, redis_url: str) -> Cluster:
    shop = DjangoShop("django_shop", tmp_path, processes, empty_database_url, redis_url)
    return Cluster(shop, tmp_path)


@pytest.mark.few(0)
def test_a_rollout_and_a_stop(cluster: Cluster) -> None:
    shop = cluster.shop
    pod = one("Deployment", "shop-worker")["spec"]["template"]["spec"]
    (schema,), (worker,) = pod["initContainers"], pod["containers"]
    (web,) = one("Deployment", "shop-web")["spec"]["template"]["spec"]["containers"]

    assert "db upgrade" in cluster.run(schema).stderr
    for container in containers(one("Job", "shop-migrate")["spec"]["template"]["spec"]):
        done = cluster.run(container)
        assert done.returncode == 0, done.stderr
    assert cluster.run(schema).returncode == 0

    assert not cluster.passes(worker["startupProbe"])
    first = cluster.start(worker)
    wait_until(lambda: cluster.passes(worker["startupProbe"]), timeout=60, message="the worker to be up")
    assert all(cluster.passes(worker[probe]) for probe in PROBES)
    shop.stock(cup=10, kettle=10)
    shop.served_by(cluster.start(web))
    order = shop.place(cup=1)
    shop.wait_for([order], "completed")

    with shop.locked("kettle") as awaited:  # a run that does not end by itself
        stuck = shop.place(cup=1, kettle=1)
        wait_until(awaited, timeout=30, message="the job to wait for the kettle")
        first.terminate()
        first.wait(SOFT_S + 30)
        assert shop.sql("SELECT status, losses, run_no FROM sidejob.jobs WHERE worker_id IS NULL AND losses > 0") == []
        assert not any(cluster.passes(worker[probe]) for probe in PROBES)
    assert shop.order(stuck)["job"] == "queued"
    cluster.start(worker)
    shop.wait_for([stuck], "completed")
    shop.judge([order, stuck])
    assert shop.sql("SELECT sum(losses)::int FROM sidejob.jobs") == [(0,)]


def test_beat_starts(cluster: Cluster) -> None:
    (beat,) = one("Deployment", "shop-beat")["spec"]["template"]["spec"]["containers"]
    cluster.start(beat).wait_for_log("beat: Starting...", 60)


@pytest.mark.few(0)
def test_workers_are_scaled_by_what_is_there(cluster: Cluster) -> None:
    shop = cluster.shop
    shop.run("manage", "migrate")
    shop.celery("sidejob", "db", "upgrade")
    shop.run("manage", "shell", "-c", "from orders.tasks import confirm; confirm.delay(1); confirm.delay(2)")
    (metrics,) = one("Deployment", "shop-metrics")["spec"]["template"]["spec"]["containers"]
    shop.served_by(cluster.start({**metrics, "command": [*metrics["command"][:-1], "0"]}))
    samples = dict(re.findall(r"^(\S+) ([\d.]+)$", shop.text("/metrics"), re.MULTILINE))

    (trigger,) = one("ScaledObject", "shop-worker")["spec"]["triggers"]
    (summed,) = re.findall(r"^sum\((.*)\)$", trigger["metadata"]["query"])
    assert sum(float(samples[sample]) for sample in summed.split(" + ")) == 2
    (worker,) = one("Deployment", "shop-worker")["spec"]["template"]["spec"]["containers"]
    assert f"--concurrency={trigger['metadata']['threshold']}" in worker["command"]


def test_images_name_no_registry() -> None:
    for pod in pods():
        for container in containers(pod):
            assert re.fullmatch(r"shop:\d+\.\d+", container["image"])
