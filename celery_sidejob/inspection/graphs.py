"""A job's place in the graph: the jobs above and below it, dependencies, and channels, with jobs alike as one node.

The search is bounded (`READ`, `EDGES`, `DEEPEST`), and so is the number of nodes: a level of a tree has at most `WIDE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..jobs.job import Job
from ..model.errors import job_not_found
from ..model.names import channel_ancestors as levels_of
from ..model.status import Status
from ..operations.runtime import Runtime
from ..store import dependencies, ports, trees
from ..store.statement import Transaction

READ = 4_000
"""The most jobs of a tree that are read."""
EDGES = 2_000
"""The most dependencies that are read in each direction, and the most channels of ports."""
DEEPEST = 12
"""The most levels of a tree that are shown below the job, and the most steps to jobs outside the tree."""
ABOVE = 8
"""The most ancestors that are shown."""
UNREAD = 1_000
"""The most children of a job that are counted beyond those that were read."""
FEW = 6
"""So many children of one task, or fewer, are nodes of their own."""
WIDE = 24
"""The most nodes of one level of a tree, or of one step away from it."""

Key = int | str
"""A job by its id, or a channel by its name."""
Families = dict[tuple[tuple[tuple[str, bool], ...], str], list[int]]
"""Jobs by their neighbours, each with whether the job comes after it, and by their task."""


@dataclass(frozen=True, slots=True)
class Node:
    """A job, a number of jobs alike, or a channel."""

    key: str
    label: str
    """The task of the jobs, or the name of the channel; empty for jobs of several tasks."""
    statuses: Mapping[str, int]
    """The number of jobs in each status; empty for a channel."""
    job_id: int | None = None
    """The job, if it is only one."""
    name: str | None = None
    """Its name as a child."""
    parent_id: int | None = None
    """The parent of all these jobs, if they have the same."""
    unread: int = 0
    """So many children of the parent, or more, were not read: the node stands for these."""

    @property
    def count(self) -> int:
        """The number of jobs; 0 for a channel."""
        return self.unread or sum(self.statuses.values())


@dataclass(frozen=True, slots=True)
class Edge:
    """An arrow: from parent to child, from a dependency to the job that waits for it, or to and from a channel."""

    before: str
    after: str
    how: str
    """child, dependency or channel."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes around a job, which is itself the node `focus`."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    focus: str
    read: int
    """How many jobs were read."""
    is_whole: bool
    """Whether nothing was left out."""


@dataclass(slots=True)
class _Found:
    """What was read: jobs, and edges between jobs and channels."""

    jobs: dict[int, Any] = field(default_factory=dict)
    levels: list[list[int]] = field(default_factory=list)
    """The ids of the tree, from the topmost ancestor down; each ancestor is a level."""
    children: Counter[int] = field(default_factory=Counter)
    """How many children of a job were read."""
    is_cut: bool = False
    """Whether jobs of the tree may be missing."""
    unread: dict[int, int] = field(default_factory=dict)
    """How many children of a job were not read, for jobs that are nodes of their own; `UNREAD` stands for more."""
    channels: list[str] = field(default_factory=list)
    edges: list[tuple[Key, Key, str]] = field(default_factory=list)
    """The edges that are not those of the tree."""
    is_whole: bool = True


def around(runtime: Runtime, job: Job) -> Graph:
    """Return a job's place in the graph; eight statements, each of them bounded."""

    def work(executor: Transaction) -> Graph:
        found = _Found()
        _read_tree(executor, job.id, found)
        _read_edges(executor, job.id, found)
        graph = folded(found, job.id)
        if not found.is_cut:
            return graph
        alone = {node.job_id: found.children[node.job_id] for node in graph.nodes if node.job_id is not None}
        found.unread = trees.children_beyond(executor, alone, most=UNREAD)
        return folded(found, job.id)

    return runtime.connections.transact("inspect", work)


def _read_tree(executor: Transaction, job_id: int, found: _Found) -> None:
    above = trees.ancestors(executor, job_id, limit=ABOVE + 2)[1:]
    below = trees.tree(executor, job_id, depth=DEEPEST, limit=READ, counted=0)
    if not below:
        raise job_not_found(job_id)
    found.is_whole = len(above) <= ABOVE
    found.jobs = {row.id: row for row in [*trees.nodes(executor, above[:ABOVE]), *below]}
    by_depth: dict[int, list[int]] = {}
    found.children = Counter(row.parent_id for row in below)
    found.is_cut = len(below) == READ or below[-1].depth == DEEPEST
    for row in below:
        by_depth.setdefault(row.depth, []).append(row.id)
    found.levels = [[ancestor] for ancestor in reversed(above[:ABOVE]) if ancestor in found.jobs]
    found.levels += [by_depth[depth] for depth in sorted(by_depth)]


def _read_edges(executor: Transaction, job_id: int, found: _Found) -> None:
    ids = [job_id, *(each for each in found.jobs if each != job_id)]  # the job's own edges come first
    waits = dependencies.around(executor, ids, limit=EDGES)
    found.edges = [(row.depends_on, row.job_id, "dependency") for row in waits]
    connected = ports.connected(executor, ids, limit=EDGES)
    channels = {row.channel for row in connected}
    heard = {level for row in connected if row.direction == "out" for level in levels_of(row.channel)}
    subscribed = ports.subscribers(executor, heard, limit=EDGES)
    found.is_whole &= max(len(waits), len(connected), len(subscribed)) < EDGES
    for row in connected:
        found.edges.append(
            (row.job_id, row.channel, "channel") if row.direction == "out" else (row.channel, row.job_id, "channel")
        )
    found.edges += [(row.channel, row.job_id, "channel") for row in subscribed]
    for channel in [*channels]:  # who subscribes to /orders hears what is published on /orders/new
        for level in levels_of(channel)[1:]:
            if level in channels or any(row.channel == level for row in subscribed):
                channels.add(level)
                found.edges.append((channel, level, "channel"))
                break
    found.channels = sorted(channels)
    outside = {key for edge in found.edges for key in edge[:2] if isinstance(key, int)} - found.jobs.keys()
    found.jobs |= {row.id: row for row in trees.nodes(executor, outside)}


# -- folding: a pure function of what was read -----------------------------------------------------------------------


class _Folding:
    """Puts each job into the node that stands for it."""

    def __init__(self, found: _Found) -> None:
        self._found = found
        self.nodes: dict[str, Node] = {}
        self.node_of: dict[Key, str] = {}

    def level(self, families: Families) -> None:
        """Make the nodes of jobs that are equally far away; a family is folded if it is large, or its parents are."""
        chosen: list[list[int]] = []
        for (around, _), ids in families.items():
            is_folded = len(ids) > FEW or any(self.nodes[key].count > 1 for key, _ in around)
            chosen += [ids] if is_folded else [[each] for each in ids]
        for ids in chosen if len(chosen) <= WIDE else self._by_task(chosen):
            self._add(ids)

    def _by_task(self, chosen: Iterable[list[int]]) -> list[list[int]]:
        tasks: dict[str, list[int]] = {}
        for ids in chosen:
            for each in ids:
                tasks.setdefault(self._found.jobs[each].task, []).append(each)
        largest = sorted(tasks.values(), key=len, reverse=True)
        others = [each for ids in largest[WIDE - 1 :] for each in ids]
        return [*largest[: WIDE - 1], *([others] if others else [])]

    def _add(self, ids: list[int]) -> None:
        rows = [self._found.jobs[each] for each in ids]
        tasks, parents = {row.task for row in rows}, {row.parent_id for row in rows}
        counted = Counter(row.status for row in rows)
        only = rows[0] if len(rows) == 1 else None
        node = Node(
            f"job-{ids[0]}" if only else f"jobs-{ids[0]}",
            rows[0].task if len(tasks) == 1 else "",
            {str(status): counted[status] for status in Status if status in counted},
            job_id=only and only.id,
            name=only and only.name,
            parent_id=parents.pop() if len(parents) == 1 else None,
        )
        self.nodes[node.key] = node
        self.node_of |= dict.fromkeys(ids, node.key)

    def add_channel(self, name: str) -> None:
        key = f"channel-{name}"
        self.nodes[key], self.node_of[name] = Node(key, name, {}), key

    def add_unread(self, parent_id: int, number: int) -> str:
        """Make the node of the children that were not read."""
        key = f"unread-{parent_id}"
        self.nodes[key] = Node(key, "", {}, parent_id=parent_id, unread=number)
        return key


def folded(found: _Found, focus: int) -> Graph:
    """Return the graph of what was read, with jobs alike as one node."""
    folding = _Folding(found)
    for level in found.levels:
        families: Families = {}
        for each in level:
            row = found.jobs[each]
            above = folding.node_of.get(row.parent_id)
            families.setdefault((((above, True),) if above else (), row.task), []).append(each)
        folding.level(families)
    for name in found.channels[:WIDE]:
        folding.add_channel(name)
    edges = _edges_of_tree(found, folding)
    _place_outside(found, folding)
    edges += [
        Edge(folding.node_of[before], folding.node_of[after], how)
        for before, after, how in found.edges
        if before in folding.node_of and after in folding.node_of
    ]
    placed = sum(1 for key in folding.node_of if isinstance(key, int))
    is_whole = not found.is_cut and found.is_whole and placed == len(found.jobs) and len(found.channels) <= WIDE
    distinct = [edge for edge in dict.fromkeys(edges) if edge.before != edge.after]
    return Graph([*folding.nodes.values()], distinct, folding.node_of[focus], len(found.jobs), is_whole)


def _edges_of_tree(found: _Found, folding: _Folding) -> list[Edge]:
    edges = []
    for each, key in [*folding.node_of.items()]:
        if isinstance(each, int) and (above := folding.node_of.get(found.jobs[each].parent_id)):
            edges.append(Edge(above, key, "child"))
    for parent_id, number in found.unread.items():
        edges.append(Edge(folding.node_of[parent_id], folding.add_unread(parent_id, number), "child"))
    return edges


def _place_outside(found: _Found, folding: _Folding) -> None:
    """Make the nodes of jobs outside the tree, the nearest first; jobs with the same neighbours are a family."""
    for _ in range(DEEPEST):
        near: dict[int, set[tuple[str, bool]]] = {}
        for before, after, _how in found.edges:
            for here, there, is_after in ((before, after, True), (after, before, False)):
                is_outside = isinstance(there, int) and there in found.jobs and there not in folding.node_of
                if is_outside and (key := folding.node_of.get(here)) is not None:
                    near.setdefault(int(there), set()).add((key, is_after))
        if not near:
            return
        families: Families = {}
        for each, around in sorted(near.items()):
            families.setdefault((tuple(sorted(around)), found.jobs[each].task), []).append(each)
        folding.level(families)
