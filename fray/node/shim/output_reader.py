"""Plug-in of the shim that reads the job's two output pipes into the attempt's log."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from fray.node.logs.writer import READ_BYTES, LineSplitter, LogWriter, system_lines
from fray.node.shim.plugin import ShimPlugin

BREATH_S = 0.005
POKE_EVERY_S = 0.02
"""The node is told of new lines no more often."""
LAST_LINES = 20
LAST_LINES_LIMIT_BYTES = 4000


class OutputReader(ShimPlugin):
    """All a job prints: reads its pipes, in turn and with breath, and tells the node how far its log goes."""

    def __init__(
        self,
        spool: LogWriter,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        tell: Callable[[int], None],
    ) -> None:
        self.spool = spool
        self._watch, self._unwatch, self._tell = watch, unwatch, tell
        self._streams: dict[int, tuple[str, LineSplitter]] = {}
        self._resting: dict[int, float] = {}
        self._told = spool.lines
        self._tell_at = 0.0
        self._hurries = False
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)

    @property
    def is_open(self) -> bool:
        """Some pipe may bring more."""
        return bool(self._streams)

    def add(self, descriptor: int, name: str) -> None:
        self._streams[descriptor] = (name, LineSplitter(seam=self.spool.seam))
        self._watch(descriptor, partial(self._read, descriptor))

    def say(self, text: str) -> None:
        """A line of Fray's own."""
        self.spool.write("sys", time.time(), system_lines(text))
        self._poke(time.monotonic())

    def _read(self, descriptor: int) -> None:
        name, cutter = self._streams[descriptor]
        data = os.read(descriptor, READ_BYTES)
        lines = cutter.feed(data) if data else cutter.flush()
        self.spool.write(name, time.time(), lines, cutter.rest)
        if name == "err" and lines:
            lines = self.spool.hide(lines) if self.spool.hide is not None else lines
            self._last.extend(lines[-LAST_LINES_LIMIT_BYTES:].splitlines()[-LAST_LINES:])
        if not data:
            del self._streams[descriptor]
            self._unwatch(descriptor)
        elif not self._hurries:
            self._unwatch(descriptor)
            self._resting[descriptor] = time.monotonic() + BREATH_S
        self._poke(time.monotonic())

    def _poke(self, now: float) -> None:
        if self.spool.lines > self._told and now >= self._tell_at:
            self._told, self._tell_at = self.spool.lines, now + POKE_EVERY_S
            self._tell(self._told)

    # As a watcher of the keeper's loop

    def next_at(self) -> float | None:
        due = list(self._resting.values())
        if self.spool.lines > self._told:
            due.append(self._tell_at)
        return min(due, default=None)

    def due(self, now: float) -> None:
        for descriptor in [descriptor for descriptor, at in self._resting.items() if at <= now]:
            del self._resting[descriptor]
            self._watch(descriptor, partial(self._read, descriptor))
        self._poke(now)

    def hurry(self) -> None:
        """The job has ended: what is left in its pipes is read without a breath."""
        self._hurries = True
        for descriptor in self._resting:
            self._watch(descriptor, partial(self._read, descriptor))
        self._resting.clear()

    def finish_lines(self) -> int:
        """Nothing more will be read: the unfinished lines are lines now. Returns how many there are in all."""
        for name, cutter in self._streams.values():
            self.spool.write(name, time.time(), cutter.flush())
        self.spool.close()
        return self.spool.lines

    def last_words(self) -> str:
        """The last lines of standard error."""
        return b"\n".join(self._last).decode("utf-8", "replace")[-LAST_LINES_LIMIT_BYTES:]
