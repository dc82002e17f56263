"""The log: entries of users, of reads and writes, of errors; who receives them, and that they make no others."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from celery_sidejob import InvalidValueError, Job, RunningJob
from celery_sidejob.operations.runs import recovery
from celery_sidejob.store.connection.own_executor import OwnExecutor
from tests.tools.in_process import Stage


@pytest.fixture
def collector(stage: Stage) -> Job:
    """A job that keeps the log."""
    return stage.job(inports={"log": {"channels": ["/sidejob/log"]}})


def entries(collector: Job) -> list[dict[str, Any]]:
    """The entries that have come since, without their times; reading them makes none."""
    found = list(collector.input("log"))
    for entry in found:
        assert entry.pop("timestamp").startswith("20")
    return found


@pytest.fixture
def resting(stage: Stage) -> Job:
    return stage.inside(lambda job: None)


# -- entries of users ------------------------------------------------------------------------------------------------


def test_an_entry_is_a_mapping_a_string_or_an_exception(stage: Stage, collector: Job) -> None:
    sidejob = stage.sidejob
    sidejob.log({"a": [1, None]})
    sidejob.log("hello")
    try:
        raise KeyError("gone")
    except KeyError as error:
        sidejob.log(error)
    sidejob.log(ValueError())
    for wrong in (1, None, ["a"], b"x"):
        with pytest.raises(InvalidValueError, match="takes a mapping, a string or an exception"):
            sidejob.log(wrong)
    with pytest.raises(InvalidValueError, match="log entry"):
        sidejob.log({"a": float("nan")})

    first, second, third, fourth = entries(collector)
    assert first == {"a": [1, None]}
    assert second == {"message": "hello"}
    assert third["error"] == "'gone'"
    assert "test_log.py" in third["backtrace"]
    assert third["backtrace"].rstrip().endswith("KeyError: 'gone'")
    assert fourth["error"] == "ValueError"


def test_an_entry_has_the_context_around_it_and_its_own_fields_win(stage: Stage, collector: Job) -> None:
    with stage.sidejob.context(user="ann", a=1), stage.sidejob.context(a=2):
        stage.sidejob.log({"b": 3})
        stage.sidejob.log({"a": 4})
    assert entries(collector) == [{"user": "ann", "a": 2, "b": 3}, {"user": "ann", "a": 4}]


def test_an_entry_of_a_run_names_it_and_belongs_to_its_unit(stage: Stage, collector: Job) -> None:
    def body(job: RunningJob) -> None:
        stage.sidejob.log("committed")
        assert entries_in_store(stage) == []
        job.checkpoint()
        stage.sidejob.log("discarded")
        raise ValueError("no")

    job = stage.job(body)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    first, error = entries(collector)
    assert first == {"job": job.id, "run": 1, "message": "committed"}
    assert (error["job"], error["run"], error["error"]) == (job.id, 1, "no")


def entries_in_store(stage: Stage) -> list[Any]:
    return stage.sql("SELECT value FROM packets WHERE context::jsonb->>'channel' = '/sidejob/log'")


# -- reads and writes ------------------------------------------------------------------------------------------------


def test_each_read_and_write_is_an_entry(stage: Stage, resting: Job, collector: Job) -> None:
    port = resting.input("a")
    port.write(1)
    port.write_many(["x", None])
    assert [port.read(), port.read_packet(), *port, port.read()][0] == 1
    port.default = 7
    assert port.read() == 7
    assert port.peek() == []
    port.write_many([])
    with stage.sidejob.port_options(log=False):
        port.write_many([8, 9])
    assert port.read_many(5) == [8, 9]
    port.write_many([10, 11])
    assert port.read_many(5) == [10, 11]
    assert port.read_many(5) == []

    at = {"job": resting.id, "inport": "a"}
    assert entries(collector) == [
        {"read": [], "write": [{**at, "data": [1]}]},
        {"read": [], "write": [{**at, "data": ["x", None]}]},
        {"read": [{**at, "data": [1]}], "write": []},
        {"read": [{**at, "data": ["x"]}], "write": []},
        {"read": [{**at, "data": [None]}], "write": []},
        {"read": [{**at, "data": [7]}], "write": []},
        {"read": [], "write": [{**at, "data": [10, 11]}]},
        {"read": [{**at, "data": [10, 11]}], "write": []},
    ]


def test_a_group_is_one_entry_in_the_order_of_first_use(stage: Stage, resting: Job, collector: Job) -> None:
    a, b, o = resting.input("a"), resting.input("b"), resting.output("o")
    value = {"n": [1]}
    with stage.sidejob.context(user="ann"), stage.sidejob.port_options():
        b.write(value)
        value["n"].append(2)
        with stage.sidejob.port_options(notify=False):
            a.write(1)
        b.write(3)
        assert a.read() == 1
        o.write(4)
        assert entries(collector) == []
    with stage.sidejob.port_options():
        pass
    assert entries(collector) == [
        {
            "user": "ann",
            "read": [{"job": resting.id, "inport": "a", "data": [1]}],
            "write": [
                {"job": resting.id, "inport": "b", "data": [{"n": [1]}, 3]},
                {"job": resting.id, "inport": "a", "data": [1]},
                {"job": resting.id, "outport": "o", "data": [4]},
            ],
        }
    ]


def test_a_group_makes_its_entry_also_if_its_block_raises(stage: Stage, resting: Job, collector: Job) -> None:
    def write_and_fail() -> None:
        with stage.sidejob.port_options():
            resting.input("a").write(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    resting.input("a").write(2)
    assert [entry["write"][0]["data"] for entry in entries(collector)] == [[1], [2]]


def test_what_is_written_unlogged_is_not_logged_when_it_is_read(stage: Stage, resting: Job, collector: Job) -> None:
    port = resting.input("a")
    with stage.sidejob.port_options(log=False):
        port.write(1)
        with stage.sidejob.port_options(log=True):
            port.write(2)
    assert port.peek(1)[0].options == {"log": False}
    assert (port.read(), port.read()) == (1, 2)
    port.write(3)
    with stage.sidejob.port_options(log=False):
        assert port.read() == 3
    data = [(key, entry[key][0]["data"]) for entry in entries(collector) for key in ("read", "write") if entry[key]]
    assert data == [("write", [2]), ("read", [2]), ("write", [3])]


def test_each_turn_of_for_inputs_is_one_entry_of_its_run(stage: Stage, collector: Job) -> None:
    def body(job: RunningJob) -> None:
        for a, b in job.for_inputs("a", "b"):
            job.output("sum").write(a + b)

    job = stage.job(body, inports={"a": {}, "b": {"default": 10}}, outports=["sum"])
    with stage.sidejob.port_options(log=False):
        job.input("b").write(0)
    with stage.sidejob.port_options():
        job.input("a").write_many([1, 2])
    entries(collector)
    stage.run(job)

    def entry(total: int, *read: dict[str, Any]) -> dict[str, Any]:
        said = {"job": job.id, "run": 1}
        written = [{"job": job.id, "outport": "sum", "data": [total]}]
        return {**said, "read": [{"job": job.id, **one} for one in read], "write": written}

    assert entries(collector) == [
        entry(1, {"inport": "a", "data": [1]}),
        entry(12, {"inport": "a", "data": [2]}, {"inport": "b", "data": [10]}),
    ]


@pytest.mark.parametrize("how", ["break", "raise", "suspend", "return"])
def test_a_turn_that_is_left_early(stage: Stage, collector: Job, how: str) -> None:
    def body(job: RunningJob) -> None:
        for _ in job.for_inputs("a"):
            job.output("o").write(1)
            if how == "raise":
                raise ValueError
            if how == "suspend":
                job.suspend()
            if how == "return":
                return
            break

    job = stage.job(body, inports=["a"], outports=["o"])
    job.input("a").write(1)
    entries(collector)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    resting = stage.job()
    resting.output("o").write("after")

    first, last = entries(collector)
    assert last["write"] == [{"job": resting.id, "outport": "o", "data": ["after"]}]
    if how == "raise":
        assert first["error"] == "ValueError"
    else:
        assert (first["read"][0]["data"], first["write"][0]["data"]) == ([1], [1])


def test_reads_and_writes_of_a_unit_that_does_not_commit_are_not_logged(stage: Stage, collector: Job) -> None:
    def body(job: RunningJob) -> None:
        assert job.input("a").read() == 1
        job.output("o").write(1)
        raise ValueError("no")

    job = stage.job(body, inports=["a"], outports=["o"])
    with stage.sidejob.port_options(log=False):
        job.input("a").write(1)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    (found,) = entries(collector)
    assert found["error"] == "no"


def test_in_the_caller_s_transaction_an_entry_shares_its_fate(stage: Stage, resting: Job, collector: Job) -> None:
    port = resting.input("a")
    port.write(0)
    with psycopg.connect(stage.database_url) as mine:
        port.write(1, transaction=mine)
        mine.rollback()
        port.write(2, transaction=mine)
        assert port.read(transaction=mine) == 0
        mine.commit()
    stage.sidejob.poll()  # nobody tells us of a bare psycopg's commit
    data = [(key, entry[key][0]["data"]) for entry in entries(collector) for key in ("read", "write") if entry[key]]
    assert data == [("write", [0]), ("write", [2]), ("read", [0])]


def test_an_entry_is_no_larger_than_a_value_may_be(stage_database_url: str) -> None:
    stage = Stage(stage_database_url, sidejob_max_value_bytes=1000)
    try:
        collector = stage.job(inports={"log": {"channels": ["/"]}})
        resting = stage.job()
        resting.output("o").write_many(["x" * 300] * 10)
        (entry,) = entries(collector)
        (written,) = entry["write"]
        assert (len(written["data"]), written["omitted"]) == (3, 7)
    finally:
        stage.sql("DELETE FROM jobs")
        stage.close()


def test_connecting_is_one_entry(stage: Stage, resting: Job, collector: Job) -> None:
    source, a, b = resting.output("o"), resting.input("a"), resting.input("b")
    source.connect_to(a)
    with stage.sidejob.port_options(log=False):
        source.write("unlogged")
        source.connect_to(a)
        source.write("unlogged when it is moved")
    source.write_many([1, 2])
    source.default = 3
    entries(collector)
    source.connect_to(a, b)
    assert entries(collector) == [
        {
            "read": [{"job": resting.id, "outport": "o", "data": [1, 2]}],
            "write": [{"job": resting.id, "inport": name, "data": [1, 2]} for name in ("a", "b")],
        }
    ]

    def body(job: RunningJob) -> None:
        job.input("in").connect_to(job.output("o"), a)

    job = stage.job(body, inports=["in"], outports=["o"])
    job.input("in").write(4)
    entries(collector)
    stage.run(job)
    assert entries(collector) == [
        {
            "job": job.id,
            "run": 1,
            "read": [{"job": job.id, "inport": "in", "data": [4]}],
            "write": [{"job": job.id, "outport": "o", "data": [4]}, {"job": resting.id, "inport": "a", "data": [4]}],
        }
    ]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors_of_the_body_of_startup_and_of_shutdown(stage: Stage, collector: Job) -> None:
    @stage.task(name="faulty")
    def faulty(job: RunningJob) -> None:
        raise ValueError("in the body")

    @faulty.on_shutdown
    def _(job: RunningJob) -> None:
        raise ValueError("in the shutdown")

    job = faulty.enqueue()
    with pytest.raises(ValueError, match="body"):
        stage.run(job)
    job.terminate()
    stage.drain()
    other = stage.task(does_nothing, name="startup_faulty")

    @other.on_startup
    def _(job: RunningJob) -> None:
        raise ValueError("in the startup")

    second = other.enqueue()
    with pytest.raises(ValueError, match="startup"):
        stage.run(second)

    found = entries(collector)
    assert [(one["job"], one["run"], one["error"]) for one in found] == [
        (job.id, 1, "in the body"), (job.id, 2, "in the shutdown"), (second.id, 1, "in the startup"),
    ]  # fmt: skip
    assert all("test_log.py" in one["backtrace"] for one in found)


def does_nothing(job: RunningJob) -> None:
    pass


def test_a_run_that_is_lost_once_too_often_is_in_the_log(stage: Stage, collector: Job) -> None:
    job = stage.task(does_nothing, name="once", max_losses=1).enqueue()
    hold = stage.claim(job)
    assert hold is not None
    stage.declare_dead(stage.worker_id)
    assert recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id)
    (found,) = entries(collector)
    assert (found["job"], found["run"]) == (job.id, 1)
    assert "The run was lost." in found["error"]


def test_errors_are_redacted(stage_database_url: str) -> None:
    stage = Stage(stage_database_url, sidejob_redact=lambda value: str(value).replace("secret", "***"))
    try:
        collector = stage.job(inports={"log": {"channels": ["/sidejob/log"]}})

        def body(job: RunningJob) -> None:
            raise ValueError("the secret")

        with pytest.raises(ValueError, match="secret"):
            stage.run(stage.job(body))
        stage.sidejob.log(ValueError("a secret"))
        for entry in entries(collector):
            assert "secret" not in json.dumps(entry)
            assert "***" in entry["error"]
    finally:
        stage.sql("DELETE FROM jobs; DELETE FROM dead")
        stage.close()


# -- no loops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [["/sidejob/log"], ["/"], ["/sidejob/log", "/"], ["/sidejob"]])
def test_a_collector_that_writes_and_logs_comes_to_rest(stage: Stage, channels: list[str]) -> None:
    read: list[Any] = []

    def collect(job: RunningJob) -> None:
        for entry in job.for_inputs("log"):
            read.append(entry)
            job.output("kept").write(entry)
            second.input("a").write(entry)
            stage.sidejob.log("kept")

    def pass_on(job: RunningJob) -> None:
        for value in job.for_inputs("a"):
            collector.input("back").write(value)
            stage.sidejob.log("passed on")

    collector = stage.job(collect, inports={"log": {"channels": channels}, "back": {}}, outports=["kept"])
    second = stage.job(pass_on, inports=["a"])
    stage.drain()
    stage.job().input("a").write("first")
    stage.drain(100)
    copies = len({"/sidejob/log", "/", "/sidejob"}.intersection(channels))
    assert [entry["write"][0]["data"] for entry in read] == [["first"]] * copies
    assert len(collector.input("back")) == copies


# -- free ------------------------------------------------------------------------------------------------------------


def test_without_receivers_reads_and_writes_cost_no_statement(
    stage: Stage, resting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    run = OwnExecutor.run

    def noting(self: OwnExecutor, statement: Any, /, **parameters: Any) -> Any:
        if "subscriptions" in statement.text:
            asked.append(statement.text)
        return run(self, statement, **parameters)

    port = resting.input("a")
    port.write("so that the port is there, whose making has to subscribe it")
    assert port.read()
    stage.runtime.audience.keeps_log()
    monkeypatch.setattr(OwnExecutor, "run", noting)
    monkeypatch.setattr(stage.runtime.audience, "_until", float("inf"))
    for number in range(5):
        port.write(number)
        port.read()
    with stage.sidejob.port_options():
        port.write(1)
    assert asked == []
    assert stage.sql("SELECT * FROM packets WHERE context IS NOT NULL") == []


@pytest.mark.parametrize("lent", ["call", "block"])
def test_the_store_is_not_asked_while_the_callers_transaction_is_open(stage: Stage, resting: Job, lent: str) -> None:
    """With a pool of connections, the question could wait for the caller."""
    audience, port = stage.runtime.audience, resting.input("a")

    def expire() -> None:
        audience._until = float("-inf")

    def still_expired() -> bool:
        return audience._until == float("-inf")

    def body(job: RunningJob) -> None:
        expire()
        with job.unit(transaction=connection), stage.sidejob.port_options():
            port.write(2)
            assert still_expired()
        assert still_expired()
        connection.commit()

    with psycopg.connect(stage.database_url) as connection:
        if lent == "block":
            stage.inside(body)
            return
        expire()
        with stage.sidejob.port_options():
            port.write(1, transaction=connection)
            assert still_expired()
        connection.rollback()


def test_a_new_receiver_of_this_process_is_known_at_once(stage: Stage, resting: Job) -> None:
    resting.input("a").write(0)
    collector = stage.job(inports={"log": {"channels": ["/sidejob/log"]}})
    resting.input("a").write(1)
    collector.input("log").channels = []
    resting.input("a").write(2)
    other = stage.job()
    other.input("log").channels = ["/sidejob"]
    resting.input("a").write(3)
    assert [entry["write"][0]["data"] for entry in entries(collector)] == [[1]]
    assert [entry["write"][0]["data"] for entry in entries(other)] == [[3]]


def test_one_who_listens_receives_entries_that_no_port_keeps(stage: Stage, resting: Job) -> None:
    with stage.sidejob.subscribe("/sidejob/log", timeout=10) as log:
        resting.input("a").write(1)
        stage.inside(lambda job: job.output("o").write(2))
        stage.sidejob.log("three")
        found = [next(log).message for _ in range(3)]
    assert [one.get("message") or one["write"][0]["data"] for one in found] == [[1], [2], "three"]
