"""Steps of jobs against DBOS, absurd, and procrastinate with a column of one's own, in turns on one Postgres.

    pip install dbos absurd-sdk absurdctl procrastinate
    python -m benchmarks steps [--rounds 5] [--steps 3000] [--concurrency 2]

Each library has a database of its own in the same durable Postgres, and one worker that runs so many jobs at a time:
this package in processes of prefork, the others in threads. Other settings are as they come, but DBOS looks for work
each 10 ms. A step does nothing. Jobs of 1, 10 and 100 steps are made while the worker stands still; what counts is the
time from the end of the first to the end of the last. Then jobs that have done 100 steps wait, and are woken: what
counts is the time for each, beside that of jobs without steps.

A job here waits by `receive`. DBOS waits in the thread of a workflow, which does not come back as long as its process
lives: there the workflow is forked behind its steps, which is what its recovery does too. procrastinate has no steps:
the body there has a table with one row for each job, which says how many steps are done, and each step is an UPDATE.
"""

from __future__ import annotations


# Workers and clients import this file with theirs: nothing heavy here.
def main(arguments: list[str]) -> int:
    """Compare; return 1 if a bound is not met."""
    from benchmarks.steps.comparison import main as compare

    return compare(arguments)
