"""Actors and functions that run on the hosts of the laboratory, and record there what happened to them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

import fray
from bench.histories.clients import BEAT_S
from tests.network.host import SHARED

OVERLAPS = "overlaps"
"""File in the shared folder with a line for each incarnation that began while another of its actor ran."""
EFFECTS = "effects"
"""Folder in the shared folder with a file for each incarnation, ``NAME HOST PID TIME``: a line for each effect, and one
without a key every `BEAT_S`."""

ANSWERS = "answers"
"""Folder in the shared folder with a file for each load, ``NAME PREFIX``: a line for each call, with begin and end,
outcome, number of items (0: a call without a stream), and key."""
HISTORY = "history"
"""Folder in the shared folder with the files of `bench.histories`."""
AGAIN = "-again"
"""End of the keys of calls that may be repeated."""


class Effects(Counter[str]):
    """Counts effects by key, and writes each to a file, which survives the process and its machine."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        file.parent.mkdir(exist_ok=True)
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def add(self, key: str) -> int:
        """Count one, and return how often this key was counted here."""
        self[key] += 1
        self._write(key)
        return self[key]

    def beat(self) -> None:
        """Write signs of life, until this process ends."""
        while True:
            self._write("")
            time.sleep(BEAT_S)

    def _write(self, key: str) -> None:
        os.write(self._file, f"{time.monotonic():.6f} {key}\n".encode())


class Ledger:
    """Counts what is done to it by key, so that repeated and lost effects are seen; one of a name runs at a time."""

    def __init__(self, name: str = "ledger") -> None:
        incarnation = f"{name} {socket.gethostname()} {os.getpid()} {time.monotonic():.6f}"
        file = Path(SHARED) / EFFECTS / incarnation
        self._effects, self._items = Effects(file), Effects(file)
        threading.Thread(target=self._effects.beat, daemon=True).start()
        # Held until this process ends, whatever ends it; the hosts share the file.
        self._lock = (Path(SHARED) / f"{name}.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (Path(SHARED) / OVERLAPS).open("a") as file:
                file.write(f"{name}: process {os.getpid()} on {socket.gethostname()}\n")

    async def add(self, key: str) -> int:
        """Count one effect, and return how often this key was counted."""
        return self._effects.add(key)

    async def add_slowly(self, key: str, seconds: float) -> int:
        """Count one effect at the beginning of a call that lasts."""
        self._effects.add(key)
        await trio.sleep(seconds)
        return self._effects[key]

    async def numbers(self, count: int) -> AsyncIterator[int]:
        """Stream numbers from 0."""
        for number in range(count):
            yield number

    async def collect(self, key: str, stream: fray.Stream) -> int:
        """Count each item of a two-way stream, and send it back."""
        before = len(self._items)
        async for item in stream:
            self._items.add(f"{key} {item}")
            await stream.send(item)
        return len(self._items) - before

    async def digest(self, key: str, array: bytes) -> str:
        """Count one effect, and return the digest of a large argument."""
        self._effects.add(key)
        return hashlib.sha256(array).hexdigest()

    async def effects(self) -> dict[str, object]:
        """Return the number of keys counted, and those that were counted more than once."""
        repeated = sorted(key for key, times in (self._effects + self._items).items() if times > 1)
        return {"keys": len(self._effects), "items": len(self._items), "repeated": repeated}

    async def missing(self, keys: list[str]) -> list[str]:
        """Return which of the keys were never counted."""
        return [key for key in keys if not self._effects[key]]

    async def where(self) -> str:
        """Return the name of the host and the process."""
        return f"{socket.gethostname()} {os.getpid()}"


class Computer:
    """Computes, or waits, on its only thread."""

    def compute(self, seconds: float) -> str:
        """Keep the interpreter for so long, as an extension that computes does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            # A C call that does not release the interpreter for a second; it sleeps, so as to leave the CPU to others.
            ctypes.PyDLL(None).usleep(999_999)
        return socket.gethostname()

    def sleep(self, seconds: float) -> str:
        """Release the interpreter for so long."""
        time.sleep(seconds)
        return socket.gethostname()


def call_by_name(name: str, method: str, *args: object) -> object:
    """Call an actor from a job, by the name of its server."""
    pool: Any = fray.blocking.ClusterResolver(fray.blocking.current_cluster()).lookup(name)
    pool.wait_for_size(1)
    return getattr(pool.call(), method)(*args)
