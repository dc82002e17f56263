import os, signal, time
import pytest
from tests.acceptance.outage_site import Site, site_fixture

@pytest.mark.parametrize("n", range(int(os.environ.get("N", "10"))))
def test_hang(site, n):
    job = site.sidejob.enqueue("outage.obey")
    worker = site.start_worker()
    site.record.wait_for("holding", job=job.id)
    worker.terminate()
    try:
        assert worker.wait(12) == 0
    except TimeoutError:
        print(site.record.read(), site.rows("select id,status,run_no,unit_no from jobs"))
        for pid in worker.group(): os.kill(pid, signal.SIGUSR2)
        time.sleep(1)
        print(worker.log()[-12000:])
        raise
