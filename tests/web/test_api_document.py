"""The HTTP API keeps what its OpenAPI document says: schemathesis makes calls from it, for a real server."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from celery_sidejob import CapacityPool
from celery_sidejob.web.users import SCOPES, make_token
from tests.tools.in_process import Stage

CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance, checks.response_headers_conformance, checks.negative_data_rejection,
    checks.unsupported_method,
]  # fmt: skip
CALLS = 6
"""How many calls are made of each operation."""


def send_mail(to: str) -> None:
    pass


def fail(job: Any) -> None:
    raise ValueError("no such order")


def steps(job: Any) -> None:
    job.step("charge", lambda: 42)
    job.suspend()


@pytest.fixture
def known(stage: Stage) -> Mapping[str, Mapping[str, str]]:
    """Parameters of paths that lead to something, by the beginning of the path; there is a row of each kind."""
    parent = stage.job(steps, aliases=["a"], tags=["b"], inports=["orders"], state={"colour": "red"}, unique="key")
    stage.run(parent)
    parent.input("orders").write_many([{"page": 1}, None])
    stage.job(parent=parent, child_name="child", countdown=3600, depends_on=[parent])
    failed = stage.job(fail)
    with pytest.raises(ValueError, match="no such order"):
        stage.run(failed)
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    task = send.apply_async(("ann",), countdown=3600)
    stage.sidejob.queue("mail").configure(limit=3, rate="600/m")
    CapacityPool("printers", 4).apply_async(stage.idle)
    stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    (entry,) = stage.sidejob.dead.list()
    return {
        "/jobs": {"id": str(parent.id), "direction": "in", "name": "orders"}, "/tasks": {"id": str(task.id)},
        "/dead": {"id": str(entry.id)}, "/queues": {"name": "mail"}, "/pools": {"name": "printers"},
        "/schedules": {"name": "nightly"},
    }  # fmt: skip


@pytest.fixture
def document(stage: Stage, address: str) -> Any:
    """The document, as the server gives it to a program that may do everything."""
    token = make_token(stage.runtime, "tester", SCOPES)
    headers = {"authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(f"{address}/api/v1/openapi.json", headers=headers)
    schema.config.update(headers=headers)
    return schema


def test_each_operation_does_as_described(document: Any, known: Mapping[str, Mapping[str, str]]) -> None:
    """Those that delete come last: the others find what they name."""
    operations = [found.ok() for found in document.get_all_operations()]
    broken = {}
    for operation in sorted(operations, key=lambda one: (one.method == "delete", "terminate" in one.path, one.path)):
        for mode in _modes(operation):
            try:
                _call(operation, mode, known.get("/" + operation.path.split("/")[1], {}))
            except (Exception, FailureGroup) as error:
                broken[operation.label, mode.value] = error
    assert not broken, "\n\n".join(f"{name}: {_told(error)}" for name, error in broken.items())


def _modes(operation: Any) -> list[GenerationMode]:
    """In its path and headers any text is right: what takes nothing else cannot be given it wrongly."""
    takes = bool(operation.query or operation.body)
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if takes else [])]


def _call(operation: Any, mode: GenerationMode, known: Mapping[str, str]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=CALLS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def calls(case: schemathesis.Case) -> None:
        if mode == GenerationMode.POSITIVE:
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        case.call_and_validate(checks=CHECKS, timeout=30)

    calls()


def _told(error: BaseException) -> str:
    return "\n".join(map(str, error.exceptions)) if isinstance(error, FailureGroup) else str(error)
