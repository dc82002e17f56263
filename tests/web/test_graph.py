"""A job's place in the graph: what is read, what is folded, and where it stands."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_sidejob import Job
from celery_sidejob.inspection import graphs
from celery_sidejob.inspection.graphs import FEW, WIDE, Graph
from celery_sidejob.web.drawing import BOX_HEIGHT, BOX_WIDTH, drawn
from tests.tools.browsers import Browser
from tests.tools.in_process import Stage


def around(stage: Stage, job: Job) -> Graph:
    return graphs.around(stage.runtime, job)


def counts(graph: Graph) -> dict[str, int]:
    """{what a node stands for: how many jobs}"""
    return {node.key if node.job_id is None else str(node.job_id): node.count for node in graph.nodes}


def edges(graph: Graph) -> set[tuple[str, str, str]]:
    return {(edge.before, edge.after, edge.how) for edge in graph.edges}


def test_a_tree_with_the_jobs_above(stage: Stage) -> None:
    top = stage.job()
    middle = top.enqueue(stage.idle, child_name="middle")
    left, right = (middle.enqueue(stage.idle, child_name=name) for name in ("left", "right"))
    top.enqueue(stage.idle, child_name="elsewhere")
    graph = around(stage, middle)
    assert graph.focus == f"job-{middle.id}"
    assert edges(graph) == {
        (f"job-{top.id}", f"job-{middle.id}", "child"),
        (f"job-{middle.id}", f"job-{left.id}", "child"),
        (f"job-{middle.id}", f"job-{right.id}", "child"),
    }
    assert graph.is_whole
    assert [node.name for node in graph.nodes] == [None, "middle", "left", "right"]


def test_children_alike_are_one_node_with_counts(stage: Stage) -> None:
    top = stage.job()
    children = [top.enqueue(stage.idle, child_name=f"c{n}") for n in range(FEW + 1)]
    stage.run(children[0])
    below = [child.enqueue(stage.idle, child_name="below") for child in children[:3]]
    graph = around(stage, top)
    folded = graph.nodes[1]
    assert folded.statuses == {"queued": FEW, "completed": 1}
    assert (folded.parent_id, folded.label) == (top.id, "stage.idle")
    assert graph.nodes[2].count == len(below), "and so are their children, whatever their number"
    assert edges(graph) == {
        (f"job-{top.id}", folded.key, "child"), (folded.key, graph.nodes[2].key, "child")
    }  # fmt: skip


def test_dependencies_lead_out_of_the_tree(stage: Stage) -> None:
    first = stage.job()
    second = stage.job(depends_on=[first])
    job = stage.job(depends_on=[second])
    waiting = [stage.job(depends_on=[job]) for _ in range(FEW + 2)]
    graph = around(stage, job)
    names = {f"job-{first.id}", f"job-{second.id}", f"job-{job.id}", f"jobs-{waiting[0].id}"}
    assert {node.key for node in graph.nodes} == names
    assert edges(graph) == {
        (f"job-{first.id}", f"job-{second.id}", "dependency"),
        (f"job-{second.id}", f"job-{job.id}", "dependency"),
        (f"job-{job.id}", f"jobs-{waiting[0].id}", "dependency"),
    }
    assert graph.is_whole


def test_channels_lead_to_the_jobs_that_subscribe(stage: Stage) -> None:
    job = stage.job(outports={"orders": {"channels": ["/orders/new"]}})
    near = stage.job(inports={"all": {"channels": ["/orders"]}})
    exact = stage.job(inports={"new": {"channels": ["/orders/new"]}})
    stage.job(inports={"other": {"channels": ["/bills"]}})
    graph = around(stage, job)
    assert edges(graph) == {
        (f"job-{job.id}", "channel-/orders/new", "channel"),
        ("channel-/orders/new", "channel-/orders", "channel"),
        ("channel-/orders", f"job-{near.id}", "channel"),
        ("channel-/orders/new", f"job-{exact.id}", "channel"),
    }
    assert edges(around(stage, near)) == {("channel-/orders", f"job-{near.id}", "channel")}


def big_tree(stage: Stage, top: Job, families: int, size: int) -> None:
    stage.sql(
        """
        WITH middle AS (
          INSERT INTO jobs (task, queue, parent_id, name, status)
          SELECT 'shop.part', 'celery', %s, 'part ' || n, 'suspended' FROM generate_series(1, %s) n RETURNING id)
        INSERT INTO jobs (task, queue, parent_id, name, status)
        SELECT 'shop.piece', 'celery', middle.id, 'piece ' || n,
          CASE WHEN n %% 10 = 0 THEN 'terminated' ELSE 'completed' END
        FROM middle, generate_series(1, %s) n""",
        top.id, families, size,
    )  # fmt: skip


def test_three_thousand_jobs_are_a_few_nodes(stage: Stage) -> None:
    top = stage.job()
    big_tree(stage, top, 5, 600)
    graph = around(stage, top)
    assert graph.read == 3006
    assert graph.is_whole
    assert sorted(node.count for node in graph.nodes) == [1] * 6 + [600] * 5
    assert graph.nodes[-1].statuses == {"completed": 540, "terminated": 60}


def test_a_wide_level_is_folded_by_task(stage: Stage) -> None:
    top = stage.job()
    for n in range(5):
        child = top.enqueue(stage.idle, child_name=f"c{n}")
        for m in range(5):
            stage.sql(
                "INSERT INTO jobs (task, queue, parent_id, name, status) VALUES (%s, 'celery', %s, %s, 'completed')",
                f"t{n}{m}", child.id, f"x{m}",
            )  # fmt: skip
    graph = around(stage, top)
    assert len(graph.nodes) == 6 + WIDE
    assert graph.nodes[-1].label == ""
    assert graph.nodes[-1].count == 2, "tasks beyond the first are one node"


def test_what_is_not_read_is_a_node_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "READ", 101)
    top = stage.job()
    big_tree(stage, top, 200, 1)
    graph = around(stage, top)
    assert not graph.is_whole
    assert [(node.count, node.unread) for node in graph.nodes] == [(1, 0), (100, 0), (100, 100)]


def test_a_parent_may_wait_for_its_child(stage: Stage) -> None:
    top = stage.job(countdown=3600)
    child = top.enqueue(stage.idle, child_name="child")
    top.depend_on(child)
    graph = around(stage, top)
    assert len(graph.edges) == 2
    shown = drawn(graph)
    assert len(shown.arrows) == 2
    assert [box.x for box in shown.boxes] == sorted(box.x for box in shown.boxes)


def overlaps(boxes: Any) -> list[Any]:
    return [
        (one, other) for one in boxes for other in boxes
        if one is not other and abs(one.x - other.x) < BOX_WIDTH and abs(one.y - other.y) < BOX_HEIGHT
    ]  # fmt: skip


def test_no_two_nodes_overlap(stage: Stage) -> None:
    first = stage.job()
    top = stage.job(depends_on=[first], outports={"orders": {"channels": ["/orders"]}})
    for n in range(4):
        child = top.enqueue(stage.idle, child_name=f"c{n}", depends_on=[first])
        for m in range(n):
            child.enqueue(stage.idle, child_name=f"x{m}")
    stage.job(inports={"orders": {"channels": ["/orders"]}}, depends_on=[top])
    shown = drawn(around(stage, top))
    assert len(shown.boxes) == 14
    assert overlaps(shown.boxes) == []
    assert min(box.y for box in shown.boxes) >= 0
    assert max(box.y for box in shown.boxes) + BOX_HEIGHT <= shown.height


def test_the_page(stage: Stage, reader: Browser) -> None:
    top = stage.job()
    child = top.enqueue(stage.idle, child_name="<b>")
    big_tree(stage, top, 20, 3)
    shown = reader.text(f"/jobs/{top.id}/graph")
    assert f'<a href="/jobs/{child.id}" aria-label="Job {child.id}, child &lt;b&gt;: stage.idle, queued">' in shown
    assert f'href="/jobs?parent={top.id}&amp;task=shop.part"' in shown
    assert "20 jobs of shop.part: 20 suspended" in shown
    assert "60 jobs of shop.piece" in shown
    assert f'href="/jobs/{top.id}/graph"' in reader.text(f"/jobs/{top.id}")
    assert reader.get("/jobs/999999/graph").status_code == 404
    assert re.search(r"82 jobs read", shown)
