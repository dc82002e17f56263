"""Where gevent has replaced threads, an unpatched loop goes on while a greenlet computes, and another one does not."""

from __future__ import annotations

from tests.tools.workers import Processes

PROGRAM = """
from gevent import monkey
monkey.patch_all()
import time
from celery_sidejob.services.loop import Loop

class Counting:
    name, count, closed = "counting", 0, False
    def run_once(self):
        self.count += 1
    def wait_s(self):
        return 0.005
    def close(self):
        self.closed = True

real, green = Counting(), Counting()
loops = [Loop(real, unpatched=True), Loop(green)]
for loop in loops:
    loop.start()
while not (real.count and green.count):
    time.sleep(0.01)

began = real.count, green.count
while real.count < began[0] + 20:  # computes, and never gives way
    pass
assert green.count == began[1], "a loop that may use what greenlets use is one"

for loop in loops:
    loop.stop()
assert (real.closed, green.closed) == (True, True)
print("went on")
"""


def test_an_unpatched_loop_goes_on_while_a_greenlet_computes(processes: Processes) -> None:
    program = processes.start_python(PROGRAM)
    assert program.wait(30) == 0, program.log_tail()
    assert "went on" in program.log()
