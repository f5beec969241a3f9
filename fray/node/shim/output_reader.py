"""Plug-in of the shim that reads the job's two output pipes into the attempt's log."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from fray.node.logs.writer import READ_BYTES, LineSplitter, LogWriter, system_lines
from fray.node.shim.plugin import ShimPlugin

PAUSE_S = 0.005
"""Seconds a pipe is left alone after a read. So a thousand small prints a second cost a few writes, and a job that
prints more than 12 MB a second waits in its ``print`` instead of flooding the disk."""
NOTIFY_EVERY_S = 0.02
"""Seconds between notifications of the node about new lines, at least."""
LAST_LINES = 20
LAST_LINES_LIMIT_BYTES = 4000


class OutputReader(ShimPlugin):
    """Reads the job's output pipes in turn, at a limited rate, and reports to the node how far the log goes."""

    def __init__(
        self,
        writer: LogWriter,
        add_reader: Callable[[int, Callable[[], None]], None],
        remove_reader: Callable[[int], None],
        notify: Callable[[int], None],
    ) -> None:
        self.writer = writer
        self._add_reader, self._remove_reader, self._send_count = add_reader, remove_reader, notify
        self._streams: dict[int, tuple[str, LineSplitter]] = {}
        self._paused: dict[int, float] = {}
        self._reported_lines = writer.lines
        self._notify_at = 0.0
        self._unthrottled = False
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)

    @property
    def is_open(self) -> bool:
        """True while a pipe may still have data."""
        return bool(self._streams)

    def add(self, descriptor: int, name: str) -> None:
        self._streams[descriptor] = (name, LineSplitter(seam=self.writer.seam))
        self._add_reader(descriptor, partial(self._read, descriptor))

    def say(self, text: str) -> None:
        """Write lines of Fray's own."""
        self.writer.write("sys", time.time(), system_lines(text))
        self._notify(time.monotonic())

    def _read(self, descriptor: int) -> None:
        name, splitter = self._streams[descriptor]
        # One bounded read per wake-up, so that a flood on one pipe delays neither the other nor the end of the job.
        data = os.read(descriptor, READ_BYTES)
        lines = splitter.feed(data) if data else splitter.flush()
        # The unfinished line goes to disk, too, so that a shim that is killed loses nothing it has read.
        self.writer.write(name, time.time(), lines, splitter.rest)
        if name == "err" and lines:
            # Redacted before the cut: half of a secret at its edge would not be recognized in the outcome's message.
            lines = self.writer.hide(lines) if self.writer.hide is not None else lines
            self._last.extend(lines[-LAST_LINES_LIMIT_BYTES:].splitlines()[-LAST_LINES:])
        if not data:
            del self._streams[descriptor]
            self._remove_reader(descriptor)
        elif not self._unthrottled:
            # The selector is level-triggered and would report the pipe again at once.
            self._remove_reader(descriptor)
            self._paused[descriptor] = time.monotonic() + PAUSE_S
        self._notify(time.monotonic())

    def _notify(self, now: float) -> None:
        if self.writer.lines > self._reported_lines and now >= self._notify_at:
            # The node reads the lines from disk, so a number suffices, however much was printed in between.
            self._reported_lines, self._notify_at = self.writer.lines, now + NOTIFY_EVERY_S
            self._send_count(self._reported_lines)

    # Plug-in

    def next_due_at(self) -> float | None:
        times = list(self._paused.values())
        if self.writer.lines > self._reported_lines:
            times.append(self._notify_at)
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        for descriptor in [descriptor for descriptor, at in self._paused.items() if at <= now]:
            del self._paused[descriptor]
            self._add_reader(descriptor, partial(self._read, descriptor))
        self._notify(now)

    def stop_throttling(self) -> None:
        """Read what is left in the pipes without pauses: the job has ended."""
        self._unthrottled = True
        for descriptor in self._paused:
            self._add_reader(descriptor, partial(self._read, descriptor))
        self._paused.clear()

    def finish_lines(self) -> int:
        """Write unfinished lines as lines and close the log; return the number of lines."""
        # Pipes that are still open here were passed to a process outside the tree.
        for name, splitter in self._streams.values():
            self.writer.write(name, time.time(), splitter.flush())
        self.writer.close()
        return self.writer.lines

    def last_stderr(self) -> str:
        """Return the last lines of standard error."""
        return b"\n".join(self._last).decode("utf-8", "replace")[-LAST_LINES_LIMIT_BYTES:]
