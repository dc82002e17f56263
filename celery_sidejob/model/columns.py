"""The columns of `jobs` that are given when a job is made. Each is declared here, and in no other list.

The declarations provide the columns of the INSERT, the columns that handles and runs read (`store/jobs.py`), the keys
of `Job.info`, and the options of `enqueue` that go straight into a column. The migrations add the column itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from .checks import check_label


@dataclass(frozen=True, slots=True)
class Column:
    """One of these columns."""

    name: str
    sql: str
    """Its SQL type. JSON is text in Python; `Job.info` decodes it and applies `sidejob_redact`."""
    shown: str | None
    """Its key in `Job.info`. Handles and runs do not read a column without one."""
    check: Callable[[str, Any], Any] | None
    """Makes the column an option of `enqueue` with the same name: returns the row's value, or refuses a wrong value."""

    @property
    def is_json(self) -> bool:
        """Whether its values are JSON."""
        return self.sql == "json"


def _column(sql: str, *, shown: str | None = None, check: Callable[[str, Any], Any] | None = None) -> dict[str, Any]:
    return {"sql": sql, "shown": shown, "check": check}


@dataclass(frozen=True, kw_only=True)
class JobColumns:
    """The values of these columns in a new job's row."""

    task: str = field(metadata=_column("text", shown="task"))
    queue: str = field(metadata=_column("text", shown="queue"))
    priority: int | None = field(default=None, metadata=_column("smallint", shown="priority"))
    args: str = field(default="[]", metadata=_column("json", shown="args"))
    kwargs: str = field(default="{}", metadata=_column("json", shown="kwargs"))
    parent_id: int | None = field(default=None, metadata=_column("bigint", shown="parent"))
    name: str | None = field(default=None, metadata=_column("text", shown="child_name"))
    created_by: str | None = field(default=None, metadata=_column("text", shown="created_by", check=check_label))
    schedule: str | None = field(default=None, metadata=_column("text", shown="schedule"))
    schedule_no: int | None = field(default=None, metadata=_column("bigint", shown="schedule_number"))
    nominal_at: str | None = field(default=None, metadata=_column("timestamptz", shown="nominal_time"))
    """As text: JSON has no times."""
    max_losses: int | None = field(default=None, metadata=_column("int"))
    retention_s: float | None = field(default=None, metadata=_column("double precision"))
    retention_keep: int | None = field(default=None, metadata=_column("bigint"))
    rate_interval_s: float | None = field(default=None, metadata=_column("double precision"))
    rate_burst: int | None = field(default=None, metadata=_column("int"))
    rate_terminates: bool | None = field(default=None, metadata=_column("boolean"))
    limit_key: str | None = field(default=None, metadata=_column("text", shown="limit_key", check=check_label))
    pool: str | None = field(default=None, metadata=_column("text", shown="pool"))
    pool_weight: int | None = field(default=None, metadata=_column("smallint"))
    pool_runs: bool | None = field(default=None, metadata=_column("boolean"))
    blocked: bool | None = field(default=None, metadata=_column("boolean"))


COLUMNS = tuple(Column(each.name, **each.metadata) for each in fields(JobColumns))
SHOWN = {column.shown: column for column in COLUMNS if column.shown is not None}
"""The columns by their keys in `Job.info`."""
OPTIONS = {column.name: column.check for column in COLUMNS if column.check is not None}
"""The options of `enqueue` that go into a column as they are given, each with its check."""
