"""Output of jobs for sync code: an iterator over `fray.LogLine`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from fray.blocking.bridge.portal import Portal
from fray.model.log_records import LogLine


class LogStream:
    """Log lines of a job (a `fray.runtime.logs.reader.LogReader`): iterate once; `close` it to stop following."""

    def __init__(self, portal: Portal, reader: Any) -> None:
        self._portal, self._reader = portal, reader
        self._ready: deque[LogLine] = deque()

    def __enter__(self) -> LogStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[LogLine]:
        return self

    def __next__(self) -> LogLine:
        """Return the next line. Raises NoSuchJob, ConnectionFailed as in `fray`."""
        if not self._ready:
            try:
                self._ready.append(self._portal.call(self._reader.__anext__))
            except StopAsyncIteration:
                raise StopIteration from None
            # one more request to the loop takes all lines that have arrived
            self._ready.extend(self._portal.run(self._reader.take_ready))
        return self._ready.popleft()

    def close(self) -> None:
        """Stop following."""
        self._portal.call(self._reader.aclose)
