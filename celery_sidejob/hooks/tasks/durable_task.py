"""A run of an ordinary durable task in its process: lock, body, result, end.

Celery's tracer does the work; this stands at its beginning (`before_start`), around the body (`__call__`), and, by the
signals of the task, at its end. The end comes after the result was stored and before a late acknowledgement.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import traceback as tracebacks
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from celery import Celery, signals, states
from celery.app.task import Context, Task
from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry, SoftTimeLimitExceeded
from kombu.exceptions import ContentDisallowed, DecodeError

from ...model.durable import (
    ADOPTED,
    DIGEST,
    HEADER,
    LATE,
    WORKER,
    Address,
    Content,
    Death,
    Digest,
    Key,
    Message,
    key_of,
)
from ...model.errors import LeaseLostError, SettingsError, StoreUnavailableError
from ...operations import burials, deferred_locks, durable_ends, durable_locks, revocation
from ...operations.contents import as_kept, is_forged
from ...operations.durable_runs import Run, in_body, lease_lost
from ...operations.runtime import Runtime
from .. import bodies
from ..apps import runtime_for
from ..broker.connection import PAUSE_S
from ..durability import is_durable, known_tasks, lost_policy
from ..messages.kept_message import content_of, unpacker
from ..on_commit import OnCommit, made_early
from ..patches import task_making
from ..patches.existing_class import become
from ..task_options import OF_ORDINARY_TASKS, check_durable, check_ordinary
from ..worker import own_process, recording
from ..worker.holders import bury, holders
from ..worker.received import OF_THE_PARENT, checked
from . import chords, missing_row_warning
from .not_begun import Copy, Forged, Left, SentBack

logger = logging.getLogger("celery_sidejob")

RUNS: dict[str, Run] = {}
"""The durable tasks that run in this process, by task id."""


class DurableTask(OnCommit):
    """A marker base of ordinary tasks whose messages are kept until they are done.

    The class that is built from it is (marker, the task's own class). `on_lost`: what becomes of a run whose worker
    died, ``"requeue"`` or ``"dead"``; by default the first only for tasks that are `acks_late` with
    `reject_on_worker_lost`, whose author so has called them repeatable. `max_losses`: runs that may be lost.
    `locks_late`: its first run begins before it is locked; only for what is to run again when it is lost.
    """

    abstract = True
    durable: bool | None = True
    on_lost: str | None = None
    max_losses: int | None = None
    locks_late: bool | None = None
    Request = "celery_sidejob.hooks.tasks.durable_request:DurableRequest"

    @property
    def lost_policy(self) -> str:
        """Whether a run whose worker died is repeated: ``requeue`` or ``dead``."""
        return lost_policy(self)

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Return what takes the task's messages in a worker's parent process; those that nobody can read are buried."""
        take = checked(super().start_strategy(app, consumer, **options))

        def take_or_bury(message: Any, *args: Any, **given: Any) -> Any:
            try:
                return take(message, *args, **given)
            except (InvalidTaskError, ContentDisallowed, DecodeError) as error:
                _bury_unread(app, message, error)
                raise  # Celery tells of it and drops the message

        return take_or_bury

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Lock the task's row; a copy of what runs or was finished goes no further than this."""
        request = self.request
        if not request.is_eager and not request.called_directly:
            try:
                _begin(self, request)
            except SoftTimeLimitExceeded:  # the limit is meant for the body
                if run_of(self) is not None:
                    raise
                _back(request, "its time limit struck while it waited for its lock")
        super().before_start(task_id, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        run = run_of(self)
        if run is None or run.body_is_over or run.in_body:
            with in_body(None):
                return super().__call__(*args, **kwargs)
        run.in_body = True
        try:
            with in_body(run):
                value = self._body(*args, **kwargs)
        except BaseException as error:
            if own_process.is_left(self.app, run.key, error, place=run.runtime.store.place):
                _lose(run, error)
            if isinstance(error, Exception) and not isinstance(error, Ignore | Reject | Retry):
                _check_that_it_counts(run, error)
            raise
        run.body_is_over = True
        if _is_awaited(self, run):
            _check_that_it_counts(run)
        return value

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        call = bodies.call_of(self, DurableTask)
        value = self.run(*args, **kwargs) if call is None else call(self, *args, **kwargs)
        return bodies.done(value, f"The body of {self.name}")


def mark(app: Celery) -> None:
    """Make a `DurableTask` of each task of the app that is durable, and was not made so before."""
    for task in list(known_tasks(app).values()):
        if isinstance(task, DurableTask) or is_durable(app, task.name):
            _mark(app, task)


def watch_tasks(app: Celery) -> None:
    """Have wrong options of all tasks refused, and tasks marked too that are made once the app is finalized.

    Modules that are imported late make such. What is raised when an app is finalized is raised again at each use of its
    tasks.
    """
    task_making.install(app, made=partial(_mark_if_final, app), completed=partial(_check_all, app))


def _check_all(app: Celery) -> None:
    for task in list(known_tasks(app).values()):
        _check(app, task)


def _mark_if_final(app: Celery, task: Any) -> Any:
    if app.finalized:
        _check(app, task)
        if is_durable(app, task.name):
            _mark(app, task)
        return task
    return made_early(task)


def _check(app: Celery, task: Any) -> None:
    if getattr(task, "sidejob", False):
        return
    check_ordinary(task, app.Task)
    durable = is_durable(app, task.name)
    if durable or getattr(task, "durable", None) is not None:
        check_durable(task)
    if durable and bodies.call_of(task, DurableTask) is None:
        body = getattr(task, "_orig_run", task.run)  # below what autoretry_for has put around it
        bodies.check(body, f"The body of {task.name}, which is durable,")


def _mark(app: Celery, task: Any) -> None:
    cls = type(task)
    if isinstance(task, DurableTask):
        if not isinstance(task, app.Task):  # made with base=DurableTask: the project's own class belongs below it
            become(task, cls, app.Task)
        return
    options = {name: getattr(task, name) for name in OF_ORDINARY_TASKS if hasattr(task, name)}
    # A custom Request of the task's own class would not be told what a row needs.
    if task.Request != Task.Request:
        raise SettingsError(f"{task.name} is durable and has a Request of its own ({task.Request}): use either.")
    become(task, DurableTask, cls, **options, abstract=True)


def install() -> None:
    """Listen to what Celery tells of a task's end; twice does no harm."""
    signals.task_success.connect(_succeeded, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_failure.connect(_failed, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_postrun.connect(_over, weak=False, dispatch_uid="celery_sidejob.durable")


def run_of(task: Any) -> Run | None:
    """Return the run that the task's present request is, if it has begun one; a header may have the same name."""
    found = getattr(getattr(task, "request", None), "sidejob_run", None)
    return found if isinstance(found, Run) else None


# -- the beginning ---------------------------------------------------------------------------------------------------


def _policy(task: DurableTask) -> dict[str, Any]:
    most = task.max_losses or _runtime(task).settings.max_losses
    return {"pid": os.getpid(), "on_lost": task.lost_policy, "max_losses": most}


def _begin(task: DurableTask, request: Context) -> None:  # noqa: PLR0912, PLR0915 - an arm for each kind of delivery
    runtime = _runtime(task)
    recording.begin(task.app)
    header = request.get(HEADER)
    key, address = key_of(request.id, header), Address.of(header)
    adopted = request.get(ADOPTED) if key is None else None
    if key is None and adopted is None:
        # Its row is in the store: it is sent again when it has not been heard of for a while.
        logger.warning("Task %s is left to newer workers: its message is of a newer format", request.id)
        raise Ignore(f"task {request.id}: its message is of a newer format")
    stores = _stores_or_leave(runtime, request, address, adopted=adopted is not None)
    content = _content(request)
    if key is not None:
        if own_process.is_revoked(task.app, request.id):
            _revoked(task, request, key, stores)
        if deferred_locks.is_here(stores[0][0], key):
            raise Copy(f"task {request.id}: a copy of what runs, or has just ended, in this process")
        if LATE in request.__dict__ and len(stores) == 1 and _begin_late(task, request, key, content, *stores[0]):
            return
    failure: StoreUnavailableError | None = None
    for there, worker_id in stores:
        run = Run(key or (request.id, 1), task.name, worker_id, there, content)
        try:
            with runtime.stores.trying(there.store):
                begun = _begin_in(task, request, run, address) if adopted is None else _adopt(task, run, adopted)
        except StoreUnavailableError as error:
            failure = error
            continue
        there.store.answered()
        if begun:
            _is_begun(task, request, run)
            return
    if failure is not None:
        _leave(runtime, request, str(failure))
    if address.store is None and adopted is None and len(stores) < len(runtime.stores):
        _leave(runtime, request, "its message does not say which store has its row, and one does not answer")
    if key is not None and _is_forged(key, content, [there for there, _ in stores]):
        raise Forged(f"task {request.id}: not what its row has")
    missing_row_warning.warn(task.name, request, [there for there, _ in stores])
    raise Copy(f"task {request.id}: a copy of what runs, was finished, or is in the dead set")


def _begin_late(
    task: DurableTask, request: Context, key: Key, content: Content, there: Runtime, worker_id: int
) -> bool:
    """Begin a run whose lock is written later; False where the run has to lock first."""
    run = Run(key, task.name, worker_id, there, content)
    try:
        begun = deferred_locks.of(there).begin(run, max_losses=_policy(task)["max_losses"])
        if begun:
            _is_begun(task, request, run)
    except BaseException:  # a time limit strikes
        if run_of(task) is None and run.late is not None:
            deferred_locks.of(there).drop(run)  # or the next delivery is taken for a copy of it
        raise
    return begun


def _begin_in(task: DurableTask, request: Context, run: Run, address: Address) -> bool:
    """Lock the row of a delivery in one store; False if it is a copy there, or forged."""
    run.content = as_kept(run.runtime, run.key, run.content)
    return durable_locks.begin(run.runtime, run, address, is_here=request.id in RUNS, **_policy(task))


def _adopt(task: DurableTask, run: Run, message: Message) -> bool:
    """Make a row, locked by this run, of a message whose publisher has made none; False for a copy."""
    run.content = message.content
    return durable_locks.adopt(run.runtime, run, message, **_policy(task))


def _content(request: Context) -> Content:
    """Return what the delivery runs; without a digest of the parent's it is no row's."""
    digest = request.get(DIGEST)
    known = str(digest) if isinstance(digest, Digest) else ""
    return Content(str(request.task), known, unpacker(request.get("compression")))


def _is_forged(key: Key, content: Content, stores: Sequence[Runtime]) -> bool:
    try:
        return any(is_forged(there, key, content) for there in stores)
    except StoreUnavailableError:
        return False  # it does not run in any case


def _is_begun(task: DurableTask, request: Context, run: Run) -> None:
    run.stopping = partial(own_process.is_to_stop, task.app, run.key, place=run.runtime.store.place)
    for ours in (HEADER, *OF_THE_PARENT):  # a body may give its headers to what it calls
        (request.headers or {}).pop(ours, None)
    if request.chord:
        chords.install(task.app, task.backend)
    request.sidejob_run = run  # the request's own: another delivery of this id may come and go in a thread
    RUNS[request.id] = run


def _stores_or_leave(
    runtime: Runtime, request: Context, address: Address, *, adopted: bool
) -> Sequence[tuple[Runtime, int]]:
    """Return the stores that may have the row, each with this worker's identity there; without any leave the task."""
    try:
        stores = _stores_of_row(runtime, request.get(WORKER), address, adopted=adopted)
    except StoreUnavailableError as error:
        _leave(runtime, request, str(error))
    if not stores:
        elsewhere = address.store is not None and request.get(WORKER) is not None
        why = "this worker is not known, or not just now, in the store that has its row"
        _leave(runtime, request, why, elsewhere=elsewhere)
    return stores


def _stores_of_row(runtime: Runtime, known: Any, address: Address, *, adopted: bool) -> Sequence[tuple[Runtime, int]]:
    """Return in which stores the row may be, each with this worker's identity there; those that answer, if several."""
    if known is None:
        return ()
    if not isinstance(known, Mapping):  # there is one store
        here = address.store is None or address.store == runtime.stores.name_of(runtime.store)
        return ((runtime, known),) if here else ()
    found = [
        (runtime.at(runtime.stores[place]), worker_id) for name, (place, worker_id) in known.items()
        if address.store in (None, name) or adopted
    ]  # fmt: skip
    if adopted:
        return [(there, worker_id) for there, worker_id in found if there.store.place == 0]
    return [(there, worker_id) for there, worker_id in found if not there.store.is_left_alone]


def _revoked(task: DurableTask, request: Context, key: Key, stores: Sequence[tuple[Runtime, int]]) -> NoReturn:
    """Have buried what was revoked while it waited for a thread, unless the worker does."""
    try:
        for there, _ in stores if not own_process.is_ended(task.app, key) else ():
            revocation.revoke(there, [key[0]])
    except StoreUnavailableError as unavailable:
        _leave(_runtime(task), request, str(unavailable))
    raise Ignore(f"task {request.id} was revoked")


def _leave(runtime: Runtime, request: Context, why: str, *, elsewhere: bool = False) -> NoReturn:
    """Do not begin a task whose row is in a store that does not answer.

    With one store the message goes back to the broker, to be there when the store answers again. With several it must
    not keep this worker from the tasks of the others: it is forgotten, and this worker has it sent again when the store
    is back. So is a task whose row is `elsewhere`, in a store that this worker does not know: its message would come
    again at once, and never begin.
    """
    if (elsewhere or runtime.stores.several) and request.get(HEADER) is not None:
        logger.warning("Task %s is left to the sweeper of its store: %s", request.id, why)
        raise Left(why)
    time.sleep(random.uniform(*PAUSE_S))  # else it would come and go without end
    _back(request, why)


def _back(request: Context, why: str) -> NoReturn:
    """Have the message given back to the broker; what was acknowledged already is found by the sweeper."""
    logger.warning("Task %s does not begin and goes back to the broker: %s", request.id, why)
    raise SentBack(why, requeue=True) from None


def _lose(run: Run, error: BaseException) -> NoReturn:
    """Count a run as lost whose body has left, by `sys.exit()` for one, while its process goes on."""
    logger.error("The run of task %s is lost: its body raised %r", run.key[0], error)
    run.is_lost = True
    with suppress(StoreUnavailableError):  # otherwise the worker finds what it holds and does not run
        if durable_locks.has_lock(run.runtime, run):
            durable_locks.give_back(run.runtime, [run.key[0]], worker_id=run.worker_id, loss=True)
    raise Ignore(f"task {run.key[0]}: its body left") from None


def _bury_unread(app: Celery, message: Any, error: Exception) -> None:
    """Bury a message that cannot be read here: it would come again for ever. Its result is a failure."""
    headers = message.headers or {}
    header = headers.get(HEADER)
    key, found = key_of(str(headers.get("id")), header), holders(app, header)
    if key is None or not found:
        return
    try:
        if not headers.get("ignore_result"):
            app.backend.mark_as_failure(key[0], error, request=Context({**headers, **message.properties}))
    except Exception as trouble:
        logger.warning("The end of %s could not be stored: %s", key[0], trouble)
    bury(found, key, Death("failed", _shown(error, "")), address=Address.of(header), content=content_of(message))


# -- the end ---------------------------------------------------------------------------------------------------------


def _is_awaited(task: Any, run: Run) -> bool:
    """Tell whether its end is acted upon: by tasks that follow it, or by a caller that waits for its result.

    A result alone is told before a lock that is written late.
    """
    request = task.request
    if request.callbacks or request.chain or request.chord:
        return True
    if run.late is not None and not deferred_locks.of(run.runtime).is_written(run):
        return False
    return run.runtime.results.wanted(task.name, {"ignore_result": request.ignore_result})


def _check_that_it_counts(run: Run, error: Exception | None = None) -> None:
    """Let nobody hear of a run whose row was taken from it: backends keep the first success that they are told of."""
    ended_well = error is None
    if run.moved:
        return
    try:
        counts = durable_ends.counts(run.runtime, run, ended_well=ended_well)
    except SoftTimeLimitExceeded:  # it is meant for the body, and strikes once
        counts = durable_ends.counts(run.runtime, run, ended_well=ended_well)
    if not counts:
        run.is_lost = True
        logger.warning("%s%s", lease_lost(run), "" if ended_well else f" It raised {error!r}.")
        raise Ignore(f"task {run.key[0]} was taken from this run") from None


def _succeeded(sender: Any = None, **_: Any) -> None:
    run = run_of(sender)
    if run is not None:
        run.result_is_stored = True


def _failed(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    run = run_of(sender)
    if run is not None:
        run.traceback = str(einfo.traceback) if einfo is not None else None


def _over(sender: Any = None, retval: Any = None, state: str | None = None, **_: Any) -> None:
    run = run_of(sender)
    if run is None:
        _end_without_lock(sender, state, retval)
        return
    try:
        try:
            _end(sender, run, state, retval)
        except SoftTimeLimitExceeded:  # it is meant for the body, and strikes once
            run.end_is_unknown = True
            _end(sender, run, state, retval)
    except LeaseLostError as error:
        logger.warning("%s", error)
    except StoreUnavailableError as error:
        # The row stays held. If this process does not end it later, as it tries to for a success, it is found by the
        # worker, which does not run it any more: as if it had been lost.
        logger.error("The end of task %s could not be written: %s", run.key[0], error)
    finally:
        if RUNS.get(run.key[0]) is run:  # the next try may have begun in another thread
            del RUNS[run.key[0]]
        if run.late is not None:
            deferred_locks.of(run.runtime).drop(run)


def _end(task: Any, run: Run, state: str | None, retval: Any) -> None:
    runtime, request = run.runtime, task.request
    if run.moved or run.is_lost or state is None or _is_cut_off(run, state):
        return  # it goes on as another message; or this process is about to end, and the worker sees to it
    if state == states.IGNORED or (state == states.SUCCESS and run.result_is_stored):
        if run.late is not None and state == states.SUCCESS and not run.follows and not request.chord:
            deferred_locks.of(runtime).end(run)
            return
        if state == states.SUCCESS:
            chords.wait_for_body(run, task.backend, request, retval)
        durable_ends.end(runtime, run)
        return
    durable_locks.have_lock(runtime, run)
    if state == states.REJECTED and getattr(retval, "requeue", False):
        durable_locks.put_back(runtime, run)
    else:
        error = retval if isinstance(retval, BaseException) else None
        death = Death("failed", _shown(error, state), run.traceback or _trace(error), request.retries or 0)
        burials.fail(
            runtime, run.key, death, by="run", worker_id=run.worker_id, patient=not run.has_waited,
            unknown=run.end_is_unknown,
        )  # fmt: skip


def _is_cut_off(run: Run, state: str) -> bool:
    """Whether the process was told to stop while the result of a body that had ended well was being stored.

    Celery calls its receivers on the way out, and of what it raises just then tells them nothing.
    """
    leaving = sys.exc_info()[1]
    ended_well = state == states.SUCCESS and not run.result_is_stored
    return ended_well and leaving is not None and not isinstance(leaving, Exception)


def _end_without_lock(task: Any, state: str | None, retval: Any) -> None:
    """End the row of a task that is durable for its publisher and not for this worker, which so has not locked it.

    Left alone the row would be published again, and the task run, for ever.
    """
    request, app = task.request, task.app
    header = request.get(HEADER)
    if header is None or isinstance(task, DurableTask) or getattr(app, "sidejob", None) is None:
        return
    key = key_of(request.id, header)
    if key is None or state not in states.READY_STATES | {states.IGNORED}:
        return
    if task.name not in _unequal:
        _unequal.add(task.name)
        logger.warning(
            "%s is durable for who called it, and not in this worker: it runs without a lock. Say durable=True where "
            "the task is made, or name it in sidejob_durable_tasks here too.", task.name,
        )  # fmt: skip
    runtime, address, content = _runtime(task), Address.of(header), _content(request)
    try:
        for store in runtime.stores if address.store is None else [runtime.stores.named(address.store)]:
            there = runtime.at(store)
            if state == states.FAILURE:
                death = Death("failed", _shown(retval, states.FAILURE), _trace(retval), request.retries or 0)
                ended = burials.fail(there, key, death, by="sweeper", worker_id=None, content=content)
            else:
                ended = burials.forget(there, key, content)
            if not ended:
                is_forged(there, key, content)
    except (StoreUnavailableError, SettingsError) as error:
        logger.warning("The end of task %s could not be written; it will run once more: %s", key[0], error)


_unequal: set[str] = set()
"""Tasks already warned about: durable for the publisher, not for this worker."""


def _shown(error: BaseException | None, state: str) -> str:
    if error is None:
        return f"ResultNotStored: the body ended as {state}, and its result could not be stored"
    return f"{type(error).__name__}: {bodies.text_of(error)}"


def _trace(error: BaseException | None) -> str | None:
    return None if error is None else "".join(tracebacks.format_exception(error))


def _runtime(task: Any) -> Runtime:
    return runtime_for(task.app, f"{task.name} is durable")
