"""What jobs print, for sync code: a plain iterator over `fray.LogLine`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from fray.blocking.bridge.portal import Portal
from fray.model.log_records import LogLine


class LogStream:
    """The lines of a `fray.LogReader`: iterate, once. Leave one that follows by `close`, or use ``with``."""

    def __init__(self, portal: Portal, reader: Any) -> None:
        self._portal, self._reader = portal, reader
        self._here: deque[LogLine] = deque()

    def __enter__(self) -> LogStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[LogLine]:
        return self

    def __next__(self) -> LogLine:
        """Raises NoSuchJob, ConnectionFailed as natively. One errand into the loop brings all lines there are."""
        if not self._here:
            try:
                self._here.append(self._portal.call(self._reader.__anext__))
            except StopAsyncIteration:
                raise StopIteration from None
            self._here.extend(self._portal.run(self._reader.take_ready))
        return self._here.popleft()

    def close(self) -> None:
        """Follow no longer."""
        self._portal.call(self._reader.aclose)
