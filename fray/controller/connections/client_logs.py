"""Feed of new log lines, and the logs of one client: pages on request, hints, and lines that are pushed.

Readers pull: a page is requested by line number, and the next one when that is read. So a slow reader costs nothing,
misses nothing, and continues where it was after any interruption. Pages come from the cache if it has all that was
requested, else from the disk of the attempt's node. The controller's loop does not wait for that: a task does, for at
most `NODE_ANSWER_S`. A terminal is pushed to as far as there is room, and skips lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio
from attrs import evolve

from fray.controller.connections.hub import ConnectionHub
from fray.controller.connections.subscriptions import Subscriptions
from fray.controller.context import ControllerContext
from fray.controller.log_cache import LogCursor, LogRing
from fray.errors import DeadlineExceeded, FrayError, InvalidRequest, NoSuchJob
from fray.model.ids import AttemptId, JobId, NodeName, SessionId, split_attempt
from fray.model.log_records import LogChunk
from fray.model.messages import client as messages
from fray.model.messages.node import LogPage, ReadLog
from fray.net.channel.requests import Requests
from fray.net.transport import Bytes
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.owners import owner_job_id
from fray.scheduler.state.rows import AttemptRow, JobRow
from fray.scheduler.state.state import State

CHUNK_BYTES = 64 * 1024
"""Approximate size of the lines in one notice."""
NODE_ANSWER_S = 10.0
"""Seconds after which a connected node that does not answer counts as silent."""
RECONNECT_LOOK_S = 0.1
READS_LIMIT = 256
"""Pages one client may wait for at a time."""


class LogFeed:
    """New lines of all attempts: adds them to the cache and notifies the clients that follow them."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.followers: Subscriptions[JobId | SessionId, ClientLogs] = Subscriptions()
        """Clients to which lines are pushed, by job, or by session for all that it owns."""
        self.readers: Subscriptions[JobId, ClientLogs] = Subscriptions()
        """Clients that read the logs of a job, by job."""
        self.tree_readers: Subscriptions[JobId, ClientLogs] = Subscriptions()
        """Clients that read the logs of a job and of all jobs below it, by job."""

    def add(self, attempt: AttemptRow, chunk: LogChunk, *, closed: bool) -> None:
        """Add lines that a node has pushed. ``closed``: they are the last of the attempt."""
        state, attempt_id, job_id = self._context.state, attempt.attempt_id, attempt.job_id
        self._context.log_cache.add(attempt_id, chunk, closed=closed)
        job = state.jobs.get(job_id)
        for key in (job_id, job.root) if job is not None and job.root else (job_id,):
            # An empty chunk only closes the log: it prints nothing, but readers want to know the end.
            for client in self.followers.by_key.get(key, ()) if chunk.data else ():
                client.on_lines(attempt_id)
        for client in self.readers.by_key.get(job_id, ()):
            client.on_watched_lines(attempt_id)
        # The chain of owners is walked only if a client reads a whole tree.
        for ancestor in ancestors(state, job_id) if self.tree_readers.by_key else ():
            for client in self.tree_readers.by_key.get(ancestor, ()):
                client.on_watched_lines(attempt_id)

    def remove(self, client: ClientLogs) -> None:
        """Remove all subscriptions of a client."""
        self.followers.remove(client)
        self.readers.remove(client)
        self.tree_readers.remove(client)


class ClientLogs:
    """Log readers and followed jobs of one client."""

    def __init__(self, context: ControllerContext, feed: LogFeed, hub: ConnectionHub, session: SessionId) -> None:
        self._context, self._feed, self._hub, self._session = context, feed, hub, session
        self._cursor = LogCursor(context.log_cache)
        self.pending = self._cursor.pending
        """Attempts with lines to be sent."""
        self.hints: dict[AttemptId, None] = {}
        """Watched attempts with new lines of which the client is to be notified."""
        self._notified: set[AttemptId] = set()
        self.on_pending: Callable[[], None] = lambda: None
        """Called when lines or hints are to be sent."""
        self.reads_in_progress = 0

    def close(self) -> None:
        """End all subscriptions; the connection has ended."""
        self._feed.remove(self)

    # Lines that are pushed

    def follow(self, message: messages.FollowLogs) -> None:
        """Start or stop pushing the lines of one job or of all that the session owns."""
        key = self._session if message.job is None else message.job
        (self._feed.followers.add if message.on else self._feed.followers.drop)(key, self)
        jobs = self._context.state.owned_jobs(self._session) if message.job is None else [message.job]
        # A follower also gets the lines that are cached already, so a job that prints and ends at once is not silent.
        for attempt in self._context.log_cache.attempts_of(jobs):
            (self._cursor.mark_pending if message.on else self._cursor.remove)(attempt)
        self.on_pending()

    def on_lines(self, attempt: AttemptId) -> None:
        """Note that an attempt that is followed has new lines."""
        self._cursor.mark_pending(attempt)
        self.on_pending()

    def next_pending(self, job: JobId) -> AttemptId | None:
        """Return an attempt of this job, or of a job below it, whose lines are to be sent."""
        state = self._context.state
        return next(
            (attempt for attempt in self.pending if job in _with_ancestors(state, split_attempt(attempt)[0])), None
        )

    def take_lines(self, attempt: AttemptId | None = None) -> tuple[messages.LogLines, Bytes] | None:
        """Take the next lines of an attempt; None: of the attempt that has waited longest."""
        attempt = attempt or next(iter(self.pending), None)
        if attempt is None:
            return None
        # From the cache only: a terminal is never worth a request to a node.
        chunk, skipped = self._cursor.read(attempt, CHUNK_BYTES)
        if not chunk.data and not skipped:
            return None
        row = self._context.state.attempts.get(attempt)
        job_id = row.job_id if row is not None else split_attempt(attempt)[0]
        *_, launched_job = _with_ancestors(self._context.state, job_id)
        notice = messages.LogLines(
            job_id=job_id,
            name=_name(self._context.state, job_id),
            attempt_id=attempt,
            first=chunk.first,
            end=chunk.end,
            skipped=skipped,
            launched_job=launched_job,
        )
        return notice, chunk.data

    # Pages

    def watch(self, message: messages.WatchLogs) -> messages.LogSources:
        """Return the attempts of a job, or of a job and all jobs below it; start or stop sending hints of them.

        Raises:
            NoSuchJob: the job is unknown.
        """
        state = self._context.state
        root = state.jobs.get(message.job)
        if root is None:
            raise NoSuchJob(f"no such job: {message.job!r}", job_id=message.job)
        # By acceptance, so that parents come before their children in each answer.
        jobs = sorted(_tree(state, root), key=lambda job: job.order) if message.tree else [root]
        sources = tuple(source_of(state, attempt) for job in jobs for attempt in state.attempt_records(job))
        # Lines can still come while an attempt lives on a silent machine, although its job has ended.
        over = root.ended and all(source.ended for source in sources)
        readers = self._feed.tree_readers if message.tree else self._feed.readers
        (readers.add if message.follow else readers.drop)(message.job, self)
        return messages.LogSources(sources=sources, ended=over)

    def on_watched_lines(self, attempt: AttemptId) -> None:
        """Note that a watched attempt has new lines. A client gets no second hint before it has read."""
        # One hint until the next read: a job that prints without end costs its readers one notice a page.
        if attempt not in self._notified:
            self._notified.add(attempt)
            self.hints[attempt] = None
            self.on_pending()

    def take_hint(self) -> messages.LogAppended | None:
        while self.hints:
            attempt_id = next(iter(self.hints))
            del self.hints[attempt_id]
            attempt = self._context.state.attempts.get(attempt_id)
            if attempt is not None:
                return messages.LogAppended(source=source_of(self._context.state, attempt))
        return None

    def read_cached(self, ask: ReadLog) -> tuple[LogPage, Bytes] | None:
        """Return the page if the cache has it; None if the node must be asked.

        Raises:
            NoSuchJob: nothing is known of the attempt.
            InvalidRequest: too many pages are requested.
        """
        # Before the page is read: lines that arrive after it give a hint again.
        self._notified.discard(ask.attempt_id)
        attempt = self._attempt(ask)
        ring = self._context.log_cache.ring(ask.attempt_id)
        # Where the last lines begin, and which lines match, only the node's disk can say.
        if ask.first is not None and ring is not None:
            chunk = ring.read(ask.first, ask.limit_bytes)
            if chunk is not None and self._is_current(ring, chunk, attempt):
                page = LogPage(
                    attempt_id=ask.attempt_id,
                    start=ask.first,
                    first=ask.first,
                    next=chunk.end,
                    caught_up=chunk.end >= ring.end,
                    ended=not attempt.living,
                )
                return page, chunk.data
        # Each of these is a task that may wait for ten seconds.
        if self.reads_in_progress >= READS_LIMIT:
            raise InvalidRequest(f"one connection may wait for {READS_LIMIT} pages of logs at a time")
        return None

    def _is_current(self, ring: LogRing, chunk: LogChunk, attempt: AttemptRow) -> bool:
        """Return whether what follows the last cached line is known without asking the node."""
        if chunk.end < ring.end or ring.is_closed:
            return True
        # From a silent node lines may be missing that it has on its disk; of an ended attempt, those that were not sent
        # up.
        return attempt.living and self._hub.node_requests(attempt.node) is not None

    def _attempt(self, ask: ReadLog) -> AttemptRow:
        attempt = self._context.state.attempts.get(ask.attempt_id)
        if attempt is None:
            raise NoSuchJob(f"no such attempt: {ask.attempt_id!r} (or no longer recorded)")
        return attempt

    async def read_from_node(self, ask: ReadLog) -> tuple[LogPage, Bytes]:
        """Return the page from the attempt's node or, if that does not answer, the cached lines and why the rest is
        missing."""
        attempt = self._attempt(ask)
        # Read before the node is asked: an attempt that ends meanwhile may print between the page and its end.
        is_over = not attempt.living
        requests = await self._wait_for_node(attempt.node)
        if requests is None:
            return self._page_without_node(ask, attempt)
        try:
            page, blobs = await requests.request(ask, timeout_s=NODE_ANSWER_S)
        except (DeadlineExceeded, FrayError):
            return self._page_without_node(ask, attempt)
        assert isinstance(page, LogPage)
        # The node no longer has these lines; the cache may.
        if page.missing:
            return self._cached_page(ask, attempt, page.missing, retry=False)
        return evolve(page, ended=is_over), blobs[0] if blobs else b""

    async def _wait_for_node(self, node: NodeName) -> Requests | None:
        """Wait for a node that was lost just now, or with the previous controller: it mostly reconnects within two
        seconds."""
        known = self._context.state.nodes.get(node)
        # A suspect machine is not expected back soon.
        if known is None or known.phase in (NodePhase.SUSPECT, NodePhase.LOST):
            return None
        silent_s = self._context.inbox.current_time() - known.silent_since if known.phase is NodePhase.SILENT else 0.0
        # Less what it has been silent already: a reader of many attempts of one dead node does not wait ten seconds for
        # each.
        give_up_at = trio.current_time() + NODE_ANSWER_S - silent_s
        while True:
            requests = self._hub.node_requests(node)
            if requests is not None:
                return requests
            if trio.current_time() >= give_up_at:
                return None
            # Polled: a reader does not notice a tenth of a second.
            await trio.sleep(RECONNECT_LOOK_S)

    def _page_without_node(self, ask: ReadLog, attempt: AttemptRow) -> tuple[LogPage, Bytes]:
        node = self._context.state.nodes.get(attempt.node)
        if node is None or node.phase is NodePhase.LOST:
            return self._cached_page(ask, attempt, f"its machine {attempt.node} is gone", retry=False)
        return self._cached_page(ask, attempt, f"its machine {attempt.node} is silent", retry=True)

    def _cached_page(self, ask: ReadLog, attempt: AttemptRow, missing: str, *, retry: bool) -> tuple[LogPage, Bytes]:
        ring, start = self._context.log_cache.ring(ask.attempt_id), ask.first or 0
        first = ring.next_after(start) if ring is not None else start
        chunk = (ring.read(first, ask.limit_bytes) if ring is not None else None) or LogChunk(first, first)
        # A closed ring without a hole has the rest of the log: nothing is missing although the node is gone.
        is_whole = ring is not None and ring.is_closed and first == start
        page = LogPage(
            attempt_id=ask.attempt_id,
            start=start,
            first=first,
            next=chunk.end,
            caught_up=ring is None or chunk.end >= ring.end,
            ended=not attempt.living,
            missing="" if is_whole else missing,
            retry=retry,
            archive=self._archive(attempt.node),
        )
        return page, chunk.data

    def _archive(self, node: NodeName) -> str:
        known = self._context.state.nodes.get(node)
        return known.log_archive if known is not None else ""


def _name(state: State, job_id: JobId) -> str:
    job = state.jobs.get(job_id)
    return job.spec.name if job is not None else job_id


def source_of(state: State, attempt: AttemptRow) -> messages.LogSource:
    return messages.LogSource(
        attempt_id=attempt.attempt_id,
        job_id=attempt.job_id,
        name=_name(state, attempt.job_id),
        ended=not attempt.living,
    )


def _tree(state: State, root: JobRow) -> Iterator[JobRow]:
    """Yield the job and all recorded jobs below it."""
    # Made for each request: the index of children has living jobs only, and logs are read after the end.
    below: dict[JobId, list[JobRow]] = {}
    for job in state.jobs.values():
        parent = owner_job_id(job)
        if parent is not None:
            below.setdefault(parent, []).append(job)
    todo = [root]
    while todo:
        job = todo.pop()
        yield job
        todo += below.get(job.job_id, ())


def _with_ancestors(state: State, job_id: JobId) -> list[JobId]:
    """Return the job, also if it has been forgotten, and all jobs above it."""
    return list(ancestors(state, job_id)) or [job_id]


def ancestors(state: State, job_id: JobId) -> Iterator[JobId]:
    """Yield the job and all jobs above it."""
    found: JobId | None = job_id
    while found is not None and (job := state.jobs.get(found)) is not None:
        yield found
        found = owner_job_id(job)
