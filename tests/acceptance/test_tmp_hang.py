import os, signal, time, pytest
from tests.acceptance.scene import Scene, Workload
from tests.acceptance import checker
pytest_plugins = []
@pytest.mark.parametrize("n", range(30))
def test_hang(scene, n):
    worker = scene.worker(concurrency=2)
    w = Workload.start(scene)
    try:
        scene.settle(9)
    except BaseException:
        for pid in worker.children():
            os.kill(pid, signal.SIGABRT)
        time.sleep(1)
        print("FULL", worker.log()[-40000:]); raise
