"""The name by which people find one process."""

from __future__ import annotations

import os
from multiprocessing import get_context

from celery_sidejob.model.native import new_process_name


def test_all_names_of_a_process_begin_alike_and_a_fork_has_another() -> None:
    first, second = new_process_name(), new_process_name()
    assert first.split(":")[1] == str(os.getpid())
    assert first != second
    assert first.split(".")[0].rpartition(":")[2] == second.split(".")[0].rpartition(":")[2]
    with get_context("fork").Pool(1) as pool:
        other = pool.apply(new_process_name)
    assert other.split(":")[1:2] != first.split(":")[1:2]
    assert other.rpartition(":")[2] not in first
