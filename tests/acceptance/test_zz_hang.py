import os, signal, time
import pytest
from tests.acceptance.outage_site import Site, site_fixture

@pytest.mark.parametrize("n", range(int(os.environ.get("N", "12"))))
def test_hang(site, n):
    running = site.hold("gate", [1, 2])
    waiting = site.hold("gate", [3])
    worker = site.start_worker()
    site.record.wait_for("holding", job=running.id)
    worker.send_signal(signal.SIGQUIT)
    worker.wait(45)
    site.wait_for(running, "queued")
    site.open("gate")
    w = site.start_worker(name="elsewhere", extra=["--loglevel=DEBUG"])
    try:
        for j in (running, waiting): site.wait_for(j, "completed", 8)
    except TimeoutError:
        print(site.rows("select id,status,run_no,unit_no from jobs"), site.rows("select * from messages"))
        print(site.record.read())
        for pid in w.children(): os.kill(pid, signal.SIGABRT)
        time.sleep(1)
        print(w.log()[-9000:])
        raise
