"""Parts of `bench.rl` in other processes: an engine without a model, and weights that are received over HTTP."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any
from urllib.request import urlopen

import trio
from attrs import frozen

from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest


class NoOpEngine:
    """Engine that answers every request in the next step, with the token 7 up to ``max_tokens``."""

    max_length = 1_000_000

    def __init__(self) -> None:
        self.version = VersionName(0, 0)
        self._requests: dict[str, GenerateRequest] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: GenerateRequest, *, stream: bool = False) -> None:
        self._requests[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> list[tuple[str, Completion]]:
        requests, self._requests = self._requests, {}
        return [
            (name, self._completion(request, index))
            for name, request in requests.items()
            for index in range(request.sampling.n)
        ]

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        self.version = version

    def abort_all(self) -> None:
        return None

    def _completion(self, request: GenerateRequest, index: int) -> Completion:
        count = request.sampling.max_tokens
        return Completion([7] * count, [-1.0] * count, [(self.version, count)], "length", index)


@frozen
class ServedFile:
    """File behind an URL; ``await`` gives its bytes."""

    url: str

    def __await__(self) -> Generator[Any, Any, Any]:
        return trio.to_thread.run_sync(self._receive).__await__()

    def _receive(self) -> bytes:
        with urlopen(self.url) as answer:
            content: bytes = answer.read()
        return content

    async def release(self) -> None:
        return None


def timed_memcpy(size_bytes: int) -> float:
    """Return the seconds of a copy of so many bytes between warm pages."""
    source, target = b"\1" * size_bytes, bytearray(size_bytes)
    memoryview(target)[:] = source
    began = time.perf_counter()
    memoryview(target)[:] = source
    return time.perf_counter() - began
