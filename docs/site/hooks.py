"""Makes a site of pages that are written to be read in the repository: mkdocs calls these functions.

The README and its neighbours become pages of the site. A link to another file of the repository stays only as text, or
leads to the repository if its address is known (`repo_url`). The diagram of a job's life becomes a table, because what
draws it would be fetched from another site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Pages that the hosts of repositories look for at the top, and where they are in the site."""

LINK = re.compile(r"\[([^\[\]]+)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOVE = re.compile(r"(\S+) --> (\S+)")
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the top of the repository."""
    for source, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page as the site shows it."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # its group has no other page
    source = next((ROOT / name for name, uri in BESIDE.items() if uri == here), ROOT / "docs" / here)
    parts = FENCED.split(DIAGRAM.sub(_table, markdown))
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda link: _led(link, source, here, config), _indented(part))
        for part in parts
    )


def _led(link: re.Match[str], source: Path, here: str, config: Any) -> str:
    """Return a link as it works in the site; it must lead to a file that exists."""
    text, target, anchor = link[1], link[2], link[3] or ""
    path = (source.parent / target).resolve()
    if not path.exists():
        raise PluginError(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
    name = path.relative_to(ROOT).as_posix()
    uri = BESIDE.get(name) or name.removeprefix("docs/")
    if uri == name and name not in BESIDE:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{name}{anchor})" if config.repo_url else text
    return f"[{text}]({os.path.relpath(uri, os.path.dirname(here) or '.')}{anchor})"


def _indented(text: str) -> str:
    """Return a text in which the lines of a list's item are indented by four spaces, as Python-Markdown wants it."""
    lines, within = [], list[int]()
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        while line.strip() and within and indent < within[-1]:
            within.pop()
        lines.append("    " * len(within) + line[within[-1] if within else 0 :] if line.strip() else line)
        if item := ITEM.match(line):
            within.append(item.end())
    return "\n".join(lines)


def _table(diagram: re.Match[str]) -> str:
    moves: dict[str, list[str]] = {}
    for one, other in MOVE.findall(diagram[1]):
        moves.setdefault("(new)" if one == "[*]" else f"`{one}`", []).append(f"`{other}`")
    rows = [f"| {one} | {', '.join(others)} |" for one, others in moves.items()]
    return "\n".join(["| from | to |", "|---|---|", *rows])
