"""Runs one of the proofs: `python -m proofs <name> [options]`; without a name it lists them."""

from __future__ import annotations

import sys

from benchmarks.__main__ import run

PROOFS = {
    "graph": "200,000 operations on jobs, families, timers and deaths, compared with a plain model after each",
    "dataflow": "200,000 operations on ports, channels and runs, compared with a plain model after each",
    "wiring": "jobs wired by ports and channels, whose workers are killed, and whether each packet counts once",
    "kills": "workers killed while they fetch, on sidejob:// and on kombu's redis://, and what is lost",
    "deaths": "workers on sidejobpg:// that die, stand still and lose their Postgres, and what is lost or runs twice",
    "runs": "jobs, steps and durable tasks whose workers and processes are killed, and whether each effect counts once",
    "storm": "durable tasks of all forms in a storm of kills and outages, and whether each has ended once",
    "soak": "hours of mixed load with outages in every state, and whether every promise was kept",
    "million": "what each statement of workers, and each page of commands and of the web, costs over a million rows",
    "parity_mutations": "lines of the package that are broken, and whether the tests that prove them fail",
}
"""Each is a module here with `main(arguments)`, which returns an exit code or None."""

if __name__ == "__main__":
    sys.exit(run("proofs", PROOFS, sys.argv[1:], usage=__doc__))
