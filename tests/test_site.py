"""The documentation as a site: each page has its place, the reference has each public name, no link leads nowhere.

The site itself is built where `./run docs` has installed what builds it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import celery_sidejob
from celery_sidejob import testing
from tests.test_reference_page import FOR_OURSELVES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
API = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
BESIDE = {"index.md", "architecture.md", "changelog.md", "contributing.md", "reporting.md"}
"""Pages that stand at the top of the repository."""


def test_every_page_has_its_place() -> None:
    placed = Counter(re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert placed == Counter([page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")] + sorted(BESIDE))


def test_every_public_name_is_in_the_reference() -> None:
    shown = Counter(re.findall(r"^::: celery_sidejob\.([\w.]+)$", API, re.MULTILINE))
    assert shown == Counter([*celery_sidejob.__all__, *(f"testing.{name}" for name in testing.__all__)])


def test_the_reference_leaves_out_the_calls_for_ourselves() -> None:
    (hidden,) = re.findall(r"^::: celery_sidejob\.SideJob\n.*\n.*\"!\^\((.*)\)\$\"", API, re.MULTILINE)
    assert set(hidden.split("|")) == FOR_OURSELVES


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("the site is not built: run `./run docs` once, which installs mkdocs into .venv-docs")
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", built],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_the_site_asks_no_other_site(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//", re.IGNORECASE)
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert [
        page.name for page in pages if loaded.search(page.read_text()) or 'class="mermaid"' in page.read_text()
    ] == []


def test_the_site_can_be_searched_without_a_server(site: Path) -> None:
    assert "fencing number" in (site / "search" / "search_index.js").read_text().lower()
    assert "iframe-worker" in (site / "index.html").read_text()


def test_the_reference_is_made_from_the_docstrings(site: Path) -> None:
    page = (site / "api" / "ports.html").read_text()
    assert 'id="celery_sidejob.Port.write"' in page
    assert "Append one value and ask the reader to run" in page
