"""Actors of the fire tests: what they did is written where no death can undo it."""

from __future__ import annotations

import os
import struct
import time
from collections import Counter

import trio

NUMBER = struct.Struct("<I")


class Recorder:
    """Writes the number of each call into a file as it runs: one `write`, so that a kill leaves whole numbers."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def take(self, number: int) -> int:
        os.write(self._file, NUMBER.pack(number))
        time.sleep(50e-6)  # so that a death finds most calls still to be run
        return number

    def pid(self) -> int:
        return os.getpid()

    async def hold(self) -> None:
        await trio.sleep_forever()


def effects(path: str) -> Counter[int]:
    """Number of times each call ran."""
    with open(path, "rb") as file:
        return Counter(number for (number,) in NUMBER.iter_unpack(file.read()))
