"""Actors of the tests of everything at once: small, and each tells what became of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import trio

import fray


class Link:
    """One of a chain: it does a thing itself, or asks the next one."""

    def __init__(self, onward: Any = None) -> None:
        self.onward = onward
        self.given = 0
        self.n = 0
        self.entered = trio.Event()
        self.woken = trio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def add(self, k: int) -> int:
        if self.onward is not None:
            return int(await self.onward.add(k)) + 1
        self.n += k
        return self.n

    async def fail(self) -> None:
        if self.onward is not None:
            await self.onward.fail()
        raise LookupError("no such page")

    async def hang(self) -> None:
        self.entered.set()
        try:
            if self.onward is not None:
                await self.onward.hang()
            await trio.sleep_forever()
        finally:
            self.woken.set()

    async def wait_entered(self) -> None:
        await self.entered.wait()

    async def wait_woken(self) -> None:
        await self.woken.wait()

    def numbers(self, count: int) -> Iterator[int]:
        for number in range(count):
            self.given = number + 1
            yield number

    def how_many_given(self) -> int:
        return self.given

    async def shout(self, stream: fray.Stream) -> int:
        count = 0
        async for word in stream:
            await stream.send(word.upper())
            count += 1
        return count

    async def mark(self, array: Any) -> Any:
        """Write into the array where it has arrived, and have the next one do so, too."""
        array[0] += 1
        return array if self.onward is None else await self.onward.mark(array)

    async def double(self, future: Any) -> int:
        return 2 * int(await future)

    async def hand_in(self, pool: Any, n: int) -> int:
        return int(await pool.submit(square, n))

    async def follow(self, leader: Any) -> None:
        fray.link(leader)

    async def stumble(self) -> None:
        fray.current_actor().fail("stumbled")


class Member:
    """One of a group; that of index 2 is made when the file's other end is opened."""

    def __init__(self, gate: str) -> None:
        self.place = fray.current_actor().index
        if self.place == 2:
            with open(gate) as file:
                file.read()

    def whoami(self) -> tuple[int | None, int]:
        return self.place, os.getpid()


class Cell:
    """A light actor."""

    def __init__(self) -> None:
        self.index = fray.current_actor().index

    async def whoami(self) -> tuple[int | None, int]:
        return self.index, os.getpid()


class Stateful:
    """Keeps what it counts."""

    def __init__(self) -> None:
        self.n = 0

    async def pid(self) -> int:
        return os.getpid()

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def keep(self) -> int:
        await fray.current_actor().checkpoint()
        return self.n

    def __fray_checkpoint__(self) -> int:
        return self.n

    def __fray_restore__(self, n: int) -> None:
        self.n = n


class Blocking:
    """Only sync methods, as sync programs have them."""

    def __init__(self, start: int) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def double(self, future: Any) -> int:
        return 2 * int(future.result(timeout=20))

    def hand_in(self, pool: Any, n: int) -> int:
        return sum(pool.imap(square, range(n)))

    def ask(self, pool: Any, k: int) -> list[int]:
        return [pool.call().add(k), pool.broadcast().add(k)[0].result()]

    def fail(self) -> None:
        raise LookupError("no such page")

    def countdown(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)

    def sum_up(self, numbers: fray.BlockingStream) -> int:
        return sum(numbers)


def square(n: int) -> int:
    return n * n


def whereabouts(_: int) -> str:
    return os.environ["FRAY_JOB_ID"]
