"""The picture of a graph of jobs."""

from __future__ import annotations

import random
import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from celery_sidejob.cli.drawing import COLOURS, DOT, TALLEST, draw_tree
from celery_sidejob.model.status import Status

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
        (i, chance.randrange(max(1, i // fan - 3), max(2, i // fan + 1)), f"job {i}", chance.choice(list(Status)))
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


@pytest.mark.parametrize(("size", "fan"), [(1, 1), (2, 1), (40, 3), (200, 4), (1500, 20), (1500, 1500)])
def test_every_job_is_drawn_and_none_upon_another(tmp_path: Path, size: int, fan: int) -> None:
    draw_tree(some_tree(size, fan), tmp_path / "a.svg")

    jobs = jobs_of(tmp_path / "a.svg")
    lines = list(ET.parse(tmp_path / "a.svg").iter(f"{SVG}path"))
    assert (len(jobs), len(lines)) == (size, size - 1)
    apart = 2 * DOT if size > TALLEST else 20
    places = sorted(map(place_of, jobs))
    for (x1, y1), (x2, y2) in combinations(places, 2):
        if x2 - x1 > apart:
            continue
        assert (x1 - x2) ** 2 + (y1 - y2) ** 2 >= apart**2 - 1


@pytest.mark.parametrize("size", [5, 1500])
def test_everything_is_on_the_paper(tmp_path: Path, size: int) -> None:
    draw_tree(some_tree(size, 20), tmp_path / "a.svg")

    root = ET.parse(tmp_path / "a.svg").getroot()
    left, top, width, height = map(float, root.get("viewBox", "").split())
    for x, y in map(place_of, jobs_of(tmp_path / "a.svg")):
        assert left < x < left + width
        assert top < y < top + height


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
