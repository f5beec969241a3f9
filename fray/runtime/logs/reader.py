"""Log reader: pulls the lines of a job, or of a job and its descendants, and follows them to their end if requested.

Invariants: a reader requests pages, attempt by attempt, by line numbers that only it stores. After any interruption
(a cut, a controller restart) it continues at its own position, so that no line comes twice, and none is lost silently:
lines that no longer exist are shown as a gap. Lines that are only unavailable now are a gap, too, and come later if the
log is followed. Lines of several attempts are merged by time, as far as their machines' clocks agree.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio
from attrs import define, field, frozen

from fray.errors import InvalidRequest, NoSuchJob
from fray.model.ids import AttemptId, JobId, split_attempt
from fray.model.log_records import STREAMS, LogLine, unpack
from fray.model.messages.client import LogAppended, LogSource, LogSources, WatchLogs
from fray.model.messages.node import LogPage, ReadLog
from fray.runtime.controller_client.log_lines import CUT_OFF, LogLineDecoder
from fray.runtime.logs.archive import ArchivedLog

if TYPE_CHECKING:
    from fray.runtime.controller_client.client import ControllerClient
    from fray.runtime.controller_client.jobs import JobRecord

PAGES_AT_ONCE = 16
"""Number of attempts whose pages are requested at the same time."""
PAGE_LEAST_BYTES = 8 * 1024
PAGES_BYTES = 1024 * 1024
"""Approximate total size of the pages of all attempts of a tree."""
LOOK_AGAIN_S = 10.0
"""Seconds without hints after which a following reader requests pages anyway.

The answer shows whether machines are gone, and whether everything of an ended job has arrived.
"""
CLOSING_LOOK_S = 0.2
TAIL_LIMIT = 100_000
CONTAINS_LIMIT_CHARS = 1_000


@frozen(kw_only=True)
class LogQuery:
    """Selection of log lines; the fields are the arguments of `Job.logs`."""

    job_id: JobId
    tail: int | None = None
    since_s: float | None = None
    follow: bool = False
    attempt: AttemptId | int | None = None
    stream: str = ""
    contains: str = ""
    tree: bool = False

    def __attrs_post_init__(self) -> None:
        if self.stream and self.stream not in STREAMS:
            raise InvalidRequest(f"invalid stream={self.stream!r}; expected 'out', 'err' or 'sys', or leave it out")
        if self.tail is not None and not (isinstance(self.tail, int) and 0 <= self.tail <= TAIL_LIMIT):
            raise InvalidRequest(f"tail={self.tail!r} must be 0 to {TAIL_LIMIT} lines; leave it out for all of them")
        if self.since_s is not None and not self.since_s >= 0:
            raise InvalidRequest(f"since_s={self.since_s} must be 0 or more seconds ago")
        if not isinstance(self.contains, str) or len(self.contains) > CONTAINS_LIMIT_CHARS:
            raise InvalidRequest(f"contains= must be a text of at most {CONTAINS_LIMIT_CHARS} characters")


@define(eq=False)
class _ReadPosition:
    """Position of the reader in the log of one attempt."""

    lines: LogLineDecoder
    next: int | None = None
    """Number of the next line; None: reading has not begun."""
    waiting: deque[LogLine] = field(factory=deque)
    caught_up: bool = False
    has_ended: bool = False
    hints: int = 0
    """Number of hints that there is more."""
    is_silent: bool = False
    """Flag: its machine did not answer last time, and a gap line says so."""
    archive: ArchivedLog | None = None
    """Archive from which it is read for now."""
    archive_is_read: bool = False

    @property
    def source(self) -> LogSource:
        return self.lines.source

    @property
    def is_behind(self) -> bool:
        return not self.waiting and not self.caught_up


class LogReader:
    """An async iterator of `LogLine`: ``async for line in job.logs(follow=True)``.

    Leave it by `aclose` (or use ``async with``) if it follows and is not read to its end.
    """

    def __init__(self, client: ControllerClient, query: LogQuery) -> None:
        self._client, self._query = client, query
        self._places: dict[AttemptId, _ReadPosition] = {}
        self._ready: deque[LogLine] = deque()
        self._record: JobRecord | None = None
        self._moved = trio.Event()
        self._must_look = self._is_first_look = True
        self._all_ended = self._is_done = False
        self._in_tail = query.tail is not None
        self.watched = (query.job_id, query.tree)
        self._unknown_attempts: set[AttemptId] = set()

    def __aiter__(self) -> LogReader:
        return self

    async def __aenter__(self) -> LogReader:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def __anext__(self) -> LogLine:
        """Return the next line. Raises StopAsyncIteration, NoSuchJob, ConnectionFailed."""
        while not self._ready:
            if self._is_done:
                raise StopAsyncIteration
            await self._step()
        return self._ready.popleft()

    def take_ready(self) -> list[LogLine]:
        """Return the lines that have arrived already, without waiting."""
        found = list(self._ready)
        self._ready.clear()
        return found

    async def aclose(self) -> None:
        """Stop following. Reading after this ends at once."""
        self._is_done = True
        self._ready.clear()
        if self._record is not None:
            record, self._record = self._record, None
            if self._on_ended in record.callbacks:
                record.callbacks.remove(self._on_ended)
            await self._client.logs.remove_reader(self)

    # One step

    async def _step(self) -> None:
        if self._must_look:
            await self._look_for_sources()
        behind = [place for place in self._places.values() if place.is_behind]
        if behind:
            # Lines can be merged by time only when each attempt has its next ones.
            await self._fetch(behind)
            if any(place.is_behind for place in behind):
                return
        if self._in_tail:
            await self._take_tail()
        self._merge()
        if self._ready or any(place.is_behind for place in self._places.values()):
            return
        if not self._query.follow or self._all_ended:
            await self.aclose()
        else:
            await self._wait()

    async def _look_for_sources(self) -> None:
        self._must_look = False
        query = self._query
        # Followed before the sources are listed, so that an attempt which starts in between is noticed.
        if query.follow and self._record is None:
            (self._record,) = await self._client.jobs.watch([query.job_id])
            self._client.logs.add_reader(self)
            self._record.callbacks.append(self._on_ended)
        reply = await self._client.request(WatchLogs(job=query.job_id, tree=query.tree, follow=query.follow))
        assert isinstance(reply, LogSources)
        for source in _select(reply.sources, query.attempt):
            self._add_source(source)
        self._all_ended = reply.ended
        self._is_first_look = False

    def _add_source(self, source: LogSource) -> _ReadPosition:
        place = self._places.get(source.attempt_id)
        if place is None:
            # of an attempt that starts later all lines are returned, whatever ``tail`` is
            place = self._places[source.attempt_id] = _ReadPosition(
                LogLineDecoder(source), next=None if self._is_first_look else 0
            )
        place.hints += 1
        # A hint says that there is more, unless the log is known to be complete.
        place.caught_up = place.caught_up and place.has_ended
        return place

    def on_appended(self, moved: LogAppended | None) -> None:
        """Note that one attempt has printed more; None: any may have, as hints may have been lost."""
        if moved is None:
            self._must_look = True
        elif moved.source.attempt_id in self._places:
            self._add_source(moved.source)
        elif moved.source.attempt_id in self._unknown_attempts:
            return
        else:  # a new attempt of this job, or one of another reader's job
            self._unknown_attempts.add(moved.source.attempt_id)
            self._must_look = True
        self._moved.set()

    def _on_ended(self) -> None:
        self._must_look = True
        self._moved.set()

    async def _wait(self) -> None:
        is_ending = self._record is not None and self._record.ended.is_set()
        if self._record is not None and self._record.lost is not None:
            raise self._record.lost
        # After the end of the job its last lines arrive soon; until then there may be nothing new for hours.
        with trio.move_on_after(CLOSING_LOOK_S if is_ending else LOOK_AGAIN_S):
            await self._moved.wait()
            self._moved = trio.Event()
            return
        # Hints may be lost with a connection, and a machine may be gone: after a while it looks regardless.
        self._must_look = True

    # Pages

    async def _fetch(self, places: Sequence[_ReadPosition]) -> None:
        # All attempts share the total, so a gang of 1,000 members does not need 1 GB for one page each.
        limit = max(PAGE_LEAST_BYTES, PAGES_BYTES // (4 * len(self._places)))
        async with trio.open_nursery() as nursery:
            for place in places[:PAGES_AT_ONCE]:
                nursery.start_soon(self._fetch_one, place, limit)

    async def _fetch_one(self, place: _ReadPosition, limit_bytes: int) -> None:
        if place.archive is not None:
            await self._fetch_archived(place, place.archive)
            return
        # A hint that arrives during the request may be newer than the page.
        hints = place.hints
        try:
            page, blobs = await self._client.request_blobs(self._page_request(place, limit_bytes))
        except NoSuchJob:
            place.waiting.append(
                place.lines.gap_line(place.next or 0, None, "the cluster has dropped the record of this attempt")
            )
            place.caught_up = place.has_ended = True
            return
        assert isinstance(page, LogPage)
        start = page.start if place.next is None else place.next
        # A machine that may come back still has these lines, so the archive is not needed.
        is_lost = not page.retry and (page.first > start or bool(page.missing))
        if page.archive and is_lost and not place.archive_is_read:
            place.next, place.archive = start, ArchivedLog(page.archive, place.source.attempt_id)
            return
        self._apply_page(place, start, page, bytes(blobs[0]) if blobs else b"")
        place.caught_up = place.caught_up and hints == place.hints

    def _page_request(self, place: _ReadPosition, limit_bytes: int) -> ReadLog:
        query = self._query
        return ReadLog(
            attempt_id=place.source.attempt_id,
            first=0 if place.next is None and query.tail is None and query.since_s is None else place.next,
            tail=query.tail,
            since_s=query.since_s,
            stream=query.stream,
            contains=query.contains,
            limit_bytes=limit_bytes,
        )

    def _apply_page(self, place: _ReadPosition, start: int, page: LogPage, data: bytes) -> None:
        if page.retry and self._query.follow and page.first > start:
            place.next, place.caught_up = start, True  # the lines come when the machine is back
            self._note_missing(place, start, page.missing)
            return
        if page.first > start:
            until = next((time for _, _, time, _ in unpack(data)), None)
            place.waiting.append(place.lines.gap_line(start, page.first - start, page.missing or CUT_OFF, until=until))
        place.waiting.extend(place.lines.read(data, page.first, page.next, self._query.stream, self._query.contains))
        place.next, place.caught_up, place.has_ended = page.next, page.caught_up, page.ended
        if page.missing and page.caught_up:
            self._note_missing(place, page.next, page.missing)
        elif not page.missing:
            place.is_silent = False

    def _note_missing(self, place: _ReadPosition, number: int, why: str) -> None:
        # One gap line for each silence, however often the machine is asked.
        if not place.is_silent:
            place.is_silent = True
            place.waiting.append(place.lines.gap_line(number, None, why))

    async def _fetch_archived(self, place: _ReadPosition, archive: ArchivedLog) -> None:
        """Read from the archive of a machine that is gone; the rest is then requested from the controller."""
        start = place.next or 0
        try:
            chunk = await archive.read(start)
        except Exception as error:  # noqa: BLE001 - storages raise anything
            place.waiting.append(
                place.lines.gap_line(start, None, f"its archive {archive.location} cannot be read: {error}")
            )
            chunk = None
        if chunk is None:
            place.archive, place.archive_is_read = None, True
            return
        if chunk.first > start:
            place.waiting.append(place.lines.gap_line(start, chunk.first - start, "it was not archived"))
        first = max(start, chunk.first)
        place.waiting.extend(place.lines.read(chunk.data, first, chunk.end, self._query.stream, self._query.contains))
        place.next = chunk.end

    # Order

    async def _take_tail(self) -> None:
        """Merge the last lines of all attempts, and select the last of them."""
        while behind := [place for place in self._places.values() if not place.caught_up]:
            await self._fetch(behind)
        merged = heapq.merge(*(place.waiting for place in self._places.values()), key=_time_of)
        self._ready.extend(deque(merged, maxlen=self._query.tail))
        for place in self._places.values():
            place.waiting.clear()
        self._in_tail = False

    def _merge(self) -> None:
        """Emit lines by time, as long as no attempt can still have an earlier line."""
        places = enumerate(self._places.values())
        heap = [(_time_of(place.waiting[0]), index, place) for index, place in places if place.waiting]
        heapq.heapify(heap)
        while heap:
            _, index, place = heap[0]
            self._ready.append(place.waiting.popleft())
            if place.waiting:
                heapq.heapreplace(heap, (_time_of(place.waiting[0]), index, place))
            elif place.caught_up:
                heapq.heappop(heap)
            else:
                return  # its next page may begin before the others' next lines


def _time_of(line: LogLine) -> float:
    return line.time


def _select(sources: Sequence[LogSource], attempt: AttemptId | int | None) -> list[LogSource]:
    """Select the sources of one attempt: by its id, or by its number (negative numbers count from the last)."""
    if attempt is None:
        return list(sources)
    if isinstance(attempt, str):
        return [source for source in sources if source.attempt_id == attempt]
    generations = sorted({split_attempt(source.attempt_id)[1] for source in sources})
    if attempt < 0:
        attempt = generations[attempt] if -attempt <= len(generations) else -1
    return [source for source in sources if split_attempt(source.attempt_id)[1] == attempt]
