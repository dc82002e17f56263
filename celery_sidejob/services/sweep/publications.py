"""Delivers channel messages whose publisher has died, or has left the rest of many subscribers to the sweeper."""

from __future__ import annotations

from ...model.errors import StoreUnavailableError
from ...operations.publications import deliver_page
from ...store import publications
from ..duty import Count, Report
from .sweep import SweepDuty

CHANNELS = 100
"""Channels of one turn; the next turn begins after them."""

PAGES = 20
"""Pages of one turn, unless there are more channels: each gets one."""


class Publications(SweepDuty):
    """Delivers pages of publications, of each channel in turn."""

    counts = (Count("publications", "Pages of published messages that their publishers had not delivered."),)
    interval_s = 1.0

    _after = ""

    def _do(self, report: Report) -> None:
        channels = publications.channels(self._connections, after=self._after, limit=CHANNELS)
        self._after = channels[-1] if len(channels) == CHANNELS else ""
        done = 0
        while channels and (done == 0 or done < PAGES):
            for channel in list(channels):
                if not self._sweep.may_go_on():
                    return
                if self._deliver(channel):
                    done += 1
                    report["publications"] += 1
                else:
                    channels.remove(channel)

    def _deliver(self, channel: str) -> bool:
        """Deliver a page, unless the channel is set aside; a job that cannot be asked is left to the timers' duty."""
        with self._sweep.aside.by_itself("publication", channel, kind="Channel") as may:
            if not may:
                return False
            try:
                return deliver_page(self._runtime, channel)
            except StoreUnavailableError:
                raise
            except Exception:
                return deliver_page(self._runtime, channel, noting=True)
        return False
