"""What a tooltip says is what the glossary says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_sidejob.model.status import Status
from celery_sidejob.operations.waiting import REASONS as WAITS
from celery_sidejob.web.rendering import REASONS, STATUSES, WORDS

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()


@pytest.mark.parametrize("word", WORDS)
def test_a_word_means_what_the_glossary_says(word: str) -> None:
    section = re.search(rf"^## {word.capitalize()}\n\n(.*?)\n\n", GLOSSARY, re.MULTILINE | re.DOTALL)
    assert section is not None
    meaning = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", section[1]).replace("\n", " ").replace("`", "")
    assert meaning.startswith(WORDS[word])


def test_every_status_and_every_reason_is_explained() -> None:
    assert set(STATUSES) == set(Status)
    assert set(REASONS) == set(WAITS)
