"""Celery for work that must not be lost and may take months."""

from . import transport  # noqa: F401  # makes the broker URLs sidejob:// and sidejobs:// known
from .deadset import DeadEntry, DeadSet
from .extension import SideJob
from .hooks.decorators import sidejob_task
from .hooks.durable_task import DurableTask
from .hooks.logs import JSONFormatter, RunFilter
from .hooks.revocation import TaskRevokedError
from .hooks.signals import job_status_changed, task_buried, task_lost, task_recovered
from .hooks.task import SideJobTask
from .job import Job
from .model.errors import (
    AliasTakenError,
    ChildNameTakenError,
    CycleError,
    HasParentError,
    IllegalMoveError,
    InvalidAliasError,
    InvalidChannelError,
    InvalidPortError,
    InvalidValueError,
    JobNotFoundError,
    LeaseLostError,
    NotAChildError,
    PortNotFoundError,
    SchemaError,
    SettingsError,
    SideJobError,
    StoreUnavailableError,
    UnknownTaskError,
)
from .model.port import NO_DATA
from .model.status import FINISHED, Status
from .port import Packet, Port
from .running import RunningJob, Suspend, current_job, heartbeat, stopping
from .services.sweeper import PollReport

__all__ = [
    "FINISHED",
    "NO_DATA",
    "AliasTakenError",
    "ChildNameTakenError",
    "CycleError",
    "DeadEntry",
    "DeadSet",
    "DurableTask",
    "HasParentError",
    "IllegalMoveError",
    "InvalidAliasError",
    "InvalidChannelError",
    "InvalidPortError",
    "InvalidValueError",
    "JSONFormatter",
    "Job",
    "JobNotFoundError",
    "LeaseLostError",
    "NotAChildError",
    "Packet",
    "PollReport",
    "Port",
    "PortNotFoundError",
    "RunFilter",
    "RunningJob",
    "SchemaError",
    "SettingsError",
    "SideJob",
    "SideJobError",
    "SideJobTask",
    "Status",
    "StoreUnavailableError",
    "Suspend",
    "TaskRevokedError",
    "UnknownTaskError",
    "current_job",
    "heartbeat",
    "job_status_changed",
    "sidejob_task",
    "stopping",
    "task_buried",
    "task_lost",
    "task_recovered",
]
