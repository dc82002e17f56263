"""A short walk of the machine; `./run proof graph` takes a long one.

`./run proof graph --seed 1` has found each of these faults in its first forty walks, when the line that
prevents it was taken back:

- the end of a child asks its parent (`_end` in `operations/runs/endings.py`);
- an adoption looks for a circle (`Family._adopt`), and a deletion at all below the job
  (`operations/changes/deletion.py`);
- a unit compares the marks of its run (`check_fence`, and the statement of the fence in `store/claims.py`);
- a forced run of a terminating job neither cancels the termination (`_ASK` in `store/asks.py`) nor is forgotten
  (`_REVIVED` in `store/run_ends.py`);
- a termination removes timers, and a claim those that are due;
- a child that came late below a terminated tree does not run (`came_late` in `store/claims.py`);
- a shutdown of a tree reaches children that came since, also if it was given up;
- a new job is made after the name that it is given was freed (`_parts` in `operations/changes/unit_of_work.py`).
"""

from __future__ import annotations

from tests.graph.machine import Graph
from tests.graph.real import Real
from tests.twins.walks import beside, short_walk


def test_the_store_does_what_the_model_does(stage_database_url: str) -> None:
    with beside(Graph, Real, stage_database_url):
        short_walk(Graph)
