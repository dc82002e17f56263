"""The guides show what the examples hold, name commands that exist, and link to what is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from _pytest.mark import ParameterSet
from celery.bin.celery import celery

from celery_sidejob.cli import sidejob
from tests.tools.workers import ROOT

GUIDES = {
    "django": "django_shop", "flask": "flask_shop", "fastapi": "fastapi_shop", "kubernetes": "kubernetes",
    "coroutines": "coroutines", "moving_results": "moving_results", "ports": "ports", "situations": "situations",
    "steps": "steps", "units": "units",
}  # fmt: skip
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in these languages."""
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def excerpts() -> list[ParameterSet]:
    """Each block of the guides that shows a file, which its first line names."""
    found = []
    for guide, example in GUIDES.items():
        for text in blocks(ROOT / "docs" / f"{guide}.md", "python", "yaml"):
            name, _, shown = text.partition("\n")
            file = ROOT / "examples" / example / name.removeprefix("# ")
            found.append(pytest.param(file, shown, id=f"{guide}-{name[2:]}"))
    return found


@pytest.mark.parametrize(("file", "shown"), excerpts())
def test_what_is_shown_stands_in_the_example(file: Path, shown: str) -> None:
    assert shown in file.read_text()


def commands() -> list[list[str]]:
    """Each `celery …` command that a page shows, in a block or in its text."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(page, "", "sh") for line in block.splitlines()]
        for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
            for part in re.split(r"&&|;| \| ", line.partition("#")[0]):
                words = part.split()
                if words[:2] == ["celery", "-A"] and not re.search(r"[…<\[]", part):
                    found.add(" ".join(words))
    return [shlex.split(command) for command in sorted(found)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    """Their options and arguments are parsed; nothing is run."""
    group: click.Command = sidejob if words[3] == "sidejob" else celery
    rest = words[4:] if words[3] == "sidejob" else words[3:]
    context = click.Context(group)
    while isinstance(group, click.Group):
        if group.invoke_without_command and (not rest or rest[0].startswith("-")):
            break
        command = group.get_command(context, rest[0])
        assert command is not None, f"there is no command {rest[0]}"
        group, rest = command, rest[1:]
    group.make_parser(context).parse_args(list(rest))
    wanted = sum(isinstance(parameter, click.Argument) and parameter.required for parameter in group.params)
    given = len([word for word in rest if not word.startswith("-")])
    assert given >= wanted


def test_the_reference_names_all_commands() -> None:
    (listed,) = re.findall(r"`celery -A app sidejob (\w+(?: \| \w+)+)`", (ROOT / "docs" / "reference.md").read_text())
    assert set(listed.split(" | ")) == set(sidejob.commands)


def test_there_are_commands_to_look_at() -> None:
    assert len(commands()) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
