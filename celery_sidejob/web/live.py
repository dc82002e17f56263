"""Server-sent events: an open page is told when it has changed, and then asks for itself again.

All open pages of a process share one task that looks at the store for them, one page after the other. It makes a page
anew, however many people have it open, and compares it with the last time. After each look it waits in proportion to
the number of statements, so that open pages cost the store about `PACE` statements a second, whatever their number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..inspection.jobs import JobViews
from ..model.logger import logger
from .site import LIVE, SEEN, Entry, Refused, Shown, Site, Visit

MOST = 200
"""How many pages are live at once in a process."""
PACE = 15.0
"""How many statements a second the looks for open pages cost."""
EVERY_S = 4.0
"""Seconds between two looks at a page, or more where the pace does not allow it."""
CHECK_S = 1.0
"""Seconds between two checks of the jobs that have a page open; one statement for all of them."""
UNCHANGED_S = 60.0
"""After so many seconds the page of a job is looked at even if the job has not changed."""
KNOWN_S = 30.0
"""After so many seconds, and `QUIET_S` at most, it is asked again who reads: an open page ends with its session."""
QUIET_S = 15.0
"""After so many quiet seconds a comment is sent, so that proxies keep the connection."""


@dataclass(eq=False, slots=True)
class _Reader:
    """An open page, and the content that it shows."""

    seen: str
    come: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _View:
    """A page that is open once or more."""

    entry: Entry
    visit: Visit
    """The visit of its first reader; the content of a page is the same for all readers."""
    job_id: int | None
    readers: set[_Reader] = field(default_factory=set)
    due_at: float = 0.0
    version: str = ""
    """The version of the job when it was last looked at."""


class Live:
    """The pages of a site that are open, and the task that looks at them."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._views: dict[str, _View] = {}
        self._task: asyncio.Task[None] | None = None
        self._checked_at = 0.0

    def routes(self, entries: tuple[Entry, ...]) -> list[Route]:
        """Return the routes of the events of all pages that are live."""
        return [Route(LIVE + entry.path, self._endpoint(entry)) for entry in entries if entry.price]

    def _endpoint(self, entry: Entry) -> Any:
        async def endpoint(request: Request) -> Response:
            user = await run_in_threadpool(self._site.user_of, request)
            if user is None:
                raise Refused(403, "Not logged in", "Log in first.")
            visit = Visit(self._site, request, user)
            if visit.key not in self._views:  # a page that is not there is refused, and not looked at again and again
                await run_in_threadpool(self._site.guarded, entry.page, visit)
            if sum(len(view.readers) for view in self._views.values()) >= MOST:
                raise Refused(503, "Too many live pages", "Load the page again to see what is new.")
            if request.method == "HEAD":
                return Response(media_type="text/event-stream")
            events = self._events(entry, visit)
            await anext(events)  # it counts from here on: nothing was awaited since the others were counted
            return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

        return endpoint

    async def _events(self, entry: Entry, visit: Visit) -> AsyncIterator[str]:
        """Yield an empty text once the page is open, and an event for each change.

        An event says nothing of the change: the page is asked for, by who may see it.
        """
        with self._open(entry, visit) as reader:
            yield ""
            yield "retry: 3000\n\n"  # the browser comes again after so many milliseconds, if the connection is lost
            yield "event: listening\ndata:\n\n"
            known_at = time.monotonic()
            while True:
                if time.monotonic() > known_at + KNOWN_S:
                    if await run_in_threadpool(self._site.user_of, visit.request) is None:
                        return
                    known_at = time.monotonic()
                try:
                    await asyncio.wait_for(reader.come.wait(), QUIET_S)
                except TimeoutError:
                    yield ": quiet\n\n"
                    continue
                reader.come.clear()
                yield "event: changed\ndata:\n\n" if visit.key in self._site.kept else "event: trouble\ndata:\n\n"

    @contextmanager
    def _open(self, entry: Entry, visit: Visit) -> Iterator[_Reader]:
        job_id = int(visit.request.path_params["id"]) if entry.is_of_job else None
        view = self._views.setdefault(visit.key, _View(entry, visit, job_id))
        reader = _Reader(visit.request.query_params.get(SEEN, ""))
        view.readers.add(reader)
        kept, loop = self._site.kept.get(visit.key), asyncio.get_running_loop()
        if kept is None or kept.digest != reader.seen:
            view.due_at = 0.0
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())
        try:
            yield reader
        finally:
            view.readers.discard(reader)
            if not view.readers:
                self._views.pop(visit.key, None)
                self._site.kept.pop(visit.key, None)

    async def _run(self) -> None:
        """Look at what is due, until no page is open."""
        while self._views:
            await self._check_jobs()
            key, view = min(self._views.items(), key=lambda item: item[1].due_at, default=(None, None))
            if key is None or view is None:
                return
            if view.due_at <= time.monotonic():
                await self._look(key, view)
                await asyncio.sleep(view.entry.price / PACE)
            else:
                await asyncio.sleep(min(view.due_at - time.monotonic(), CHECK_S / 2))

    async def _check_jobs(self) -> None:
        """Make the pages due whose jobs have changed."""
        views = [view for view in self._views.values() if view.job_id is not None]
        if not views or time.monotonic() < self._checked_at + CHECK_S:
            return
        ids = {view.job_id for view in views if view.job_id is not None}
        try:
            found = await run_in_threadpool(JobViews(self._site.sidejob.runtime).versions, ids)
        except Exception as error:
            logger.debug("Open pages of jobs are not checked: %s", error)
            found = {}
        self._checked_at = time.monotonic()
        for view in views:
            version = found.get(view.job_id or 0, "")
            if view.version != version:
                view.version, view.due_at = version, 0.0

    async def _look(self, key: str, view: _View) -> None:
        """Make a page anew, and tell those that show something else."""
        view.due_at = time.monotonic() + (EVERY_S if view.job_id is None else UNCHANGED_S)
        try:
            shown = await run_in_threadpool(self._site.guarded, view.entry.page, view.visit)
        except Exception as error:
            logger.debug("An open page cannot be made: %s", error)
            shown, view.due_at = None, time.monotonic() + EVERY_S
        if not view.readers:
            return
        if isinstance(shown, Shown):
            self._site.kept[key] = shown
        else:
            self._site.kept.pop(key, None)
        seen = shown.digest if isinstance(shown, Shown) else ""
        for reader in view.readers:
            if reader.seen != seen:
                reader.seen = seen
                reader.come.set()
