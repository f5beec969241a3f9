"""Capture of a process's output, which is sent to the registry a few times a second for `logs()`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO, cast

EVERY_S = 0.2
MAX_CHARACTERS = 1 << 20
"""Characters that are sent at once; of a longer output, the last."""


class _TeeStream:
    """Stream whose text also goes to a function."""

    def __init__(self, stream: TextIO, add: Callable[[str], None]) -> None:
        self._stream, self._add = stream, add

    def write(self, text: str) -> int:
        self._add(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Output:
    """Context manager that also passes to ``send`` what this process prints by ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, send: Callable[[str], Any]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._parts: list[str] = []
        self._size = 0
        self._ended = threading.Event()
        self._streams = (sys.stdout, sys.stderr)

    def add(self, text: str) -> None:
        with self._lock:
            self._parts.append(text)
            self._size += len(text)
            if self._size > 2 * MAX_CHARACTERS:
                self._parts = ["".join(self._parts)[-MAX_CHARACTERS:]]
                self._size = MAX_CHARACTERS

    def flush(self) -> None:
        with self._lock:
            text, self._parts, self._size = "".join(self._parts), [], 0
        if text:
            self._send(text[-MAX_CHARACTERS:])

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.flush()

    def __enter__(self) -> Output:
        sys.stdout, sys.stderr = (cast(TextIO, _TeeStream(stream, self.add)) for stream in self._streams)
        threading.Thread(target=self._follow, name="fray-output", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout, sys.stderr = self._streams
        self._ended.set()
        self.flush()
