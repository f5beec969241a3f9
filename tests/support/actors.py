"""The actors that the tests of calls call."""

from __future__ import annotations

import sys
import threading
from typing import Any

import trio

from fray.runtime.current_call import current_actor


class Counter:
    """Sync and async methods: it lives in the loop."""

    def __init__(self) -> None:
        self.n = 0
        self.log: list[Any] = []
        self.gate = trio.Event()
        self.left = trio.Event()

    def add(self, k: int = 1) -> int:
        self.n += k
        return self.n

    async def add_async(self, k: int = 1) -> int:
        return self.add(k)

    async def note(self, what: Any) -> None:
        self.log.append(what)
        await self.gate.wait()

    def note_now(self, what: Any) -> None:
        self.log.append(what)

    def notes(self) -> list[Any]:
        return self.log

    async def wait_for_gate(self) -> str:
        self.log.append("waiting")
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.log.append("cancelled")
            self.left.set()
            raise
        return "open"

    def open_gate(self) -> None:
        self.gate.set()

    async def stubborn(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    def fail(self, text: str) -> None:
        raise ValueError(text)

    async def fail_async(self, text: str) -> None:
        raise LookupError(text)

    def echo(self, value: Any) -> Any:
        return value

    def keywords(self, a: int, *, b: int) -> tuple[int, int]:
        return a, b

    def lock(self) -> Any:
        return {"held": threading.Lock()}

    def exit(self) -> None:
        sys.exit(3)

    async def interrupt(self) -> None:
        raise KeyboardInterrupt

    def who(self) -> tuple[str, str]:
        return current_actor().actor_id, current_actor().method

    def with_context(self, ctx: Any, k: int) -> tuple[str, int]:
        return type(ctx).__name__, k

    def with_annotation(self, where: ActorContext, k: int) -> tuple[str, int]:
        return type(where).__name__, k

    def decorated(self) -> Any:
        return self.add_async()

    def _private(self) -> None:
        raise AssertionError("private")

    @property
    def size(self) -> int:
        return self.n

    @staticmethod
    def still(k: int) -> int:
        return k

    @classmethod
    def name_of_class(cls) -> str:
        return cls.__name__


class ActorContext:
    """Stands for the one of the API."""


class Plain:
    """Only sync methods: it lives on a thread."""

    def __init__(self) -> None:
        self.n = 0
        self.release = threading.Event()
        self.log: list[Any] = []

    def add(self, k: int = 1) -> int:
        self.n += k
        return self.n

    def thread(self) -> str:
        return threading.current_thread().name

    def hold(self) -> bool:
        """Wait until released; return whether it was asked to stop meanwhile."""
        self.release.wait(10)
        return current_actor().cancelled

    def note_now(self, what: Any) -> None:
        self.log.append(what)

    def exit(self) -> None:
        sys.exit(3)
