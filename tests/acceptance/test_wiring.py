"""Jobs wired by ports and channels, whose workers are killed: each packet counts once, in order."""

from __future__ import annotations

import pytest

from tests.acceptance.scene import Scene
from tests.acceptance.wiring import Wiring


@pytest.mark.pools("prefork", reason="has workers of its own")
def test_each_packet_counts_once_and_in_order_whoever_is_killed(scene: Scene) -> None:
    wiring = Wiring(scene, workers=3, seed=1)
    wiring.lay(10)

    wiring.pass_through(20, kill_every_s=1, kills=3, stuck_after_s=40)

    scene.settle(30)
    assert wiring.judge(20) == []
