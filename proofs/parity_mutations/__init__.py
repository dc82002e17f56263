"""Whether the tests that tests/parity/sidejob.md names fail when the line is broken that does what they prove.

    python -m proofs parity_mutations [--seed 7] [--items 60] [--only SJ-081,WS-06] [--at-once 1]

`mutations.toml` has for each item of the page a file, a text in it, and a text that takes its place. Items are chosen
by the seed. First their tests are run in a copy of the tree as it is: all must pass. Then each item's text is exchanged
in the copy, and the item's tests are run until one fails. A mutation that no test notices has survived: a stronger test
is due. The proof ends with 1 if one survives.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from .choice import choose, countable
from .table import Mutation, items_with_tests, mutations
from .tree import Outcome, Tree


def main(arguments: list[str]) -> int:
    """Break, run, print; return 1 if a mutation survives, or if a test fails without one."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs parity_mutations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="ID,ID", help="these items, no others")
    parser.add_argument("--at-once", type=int, default=1, help="trees in which mutations are tried at the same time")
    given = parser.parse_args(arguments)
    known, tests = mutations(), items_with_tests()
    chosen = given.only or choose(known, given.items, given.seed)
    print(f"{len(chosen)} of {len(known)} items with a mutation; {len(countable(tests))} items have tests", flush=True)
    with ExitStack() as stack:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for _ in range(given.at_once):
            trees.put(stack.enter_context(Tree()))
        if not _pass_unbroken(trees, sorted({test for item in chosen for test in tests[item]})):
            return 1
        began = time.monotonic()

        def outcome_of(item: str) -> Outcome:
            tree = trees.get()
            try:
                return _tried(tree, known[item], tests[item])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(given.at_once) as pool:
            outcomes = list(pool.map(outcome_of, chosen))
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())} in {time.monotonic() - began:.0f} s")
    return int(set(counts) != {"killed"})


def _pass_unbroken(trees: SimpleQueue[Tree], tests: list[str]) -> bool:
    """Tell whether the tests pass in a tree as it is; else print what fails."""
    tree = trees.get()
    outcome = tree.run(tests, timeout_s=60 + 30 * len(tests))
    trees.put(tree)
    print(
        f"unbroken, {len(tests)} tests pass in {outcome.took_s:.0f} s" if outcome.passed else outcome.output, flush=True
    )
    return outcome.passed


def _tried(tree: Tree, mutation: Mutation, tests: list[str]) -> Outcome:
    with tree.broken_by(mutation):
        outcome = tree.run(tests)
    print(
        f"{mutation.item:7} {outcome.verdict:9} {outcome.took_s:4.0f} s  {mutation.breaks}: {outcome.why}", flush=True
    )
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
