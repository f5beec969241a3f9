"""Actors that know themselves, for tests in this process and in others."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import trio

import fray


def facts() -> dict[str, Any]:
    me = fray.current_actor()
    return {
        "handle": me.handle,
        "id": me.actor_id,
        "name": me.name,
        "index": me.index,
        "group": me.group,
        "incarnation": me.incarnation,
        "method": me.method,
        "deadline": me.deadline is not None,
        "cancelled": me.cancelled,
    }


class Knowing:
    """Lives in the loop. ``journal``: file to which it writes what becomes of it."""

    def __init__(self, journal: str | None = None) -> None:
        self.journal = journal
        self.made = facts()
        self.gate = trio.Event()

    def write(self, word: str) -> None:
        if self.journal is not None:
            with open(self.journal, "a") as file:
                file.write(word + "\n")

    def born(self) -> dict[str, Any]:
        return self.made

    def now(self) -> dict[str, Any]:
        return facts()

    async def later(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return facts()

    def each(self) -> Any:
        yield facts()

    async def in_thread(self) -> dict[str, Any]:
        return await trio.to_thread.run_sync(facts)

    async def in_task(self) -> dict[str, Any]:
        found = []

        async def task() -> None:
            found.append(facts())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
        return found[0]

    async def wait_at_gate(self) -> str:
        await self.gate.wait()
        return "through"

    def open_gate(self) -> None:
        self.gate.set()

    async def hang(self) -> None:
        await trio.sleep_forever()

    async def leave(self) -> str:
        fray.current_actor().shutdown()
        await trio.sleep(0.01)
        return "left"

    def fail(self, message: str) -> None:
        fray.current_actor().fail(message)

    async def wait_shutdown(self) -> str:
        await fray.current_actor().shutdown_event.wait()
        return "shutdown"

    async def __fray_cleanup__(self) -> None:
        await trio.sleep(0.01)
        self.write(f"cleaned {fray.current_actor().name}")


class SyncKnowing:
    """Keeps a thread."""

    def __init__(self, journal: str | None = None) -> None:
        self.journal = journal
        self.thread = threading.get_ident()
        self.made = facts()

    def born(self) -> dict[str, Any]:
        return self.made

    def now(self) -> dict[str, Any]:
        return facts()

    def threads(self) -> bool:
        return self.thread == threading.get_ident()

    def in_plain_thread(self) -> dict[str, Any]:
        found = []
        thread = threading.Thread(target=lambda: found.append(facts()))
        thread.start()
        thread.join()
        return found[0]

    def leave(self) -> str:
        fray.current_actor().shutdown()
        return "left"

    def fail(self, message: str) -> None:
        fray.current_actor().fail(ValueError(message))

    def sleep(self, seconds: float) -> bool:
        return fray.current_actor().shutdown_event.wait_sync(seconds)

    def __fray_cleanup__(self) -> None:
        if self.journal is not None:
            same = "same" if self.thread == threading.get_ident() else "another"
            with open(self.journal, "a") as file:
                file.write(f"cleaned {fray.current_actor().name} on the {same} thread\n")


def lines(path: str | Path) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


class ContextUser:
    """Async methods with a ``ctx`` parameter: by name, and by annotation."""

    async def lookup(self, ctx: Any, name: str) -> Any:
        pool = ctx.resolver.lookup(name)
        await pool.wait_for_size(1, timeout=5)
        return type(ctx).__module__, ctx.job_id, ctx.namespace, await pool.call().pid()

    async def same(self, context: fray.ActorContext) -> bool:
        return context is fray.ActorContext.from_environment()

    async def pid(self) -> int:
        return os.getpid()
