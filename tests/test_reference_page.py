"""`docs/reference.md` has every public call, with the parameters and defaults that it really has, and nothing else."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from celery.utils.dispatch import Signal

import celery_sidejob
from celery_sidejob.hooks import task_options
from celery_sidejob.jobs import drafts
from celery_sidejob.model.columns import OPTIONS

PAGE = (Path(__file__).parent.parent / "docs" / "reference.md").read_text()
FOR_OURSELVES = {
    "check_store", "durable_globs", "heartbeat", "heartbeats", "register_tasks", "reread_settings", "runtime",
}  # fmt: skip
"""What the package's own layers use of `SideJob`."""
CLASSES = (
    "SideJob", "Job", "RunningJob", "Port", "DeadSet", "DeadEntry", "Packet", "PollReport", "Subscription", "Timer",
    "CapacityPool", "SlotHolder", "Queue", "QueueCounts", "Schedule", "HistoryEntry", "WorkerInfo", "Statistics",
    "Durations", "Step",
)  # fmt: skip


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference.md has no section {heading!r}"
    return found.group(1)


def rows(heading: str) -> list[str]:
    """What the first cells of a section's tables show as code: each call, attribute or option."""
    cells = re.findall(r"^\| (.*?) \|", section(heading), re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def members(cls: Any) -> dict[str, Any]:
    """The public attributes that a class itself defines."""
    if is_dataclass(cls):
        return {field.name: None for field in fields(cls)} | _defined(cls)
    return _defined(cls)


def _defined(cls: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(cls).items() if not name.startswith("_") and name != "aio"}
    return {name: found[name] for name in found.keys() - (FOR_OURSELVES if cls is celery_sidejob.SideJob else set())}


def test_each_handle_whose_verbs_can_be_awaited_is_named() -> None:
    named = {name for name in (*CLASSES, "Batch") if hasattr(getattr(celery_sidejob, name), "aio")}
    assert set(re.findall(r"`(\w+)`", section("`aio`").split("\n\n")[0])) == named


def shown(name: str, member: Any) -> str:
    """How the page shows it: an attribute by its name, a call with its parameters."""
    member = member.__func__ if isinstance(member, staticmethod) else member
    return f"{name}({parameters(member)})" if inspect.isfunction(member) else name


def parameters(function: Any) -> str:
    """A function's parameters with their defaults."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_Shown.of(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(bare))[1:-1]


class _Shown:
    """A default whose text would be different from run to run, or would not be what a reader writes."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, default: Any) -> Any:
        if inspect.isclass(default) and default is not inspect.Parameter.empty:
            return cls(default.__name__)
        return cls("FINISHED") if default is celery_sidejob.FINISHED else default

    def __repr__(self) -> str:
        return self._text


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_shown_as_it_is(name: str) -> None:
    cls = getattr(celery_sidejob, name)
    assert sorted(rows(f"`{name}`")) == sorted(shown(member, value) for member, value in members(cls).items())


def test_the_options_of_a_new_job() -> None:
    options = inspect.signature(drafts.draft).parameters.values()
    taken = {f"{each.name}={each.default!r}" for each in options if each.kind is each.KEYWORD_ONLY}
    taken |= {f"{name}=None" for name in OPTIONS} | {"transaction=None", "unique=None", 'on_duplicate="return"'}
    assert set(rows("Options of a new job")) == taken - {"executor=None"}


def test_the_options_of_tasks() -> None:
    supported = task_options.OWN_OPTIONS - {"durable"}
    assert {row.partition("=")[0] for row in rows("Options of a sidejob task")} == supported
    for name in supported & vars(celery_sidejob.SideJobTask).keys():
        default = getattr(celery_sidejob.SideJobTask, name)
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        assert f"{name}={shown}" in rows("Options of a sidejob task")
    durable = {name for name in vars(celery_sidejob.DurableTask) if name in task_options.OF_ORDINARY_TASKS}
    assert {row.partition("=")[0] for row in rows("Options of a durable task")} == durable


def test_the_signals() -> None:
    public = {name for name in celery_sidejob.__all__ if isinstance(getattr(celery_sidejob, name), Signal)}
    assert set(rows("Signals")) == {
        f"{name}({', '.join(sorted(getattr(celery_sidejob, name).providing_args))})" for name in public
    }


def test_the_functions() -> None:
    public = {name: getattr(celery_sidejob, name) for name in celery_sidejob.__all__}
    functions = {shown(name, each) for name, each in public.items() if inspect.isfunction(each)}
    assert functions <= set(rows("Functions and values"))


def test_the_errors() -> None:
    (listed,) = re.findall(r"^The errors, all of them `SideJobError`s (.*?): \[when", PAGE, re.MULTILINE | re.DOTALL)
    public = {name: getattr(celery_sidejob, name) for name in celery_sidejob.__all__}
    errors = {name for name, each in public.items() if inspect.isclass(each) and issubclass(each, Exception)}
    assert set(re.findall(r"`(\w+)`", listed)) - {"OperationalError"} == errors - {"SideJobError"}


def test_every_public_name_is_there() -> None:
    code = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))
    assert set(celery_sidejob.__all__) <= code
