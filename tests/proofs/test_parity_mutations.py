"""The mutations of the parity page can be applied as they stand, and a seed always chooses the same ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from proofs.parity_mutations.choice import choose
from proofs.parity_mutations.table import ROOT, Mutation, items_with_tests, mutations
from proofs.parity_mutations.tree import Tree

MUTATIONS = mutations()


def test_each_is_of_an_item_that_has_a_test() -> None:
    tests = items_with_tests()
    assert [item for item in MUTATIONS if not tests.get(item)] == []


@pytest.mark.parametrize("item", MUTATIONS)
def test_its_old_text_is_there_once_and_the_new_one_is_python(item: str) -> None:
    mutation = MUTATIONS[item]
    text = (ROOT / mutation.file).read_text()
    changed = mutation.applied(text)
    assert changed != text
    ast.parse(changed)


@pytest.mark.parametrize(("text", "times"), [("a = 1\n", 0), ("b = 1; b = 1\n", 2)])
def test_a_text_that_is_not_there_once_is_refused(text: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"SJ-001: some.py has its old text {times} times"):
        Mutation("SJ-001", "b is two", "some.py", "b = 1", "b = 2").applied(text)


def test_a_seed_chooses_the_same_items_and_another_one_others() -> None:
    items = [f"SJ-{number:03}" for number in range(100)]
    chosen = choose(items, 10, 7)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 10
    assert choose(items[::-1], 10, 7) == chosen
    assert choose(items, 10, 8) != chosen
    assert choose(items, 200, 7) == items


NUMBERS = "def number():\n    return {}\n"
TEST = "from numbers_ import number\n\n\ndef test_number():\n    assert number() == 1\n"
CONFTEST = "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent))\n"


def test_a_tree_tells_what_became_of_a_mutation_and_is_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbers_.py").write_text(NUMBERS.format("1"))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_number.py").write_text(TEST)
    (tmp_path / "test_nothing.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr("proofs.parity_mutations.tree.ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    with Tree() as tree:
        with tree.broken_by(Mutation("SJ-001", "another number", "numbers_.py", "return 1", "return 2")):
            assert tree.run(["test_number.py"]).verdict == "killed"
        assert tree.run(["test_number.py"]).verdict == "survived"
        assert tree.run(["test_nothing.py"]).verdict == "invalid"
    assert (tmp_path / "numbers_.py").read_text() == NUMBERS.format("1")
