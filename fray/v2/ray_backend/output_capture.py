"""What a job or an actor prints also goes to the registry, a few times a second, so that `logs()` has it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO, cast

EVERY_S = 0.2
KEPT_CHARACTERS = 1 << 20
"""Between two times; of more, the last."""


class _TeeStream:
    """A stream that is also told."""

    def __init__(self, stream: TextIO, tell: Callable[[str], None]) -> None:
        self._stream, self._tell = stream, tell

    def write(self, text: str) -> int:
        self._tell(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Output:
    """While open, all that this process prints by ``sys.stdout`` and ``sys.stderr`` is also given to ``send``."""

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
            if self._size > 2 * KEPT_CHARACTERS:
                self._parts = ["".join(self._parts)[-KEPT_CHARACTERS:]]
                self._size = KEPT_CHARACTERS

    def flush(self) -> None:
        with self._lock:
            text, self._parts, self._size = "".join(self._parts), [], 0
        if text:
            self._send(text[-KEPT_CHARACTERS:])

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
