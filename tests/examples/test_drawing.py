"""The picture of a graph of jobs."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from celery_sidejob.model.status import Status
from examples.census_demo.drawing import COLOURS, DOT, TALLEST, draw_tree
from examples.census_demo.drawing.boxes import BOX_HEIGHT

SVG = "{http://www.w3.org/2000/svg}"
Row = tuple[int, int | None, str, str]


def jobs_of(path: Path) -> list[ET.Element]:
    return [group for group in ET.parse(path).iter(f"{SVG}g") if group.get("class", "").startswith("job ")]


def place_of(job: ET.Element) -> tuple[float, float]:
    x, y = re.findall(r"-?[\d.]+", job.get("transform", ""))
    return float(x), float(y)


def some_tree(size: int, fan: int) -> list[Row]:
    chance = random.Random(7)
    return [(1, None, "root", "running")] + [
        (
            i,
            chance.randrange(max(1, i // fan - 3), max(2, min(i, i // fan + 1))),
            f"job {i}",
            chance.choice(list(Status)),
        )
        for i in range(2, size + 1)
    ]


def test_a_small_tree_is_boxes_from_left_to_right(tmp_path: Path) -> None:
    rows: list[Row] = [(5, None, "root", "running"), (6, 5, "left", "completed"), (7, 5, "right", "failed")]

    assert draw_tree(rows, tmp_path / "a.svg") == 3

    root, left, right = jobs_of(tmp_path / "a.svg")
    assert [job.get("id") for job in (root, left, right)] == ["job5", "job6", "job7"]
    assert [job.findtext(f"{SVG}text") for job in (root, left, right)] == ["root", "left", "right"]
    assert [job.find(f"{SVG}rect").get("fill") for job in (root, left, right)] == [  # type: ignore[union-attr]
        COLOURS["running"], COLOURS["completed"], COLOURS["failed"],
    ]  # fmt: skip
    assert place_of(root)[0] < place_of(left)[0] == place_of(right)[0]
    assert place_of(left)[1] < place_of(root)[1] < place_of(right)[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_parent_stands_in_the_middle_and_families_do_not_touch(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    parents = [None, None, *(chance.randrange(1, number) for number in range(3, 41))]
    rows: list[Row] = [(number, parent, f"{number}", "queued") for number, parent in enumerate(parents, 1)]
    draw_tree(rows, tmp_path / "a.svg")

    places = {int(str(job.get("id"))[3:]): place_of(job) for job in jobs_of(tmp_path / "a.svg")}
    levels: dict[float, list[float]] = {}
    for number, (x, y) in places.items():
        levels.setdefault(x, []).append(y)
        children = [places[child][1] for child, parent in enumerate(parents, 1) if parent == number]
        assert children == sorted(children)
        if children:
            assert y == pytest.approx((children[0] + children[-1]) / 2, abs=0.2)
    apart = min(second - first for rows_of in levels.values() for first, second in pairwise(sorted(rows_of)))
    assert apart >= BOX_HEIGHT + 6


@pytest.mark.parametrize(("size", "fan"), [(1, 1), (2, 1), (40, 3), (200, 4), (1500, 20), (1500, 1500), (3000, 2)])
def test_every_job_is_drawn_and_none_upon_another(tmp_path: Path, size: int, fan: int) -> None:
    draw_tree(some_tree(size, fan), tmp_path / "a.svg")

    jobs = jobs_of(tmp_path / "a.svg")
    assert {job.get("id") for job in jobs} == {f"job{i}" for i in range(1, size + 1)}
    apart = 2 * DOT if size > TALLEST else 20
    places = sorted(map(place_of, jobs))
    for (x1, y1), (x2, y2) in combinations(places, 2):
        if x2 - x1 > apart:
            continue
        assert (x1 - x2) ** 2 + (y1 - y2) ** 2 >= apart**2 - 1


@pytest.mark.parametrize(("size", "fan"), [(40, 3), (100, 4), (1500, 20)])
def test_a_line_leads_to_every_labelled_job_from_its_parent(tmp_path: Path, size: int, fan: int) -> None:
    rows = some_tree(size, fan)
    draw_tree(rows, tmp_path / "a.svg")

    labelled = {
        job.get("id"): place_of(job) for job in jobs_of(tmp_path / "a.svg") if job.find(f"{SVG}text") is not None
    }
    lines = " ".join(line.get("d", "") for line in ET.parse(tmp_path / "a.svg").iter(f"{SVG}path"))
    ends = Counter((round(float(x)), round(float(y))) for y, x in re.findall(r",(-?[\d.]+) H(-?[\d.]+)(?= M|$)", lines))
    if size <= TALLEST:
        ends = Counter(
            (round(float(x)), round(float(y))) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)(?= M|$)", lines)
        )
    del labelled["job1"]
    assert ends == Counter((round(x), round(y)) for x, y in labelled.values())
    assert {f"job{parent}" for _, parent, _, _ in rows[1:]} <= labelled.keys() | {"job1"}


@pytest.mark.parametrize("size", [5, 100, 1500])
def test_everything_is_on_the_paper(tmp_path: Path, size: int) -> None:
    draw_tree(some_tree(size, 20), tmp_path / "a.svg", title="a title that is longer than a small tree is wide")

    root = ET.parse(tmp_path / "a.svg").getroot()
    left, top, width, height = map(float, root.get("viewBox", "").split())
    for x, y in map(place_of, jobs_of(tmp_path / "a.svg")):
        assert left < x < left + width
        assert top < y < top + height
    for text in root.iter(f"{SVG}text"):
        assert len(text.text or "") * 4 < width


@pytest.mark.parametrize("rows", [
    [(i, i - 1 or None, f"link {i}", "queued") for i in range(1, 5000)],
    [(i, None, f"lone {i}", "queued") for i in range(1, 5000)],
])  # fmt: skip
def test_a_long_chain_and_many_roots_stay_a_picture(tmp_path: Path, rows: list[Row]) -> None:
    assert draw_tree(rows, tmp_path / "a.svg") == 4999
    _, _, width, height = map(float, ET.parse(tmp_path / "a.svg").getroot().get("viewBox", "").split())
    assert width < 10_000
    assert height < 10_000


def test_the_title_counts_the_jobs_and_the_legend_their_statuses(tmp_path: Path) -> None:
    rows = some_tree(1500, 20)
    draw_tree(rows, tmp_path / "a.svg", title="All our <jobs>")

    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert root.findtext(f"{SVG}title") == "All our <jobs>: 1,500 jobs"
    assert "All our <jobs>: 1,500 jobs" in texts
    for status, count in Counter(status for *_, status in rows).items():
        assert f"{count} {status}" in texts


def test_a_long_title_keeps_its_ends(tmp_path: Path) -> None:
    draw_tree(some_tree(5, 2), tmp_path / "a.svg", title="A census of " + "/long" * 50 + "/end")

    title = ET.parse(tmp_path / "a.svg").getroot().findtext(f"{SVG}title") or ""
    assert title.startswith("A census of /long")
    assert title.endswith("/long/end: 5 jobs")
    assert len(title) < 120


@pytest.mark.parametrize("size", [20, 1500])
def test_a_recovered_job_is_ringed_labelled_and_explained(tmp_path: Path, size: int) -> None:
    rows: list[Row] = [(1, None, "root", "completed")] + [(i, 1, f"job {i}", "completed") for i in range(2, size + 1)]
    draw_tree(rows, tmp_path / "a.svg", recovered={7: "its run was lost"})

    (job,) = [job for job in jobs_of(tmp_path / "a.svg") if "recovered" in job.get("class", "")]
    assert job.get("id") == "job7"
    assert job.findtext(f"{SVG}title") == "job 7: job 7 (completed; its run was lost)"
    assert job.findtext(f"{SVG}text") == "job 7"
    assert sum(shape.get("stroke") is not None for shape in job) == 1
    texts = [text.text or "" for text in ET.parse(tmp_path / "a.svg").iter(f"{SVG}text")]
    assert "1 recovered: a run of it was lost" in texts


def test_of_many_failed_jobs_a_few_are_labelled_and_all_are_red(tmp_path: Path) -> None:
    rows: list[Row] = [(1, None, "root", "completed")]
    rows += [(i, 1, f"job {i}", "completed" if i % 10 else "failed") for i in range(2, 1001)]
    draw_tree(rows, tmp_path / "a.svg")

    failed = [job for job in jobs_of(tmp_path / "a.svg") if job.get("class") == "job failed"]
    assert len(failed) == 100
    assert {job.find(f"{SVG}circle").get("fill") for job in failed} == {COLOURS["failed"]}  # type: ignore[union-attr]
    assert 1 <= sum(job.find(f"{SVG}text") is not None for job in failed) < 10


def test_several_roots_are_drawn_side_by_side(tmp_path: Path) -> None:
    rows: list[Row] = [(1, None, "a", "queued"), (2, 1, "b", "queued"), (3, 99, "its parent is not here", "queued")]

    assert draw_tree(rows, tmp_path / "a.svg") == 3
    a, b, c = map(place_of, jobs_of(tmp_path / "a.svg"))
    assert a[0] == c[0] < b[0]


def test_labels_and_statuses_of_any_kind_are_drawn_as_they_are(tmp_path: Path) -> None:
    label = '<script>&"\x00\x1b é 漢 🚀' + "x" * 100

    draw_tree([(1, None, label, "new")], tmp_path / "a.svg")

    (job,) = jobs_of(tmp_path / "a.svg")
    shown = '<script>&"\ufffd\ufffd é 漢 🚀'
    assert (job.findtext(f"{SVG}title") or "").startswith(f"job 1: {shown}xxx")
    assert (job.findtext(f"{SVG}text") or "").startswith(shown)
    assert len(job.findtext(f"{SVG}text") or "") == 40


def test_without_jobs_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_tree([], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
