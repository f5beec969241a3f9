"""Store of attempt logs: one directory per attempt, written by its shim, read by anyone, removed by retention.

Invariants: what is here is the authority on what attempts of this machine printed; it outlives them, their shims and
the node. Only retention removes it: an attempt's oldest lines by its shim, whole attempts by age and by total size,
oldest end first. Unfinished lines that a killed shim had read are written out as lines when its death is noticed, by
the running node or by the next one. Logs are written but not synced: they outlive processes, not the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field, frozen

from fray.model.ids import AttemptId
from fray.model.log_records import (
    HEAD_BYTES,
    Bytes,
    LogChunk,
    record,
    records,
)
from fray.model.messages.node import LogPage, ReadLog
from fray.node.config import LogRules
from fray.node.logs.pages import read_page
from fray.node.logs.redact import Hide
from fray.node.logs.tail import Tail, end_of, segments
from fray.node.logs.writer import (
    READ_BYTES,
    LineSplitter,
    LogWriter,
    system_lines,
)

# Thousands of short jobs an hour would otherwise leave as many directories, for a week.
ATTEMPTS_LIMIT = 20_000
"""Number of attempts whose logs are kept, however little they have printed."""
PIPE_LIMIT_BYTES = 1024 * 1024
_NAME, _ENDED = "attempt", "ended"

log = logging.getLogger("fray.node.logs.store")


class AttemptLogs(Protocol):
    """Interface of a launcher's logs that the node needs."""

    async def read(self, ask: ReadLog) -> tuple[LogPage, Bytes]:
        """Return the requested page and its records; a page marked as missing for an unknown attempt."""
        ...


@define(eq=False)
class AttemptLogWriter:
    """The log of one attempt, while its node holds it."""

    directory: Path
    on_lines: Callable[[LogChunk], None]
    """Callback for new lines."""
    limit_bytes: int
    send_to_shim: Callable[[str], None] | None = None
    """Sends text to its shim while that writes the log; no other process writes then."""
    is_held: bool = False
    """True while new lines are not reported: there is no connection to the controller yet."""
    _tail: Tail = field(init=False)
    _writer: LogWriter | None = None

    def __attrs_post_init__(self) -> None:
        self._tail = Tail(self.directory)

    def say(self, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``), also before there is a process. Lost if the disk is full."""
        # One writer at a time: numbers of lines would repeat if node and shim wrote both.
        if self.send_to_shim is not None:
            self.send_to_shim(text)
            return
        with contextlib.suppress(OSError):
            if self._writer is None:
                self._writer = open_writer(self.directory)
            self._writer.write("sys", time.time(), system_lines(text))
        self.forward()

    def hand_over(self) -> dict[str, Any]:
        """Return what the shim needs to write the log; it is the writer from now on."""
        self._close_writer()
        return {"directory": str(self.directory), "lines": next_number(self.directory), "limit": self.limit_bytes}

    def forward(self) -> None:
        """Report new lines."""
        # Lines are read back from the disk: so a reported line outlives its shim and its node, a burst is limited by
        # the page cache and not by queues of the node, and lines that could not be sent can be read later by the same
        # numbers.
        while not self.is_held and (chunk := self._tail.read()) is not None:
            self.on_lines(chunk)

    @property
    def place(self) -> tuple[int, int, int]:
        """Place up to which lines were reported; see `Tail.place`."""
        return self._tail.place

    def move(self, place: tuple[int, int, int]) -> None:
        """Report only lines after a place of an earlier writer of this log, once `release` is called."""
        self._tail.move(place)
        self.is_held = True

    def finish(self, pipes: dict[str, int] | None = None, hide: Hide | None = None) -> None:
        """Complete the log of an attempt whose shim was killed; see `finish_log`."""
        with contextlib.suppress(OSError):
            finish_log(self.directory, pipes, hide)
        self.forward()

    def release(self) -> None:
        """Report lines from now on, and those that were held back."""
        self.is_held = False
        self.forward()

    def close(self) -> None:
        """Mark the log as complete."""
        self.release()
        self._tail.close()
        self._close_writer()
        with contextlib.suppress(OSError):
            (self.directory / _ENDED).touch()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class LogStore:
    """Logs of all attempts, below one directory."""

    def __init__(self, root: Path, rules: LogRules) -> None:
        self.root, self.rules = root, rules

    def open(self, attempt_id: AttemptId, on_lines: Callable[[LogChunk], None]) -> AttemptLogWriter:
        """Create a log; ``on_lines`` is called with its lines. Raises OSError."""
        directory = self.directory(attempt_id)
        # By itself: `parents=True` makes the directories above with the mode of the umask. What jobs print may be
        # private, also where an earlier version has made it.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)
        directory.mkdir(mode=0o700, exist_ok=True)
        # The name of the directory is a hash; the archive and the operator need the id.
        (directory / _NAME).write_text(attempt_id)
        return AttemptLogWriter(directory, on_lines, self.rules.attempt_bytes)

    def directory(self, attempt_id: AttemptId) -> Path:
        return self.root / hashlib.sha256(attempt_id.encode()).hexdigest()[:16]

    def read(self, ask: ReadLog, now: float) -> tuple[LogPage, Bytes]:
        """See `AttemptLogs.read`; reads the disk."""
        directory = self.directory(ask.attempt_id)
        if not (directory / _NAME).exists():
            missing = "its machine keeps no log of it (removed by retention, or never written)"
            start = ask.first or 0
            return LogPage(attempt_id=ask.attempt_id, start=start, first=start, next=start, missing=missing), b""
        return read_page([(first, path.read_bytes) for first, path in segments(directory)], ask, now)

    def recover(self, living: Collection[AttemptId] = ()) -> None:
        """Complete the logs of attempts that an earlier node left behind, except those that are still running."""
        spared = {self.directory(attempt_id) for attempt_id in living}
        for directory in self.directories():
            if directory not in spared and not (directory / _ENDED).exists():
                try:
                    finish_log(directory)
                    # Only once it is complete: one that could not be completed is tried again at the next start.
                    (directory / _ENDED).touch()
                except OSError as error:
                    log.warning("cannot complete a log: %s", error, extra={"directory": str(directory)})

    def directories(self) -> Iterator[Path]:
        """Yield the directories of all attempts."""
        if self.root.exists():
            yield from (entry for entry in self.root.iterdir() if (entry / _NAME).exists())

    # Retention

    def sweep(self, now: float) -> int:
        """Remove what is too old or too much; return the bytes that are left."""
        # The oldest first: each removal leaves less for the limits of those after it.
        kept = sorted((_measure(directory) for directory in self.directories()), key=lambda one: one.changed_at)
        left = sum(one.size_bytes for one in kept)
        for index, one in enumerate(kept):
            too_many = len(kept) - index > ATTEMPTS_LIMIT
            too_much, too_old = left > self.rules.total_bytes, now - one.changed_at > self.rules.age_s
            # Logs of running attempts lose their oldest segments at most, and only if that is not enough.
            if one.ended and (too_many or too_much or too_old):
                shutil.rmtree(one.directory, ignore_errors=True)
                left -= one.size_bytes
        for one in kept:
            if not one.ended and left > self.rules.total_bytes:
                left -= _remove_oldest_segments(one.directory, left - self.rules.total_bytes)
        return left


@frozen
class _LogUsage:
    directory: Path
    size_bytes: int
    changed_at: float
    ended: bool


def _measure(directory: Path) -> _LogUsage:
    size_bytes, changed_at = 0, 0.0
    for entry in os.scandir(directory):
        try:
            # Its shim may have removed the segment since the listing.
            found = entry.stat()
        except OSError:
            continue
        size_bytes += found.st_size
        changed_at = max(changed_at, found.st_mtime)
    return _LogUsage(directory, size_bytes, changed_at, (directory / _ENDED).exists())


def _remove_oldest_segments(directory: Path, by_bytes: int) -> int:
    """Remove the oldest segments of a running attempt; never the one that is being written."""
    dropped = 0
    for _, path in segments(directory)[:-1]:
        if dropped >= by_bytes:
            break
        dropped += path.stat().st_size
        path.unlink(missing_ok=True)
    return dropped


def next_number(directory: Path) -> int:
    """Return the number that the next line gets."""
    found = segments(directory)
    return end_of(found[-1][1].read_bytes(), found[-1][0])[0] if found else 0


def open_writer(directory: Path) -> LogWriter:
    """Return a writer that appends to the log; only while no shim does. Raises OSError."""
    found = segments(directory)
    if not found:
        return LogWriter(directory)
    first, path = found[-1]
    lines, size = end_of(path.read_bytes(), first)
    return LogWriter.reopen(directory, first, lines, size)


def finish_log(directory: Path, pipes: dict[str, int] | None = None, hide: Hide | None = None) -> None:
    """Write out what a dead shim had read of unfinished lines, and what it had not read of the job's pipes."""
    # First what the shim had read of a line, then what it had not read: together they are the line as it was printed.
    unfinished_bytes = {**dict.fromkeys(pipes or {}, b""), **unfinished(directory)}
    with contextlib.closing(open_writer(directory)) as writer:
        # No shim has redacted these bytes.
        writer.hide = hide
        for stream, rest in unfinished_bytes.items():
            splitter = LineSplitter(rest)
            for data in _drain(pipes.get(stream) if pipes is not None else None):
                writer.write(stream, time.time(), splitter.feed(data))
            writer.write(stream, time.time(), splitter.flush())


def _drain(pipe: int | None) -> Iterator[bytes]:
    """Yield as much as a pipe can hold: a process that still writes is not part of the job."""
    if pipe is None:
        return
    # A process that still has the other end open must not keep the node waiting.
    os.set_blocking(pipe, False)
    for _ in range(PIPE_LIMIT_BYTES // READ_BYTES):
        try:
            data = os.read(pipe, READ_BYTES)
        except OSError:
            return
        if not data:
            return
        yield data


def unfinished(directory: Path) -> dict[str, bytes]:
    """Return the bytes of the unfinished line that its shim had read, by stream."""
    pending: dict[str, bytes] = {}
    # Each segment begins with the lines that were unfinished then, so the last one suffices; the one before it, if the
    # shim was killed before its first write there.
    for _, path in reversed(segments(directory)):
        data = path.read_bytes()
        for (stream, is_pending, _, _, _, _), at, end in records(data):
            # A whole record ends what was pending: it contains those bytes, too.
            pending[stream] = pending.get(stream, b"") + data[at + HEAD_BYTES : end] if is_pending else b""
        if pending:
            break
    return {stream: rest for stream, rest in pending.items() if rest}


class MemoryLogs:
    """`AttemptLogs` of a launcher without a disk: the last lines of each attempt, in memory."""

    ATTEMPTS_LIMIT = 1_000

    def __init__(self, clock: Callable[[], float], limit_bytes: int = 4 * 1024 * 1024) -> None:
        self._clock, self._limit_bytes = clock, limit_bytes
        self._kept: dict[AttemptId, list[tuple[int, bytes]]] = {}
        self._next: dict[AttemptId, int] = {}

    def add(self, attempt_id: AttemptId, stream: str, lines: bytes) -> LogChunk:
        """Store whole lines; return them as they are reported."""
        first = self._next.get(attempt_id, 0)
        data = record(stream, first, self._clock(), lines)
        end = self._next[attempt_id] = first + lines.count(b"\n")
        kept = self._kept.setdefault(attempt_id, [])
        kept.append((first, data))
        while sum(len(one) for _, one in kept) > self._limit_bytes and len(kept) > 1:
            kept.pop(0)
        if len(self._kept) > self.ATTEMPTS_LIMIT:
            del self._kept[next(iter(self._kept))]
        return LogChunk(first, end, data)

    async def read(self, ask: ReadLog) -> tuple[LogPage, Bytes]:
        kept = self._kept.get(ask.attempt_id, [])
        return read_page(
            [(first, lambda data=data: data) for first, data in kept],  # type: ignore[misc]
            ask,
            self._clock(),
        )
