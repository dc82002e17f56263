"""Canvas, results, retries and eager mode: jobs at every place where Celery has tasks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from celery_sidejob import Job, SideJob, Status
from tests.acceptance.shared_site import Place, SharedSite
from tests.tools.recorder import Record
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8

TIMEOUT_S = 15.0
PLAIN, JOB = "canvas.plain", "canvas.job"
ADDS = {PLAIN: 1, JOB: 10}


class Site(SharedSite):
    """A store, a broker and one worker for all these tests, and a client that knows the tasks."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "canvas")
        for name in (JOB, "canvas.broken", "canvas.patient"):
            self.sidejob.task(_unused, name=name, inports=["go"] if name == "canvas.patient" else [])

    def sig(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(task, args=args, **options)

    def enqueue(self, task: str, *args: Any, **options: Any) -> Job:
        return self.sidejob.enqueue(f"canvas.{task}", args, **options)

    def noted(self, event: str, *args: str) -> list[dict[str, Any]]:
        return self.record.wait_for(event, args=list(args), timeout=TIMEOUT_S)


def _unused(job: Any, *args: Any, **kwargs: Any) -> None:
    """The client knows names, ports and options; bodies are the worker's."""


@pytest.fixture(scope="module")
def site(shared_place: Place, worker_pool: str) -> Iterator[Site]:
    made = Site(shared_place)
    pool = "threads" if worker_pool == "prefork" else worker_pool
    shared_place.processes.start_worker("tests.acceptance.canvas", env=made.env, pool=pool, concurrency=2)
    yield made
    made.close()


# -- canvas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(JOB, PLAIN, JOB), (PLAIN, JOB, PLAIN), (JOB, JOB, JOB)])
def test_chains(site: Site, names: tuple[str, ...]) -> None:
    result = chain(site.sig(names[0], 0), *(site.sig(name) for name in names[1:])).apply_async()
    assert result.get(timeout=TIMEOUT_S) == sum(ADDS[name] for name in names)
    assert result.parent.get(timeout=TIMEOUT_S) == sum(ADDS[name] for name in names[:2])
    assert result.parent.parent.get(timeout=TIMEOUT_S) == ADDS[names[0]]


def test_groups(site: Site) -> None:
    result = group(site.sig(JOB, 0), site.sig(PLAIN, 0), site.sig(JOB, 1)).apply_async()
    assert result.get(timeout=TIMEOUT_S) == [10, 1, 11]
    assert result.successful()


@pytest.mark.parametrize("body", [PLAIN, JOB])
@pytest.mark.parametrize("parts", [(JOB, JOB), (JOB, PLAIN, JOB)])
def test_chords(site: Site, parts: tuple[str, ...], body: str) -> None:
    result = chord([site.sig(part, 0) for part in parts], site.sig(body)).apply_async()
    assert result.get(timeout=TIMEOUT_S) == sum(ADDS[part] for part in parts) + ADDS[body]


def test_a_canvas_inside_another(site: Site) -> None:
    canvas = chain(
        site.sig(JOB, 0),
        group(chain(site.sig(PLAIN), site.sig(JOB)), site.sig(JOB)),
        site.sig(JOB),
        site.sig(PLAIN),
    )
    assert canvas.apply_async().get(timeout=TIMEOUT_S) == (10 + 1 + 10) + (10 + 10) + 10 + 1


def test_a_chord_waits_for_a_suspended_part(site: Site) -> None:
    result = chord([site.sig("canvas.patient", 1), site.sig(JOB, 0)], site.sig(JOB)).apply_async()
    task_id = result.parent.results[0].id
    site.record.wait_for("patient", task_id=task_id, timeout=TIMEOUT_S)
    job = site.sidejob.for_task_id(task_id)
    assert job is not None
    job.wait(Status.SUSPENDED, timeout=TIMEOUT_S)
    assert not result.ready()
    job.input("go").write(100)
    assert result.get(timeout=TIMEOUT_S) == 101 + 10 + 10


def test_links(site: Site) -> None:
    value = uuid.uuid4().int % 10**9
    job = site.enqueue("job", value, link=[site.sig("canvas.noted"), site.sig(JOB, link=site.sig("canvas.noted"))])
    job.wait(timeout=TIMEOUT_S)
    assert len(site.noted("noted", str(value + 10))) == 1
    assert len(site.noted("noted", str(value + 20))) == 1


def test_a_plain_task_with_a_job_as_its_link(site: Site) -> None:
    value = uuid.uuid4().int % 10**9
    site.sig(PLAIN, value).apply_async(link=site.sig(JOB, link=site.sig("canvas.noted")))
    site.noted("noted", str(value + 11))


def test_error_links_of_jobs(site: Site) -> None:
    mark = str(uuid.uuid4())
    result = site.sig("canvas.broken").apply_async(link_error=site.sig("canvas.errback", mark, immutable=True))
    with pytest.raises(Exception, match="job"):
        result.get(timeout=TIMEOUT_S)
    assert len(site.noted("errback", mark)) == 1
    assert result.job.refresh().status == Status.FAILED


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("task", ["canvas.broken", "canvas.fail"])
def test_a_chain_that_breaks(site: Site, place: int, task: str) -> None:
    mark = str(uuid.uuid4())
    names = [JOB, JOB, JOB]
    names[place] = task
    made = chain(site.sig(names[0], 0), *(site.sig(name) for name in names[1:]))
    made.on_error(site.sig("canvas.errback", mark, immutable=True))
    result = made.apply_async()
    failed = [result.parent.parent, result.parent, result][place]
    with pytest.raises(Exception, match=r"job|plain"):
        failed.get(timeout=TIMEOUT_S)
    assert failed.state == "FAILURE"
    site.noted("errback", mark)


def test_a_chord_of_which_a_part_fails(site: Site) -> None:
    result = chord([site.sig(JOB, 0), site.sig("canvas.broken")], site.sig(JOB)).apply_async()
    with pytest.raises(Exception, match=r"raised|job"):
        result.get(timeout=TIMEOUT_S)


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_suspended_asking_shows_so(site: Site) -> None:
    result = site.sig("canvas.patient", 1).apply_async()
    wait_until(lambda: result.state == "SUSPENDED", timeout=TIMEOUT_S)
    assert (result.ready(), result.result) == (False, None)
    assert result.job.refresh().status == Status.SUSPENDED
    result.job.run()
    site.record.wait_for("patient", job=result.job.id, count=2, timeout=TIMEOUT_S)
    result.job.wait(Status.SUSPENDED, timeout=TIMEOUT_S)
    result.job.input("go").write(41)
    assert result.get(timeout=TIMEOUT_S) == 42
    assert result.state == "SUCCESS"


def test_one_task_id_is_one_asking(site: Site) -> None:
    job = site.enqueue("patient", 1).wait(Status.SUSPENDED, timeout=TIMEOUT_S)
    first = job.task_id
    job.input("go").write(1)
    job.wait(timeout=TIMEOUT_S)
    assert job.task_id == first
    assert {line["task_id"] for line in site.record.of("patient", job=job.id)} == {first}
    assert job.result.get(timeout=TIMEOUT_S) == 2

    job.run()
    job.wait(Status.SUSPENDED, timeout=TIMEOUT_S)
    second = job.task_id
    assert second != first
    assert site.app.AsyncResult(first).get(timeout=TIMEOUT_S) == 2, "the first asking keeps its result"
    job.input("go").write(2)
    job.wait(timeout=TIMEOUT_S)
    assert job.result.id == second
    assert job.result.get(timeout=TIMEOUT_S) == 3
    assert site.sidejob.for_task_id(second) == job


def test_a_terminated_asking_is_revoked(site: Site) -> None:
    result = site.sig("canvas.patient", 1).apply_async()
    result.job.wait(Status.SUSPENDED, timeout=TIMEOUT_S)
    result.job.terminate()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=TIMEOUT_S)
    assert result.state == "REVOKED"


def test_results_are_not_kept_where_nobody_wants_them(site: Site) -> None:
    for job in (site.enqueue("silent"), site.enqueue("job", 0, ignore_result=True)):
        job.wait(timeout=TIMEOUT_S)
        assert job.result.state == "PENDING"


@CELERY_5_7  # before, Celery stores FAILURE over what was stored
@pytest.mark.parametrize("expires", [-1, datetime.now(UTC) - timedelta(hours=1)])
def test_an_expired_asking_is_revoked(site: Site, expires: Any) -> None:
    if expires == -1:
        expires = 0.05
        job = site.enqueue("job", 0, expires=expires, countdown=0.2)
    else:
        job = site.enqueue("job", 0, expires=expires)
    job.wait(timeout=TIMEOUT_S)
    assert job.status == Status.FAILED
    with pytest.raises(TaskRevokedError):
        job.result.get(timeout=TIMEOUT_S)
    assert job.result.state == "REVOKED"


def test_what_has_not_expired_runs(site: Site) -> None:
    job = site.enqueue("job", 0, expires=60)
    assert job.wait(timeout=TIMEOUT_S).status == Status.COMPLETED


def test_a_sweep_stores_the_result_that_its_process_could_not(site: Site) -> None:
    job = site.enqueue("job", 5).wait(timeout=TIMEOUT_S)
    task_id = str(job.task_id)
    assert job.result.get(timeout=TIMEOUT_S) == 15
    wait_until(lambda: site.outside.execute("SELECT stored_at IS NOT NULL FROM sidejob.askings WHERE task_id = %s", [task_id]).fetchone() == (True,))  # fmt: skip  # noqa: E501
    site.app.backend.delete(site.app.backend.get_key_for_task(task_id))
    assert job.result.state == "PENDING"
    site.outside.execute(
        "UPDATE sidejob.askings SET stored_at = NULL, closed_at = now() - interval '1 min' WHERE task_id = %s",
        [task_id],
    )
    site.sidejob.poll()
    wait_until(lambda: job.result.state == "SUCCESS", timeout=TIMEOUT_S)
    assert job.result.get(timeout=TIMEOUT_S) == 15


# -- retries ----------------------------------------------------------------------------------------------------------


def test_autoretry(site: Site) -> None:
    job = site.enqueue("autoretry", 2)
    task_id = job.task_id
    job.wait(timeout=TIMEOUT_S)
    assert (job.status, job.state, job.task_id) == (Status.COMPLETED, {"tries": 2}, task_id)
    lines = site.record.of("try", job=job.id)
    assert [line["retries"] for line in lines] == [0, 1, 2]
    assert {line["task_id"] for line in lines} == {task_id}
    assert job.result.get(timeout=TIMEOUT_S) == 2
    assert task_id not in {entry.task_id for entry in site.sidejob.dead}


def test_retries_that_are_used_up(site: Site) -> None:
    job = site.enqueue("autoretry", 9).wait(timeout=TIMEOUT_S)
    assert (job.status, job.state) == (Status.FAILED, {})
    assert [line["retries"] for line in site.record.of("try", job=job.id)] == [0, 1, 2]
    with pytest.raises(Exception, match="again"):
        job.result.get(timeout=TIMEOUT_S)
    exhausted = site.enqueue("exhausted").wait(timeout=TIMEOUT_S)
    assert exhausted.status == Status.FAILED
    assert exhausted.info["error"]["type"] == "MaxRetriesExceededError"


def test_backoff(site: Site) -> None:
    job = site.enqueue("backoff").wait(timeout=TIMEOUT_S)
    assert job.status == Status.COMPLETED
    at = [line["at"] for line in site.record.of("try", job=job.id)]
    assert len(at) == 3
    assert at[1] - at[0] >= 1.0
    assert at[2] - at[1] >= 2.0


def test_a_countdown_of_ones_own(site: Site) -> None:
    job = site.enqueue("retried")
    job.wait(timeout=TIMEOUT_S)
    at = [line["at"] for line in site.record.of("try", job=job.id)]
    assert at[1] - at[0] >= 0.3
    assert job.result.get(timeout=TIMEOUT_S) == 1


def test_a_run_does_not_cut_a_backoff_short_and_force_does(site: Site) -> None:
    job = site.enqueue("retried", 3600)
    wait_until(lambda: job.result.state == "RETRY", timeout=TIMEOUT_S)
    assert job.refresh().status == Status.QUEUED
    assert job.run() == job
    site.sidejob.poll()
    bystander = site.enqueue("job", 0).wait(timeout=TIMEOUT_S)
    assert bystander.status == Status.COMPLETED
    assert len(site.record.of("try", job=job.id)) == 1
    job.run(force=True)
    site.record.wait_for("try", job=job.id, count=2, timeout=TIMEOUT_S)
    job.wait(timeout=TIMEOUT_S)


def test_terminate_cuts_a_backoff_short(site: Site) -> None:
    job = site.enqueue("retried", 3600)
    wait_until(lambda: job.result.state == "RETRY", timeout=TIMEOUT_S)
    job.terminate()
    assert job.wait(timeout=TIMEOUT_S).status == Status.TERMINATED


def test_celerys_own_retry(site: Site) -> None:
    assert site.enqueue("self_retried", 1).wait(timeout=TIMEOUT_S).result.get(timeout=TIMEOUT_S) == 1
    job = site.enqueue("self_retried", 2).wait(timeout=TIMEOUT_S)
    assert job.status == Status.FAILED
    assert job.info["error"]["message"] == "bound"


# -- messages that are not ours ---------------------------------------------------------------------------------------


def test_a_client_without_the_extension(site: Site) -> None:
    client = Celery("stranger", set_as_current=False)
    client.conf.update(site.broker.configuration)
    task_id = str(uuid.uuid4())
    value = uuid.uuid4().int % 10**9
    link = client.signature("canvas.noted")
    for _ in range(2):  # the second stands for a delivery of the same message once more
        result = client.send_task(JOB, (value,), task_id=task_id, link=link)
    assert result.get(timeout=TIMEOUT_S) == value + 10
    made = [job for job in site.sidejob.iter_jobs(task=JOB) if job.args == [value]]
    assert len(made) == 1
    assert site.sidejob.for_task_id(task_id) == made[0]
    bystander = site.enqueue("job", 0).wait(timeout=TIMEOUT_S)
    assert bystander.status == Status.COMPLETED
    assert len(site.noted("noted", str(value + 10))) == 1
    client.close()


def test_a_canvas_of_a_client_without_the_extension(site: Site) -> None:
    client = Celery("stranger", set_as_current=False)
    client.conf.update(site.broker.configuration)
    sig = client.signature
    chained = chain(sig(JOB, args=(0,)), sig(PLAIN), sig(JOB)).apply_async()
    joined = chord([sig(JOB, args=(0,)), sig(JOB, args=(1,))], sig(JOB)).apply_async()
    assert chained.get(timeout=TIMEOUT_S) == 21
    assert joined.get(timeout=TIMEOUT_S) == 31
    client.close()


# -- eager mode -------------------------------------------------------------------------------------------------------

EAGER = """
from celery import chain, chord, group
from celery.result import EagerResult
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tests.acceptance import canvas as c

result = c.job.delay(1)
assert isinstance(result, EagerResult), result
assert (result.get(), result.state, result.job.status) == (11, "SUCCESS", "completed"), result
assert result.job.refresh().task_id == result.id

result = c.family.delay(3)
assert result.job.status == "completed", result.job.info
assert result.get() == 4, result.get()
assert [job.status for job in c.sidejob.jobs(task="canvas.family")] == ["completed"] * 4

result = c.broken.delay()
assert (result.state, type(result.result)) == ("FAILURE", c.Broken), result.result
assert result.job.status == "failed"

result = c.patient.delay(1)
assert (result.state, result.result, result.job.status) == ("SUSPENDED", None, "suspended"), result.state

result = c.autoretry.delay(2)
assert (result.get(), result.job.state) == (2, {"tries": 2})
result = c.retried.delay(countdown=3600.0)
assert (result.get(), result.job.status) == (1, "completed")
result = c.job.apply_async((1,), countdown=3600)
assert result.get() == 11
later = c.job.enqueue((1,), countdown=3600)
assert later.refresh().status == "queued"

assert chain(c.job.s(0), c.plain.s(), c.job.s()).delay().get() == 21
assert group(c.job.s(0), c.plain.s(0)).delay().get() == [10, 1]
assert chord([c.job.s(0), c.plain.s(0)], c.job.s()).delay().get() == 21

assert c.job.enqueue((1,)).refresh().status == "completed"
assert [job.refresh().status for job in c.sidejob.enqueue_many([c.job.s(1), c.broken.s()])] == ["completed", "failed"]
held = c.patient.enqueue((1,))
assert held.refresh().status == "suspended"
held.input("go").write(1)
assert held.refresh().status == "completed"
result = c.asking.delay()
assert c.sidejob.get(result.get()).status == "completed"

other = c.sidejob.enqueue(c.reader, queue="elsewhere", outports={"seen": {"channels": ["/seen"]}})
third = c.sidejob.enqueue(c.reader, queue="elsewhere", inports={"in": {"channels": ["/seen"]}})
c.writer.delay(other.id)
reads = [job.refresh().get("read") for job in (other, third)]
assert reads == [[7], [7]], reads

c.app.conf.task_eager_propagates = True
try:
    c.broken.delay()
except c.Broken as error:
    assert str(error) == "job"
else:
    raise AssertionError("task_eager_propagates")
c.job.apply_async((5,), link=c.noted.s())

engine = create_engine(c.sidejob.settings.database_url.replace("postgresql://", "postgresql+psycopg://"))
with Session(engine) as session:
    result = c.job.apply_async((1,), transaction=session)
    assert (result.state, c.sidejob.find(result.job.id)) == ("PENDING", None), result.state
    session.commit()
assert result.job.refresh().status == "completed"
with Session(engine) as session:
    undone = c.job.apply_async((1,), transaction=session)
    session.rollback()
assert c.sidejob.find(undone.job.id) is None
engine.dispose()
print("all well")
"""


def test_eager_mode(database_url: str, record: Record, processes: Processes) -> None:
    """In a process with a store and without a broker or a backend: nothing of either is wanted."""
    nowhere = "redis://127.0.0.1:1/0"
    env = {"SIDEJOB_DATABASE_URL": database_url, "BROKER_URL": nowhere, "EAGER": "1", **record.env}
    client = processes.start_python(EAGER, env=env)
    assert client.wait(60) == 0, client.log()
    assert "all well" in client.log()
    assert record.of("noted", args=["15"]), record.read()


def test_apply_runs_a_job_here(site: Site) -> None:
    made = Celery("here", set_as_current=False)
    made.conf.update(site.broker.configuration)
    made.conf.sidejob_database_url = site.url

    @SideJob(made).task(name="here.double")
    def double(job: Any, value: int) -> int:
        return value * 2

    result = double.apply((21,))
    assert isinstance(result, EagerResult)
    assert (result.get(), result.job.refresh().status) == (42, Status.COMPLETED)
    made.close()
