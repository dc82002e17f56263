"""Rows of `messages`, the outbox: messages for the broker, sent or not, whose work is not finished.

A row is the doorbell for a job's next run, the whole message of an ordinary durable task, or a continuation of an
asking. Doorbells and tasks share one life, and a statement of it is written once for both; `kinds.py` has the two
things in which they differ. One file for each step:

- armed for a job's run (`arming.py`); kept for a task (`tasks.py`), or as a continuation (`doorbells.py`, which also
  reads the rows of jobs)
- published and marked, or reserved by a sweeper that publishes it; checked while its message waits: postponed, vouched
  for, hastened, published again (`publishing.py`)
- held by a run, and given back or dropped at its end (`holds.py`)
- doomed (`tasks.py`), and moved to the dead set (`burials.py`)
"""
