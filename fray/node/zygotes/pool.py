"""Zygotes of several environments: the node's own, which always lives, and others while jobs need them.

Law: an attempt is forked by a zygote of its environment, which runs as long as an attempt uses it and `IDLE_S` longer.
At most `MOST_IDLE` of them wait for nothing: the longest idle ends first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import trio
from attrs import define, field

from fray.errors import LaunchFailed
from fray.node.prepare import NotPrepared, PreparedEnvironment
from fray.node.zygotes.manager import ZygoteManager

IDLE_S = 300.0
MOST_IDLE = 4

log = logging.getLogger("fray.node")

Make: TypeAlias = Callable[[PreparedEnvironment], ZygoteManager]


@define(eq=False)
class PooledZygote:
    """The zygote of one environment, and who uses it."""

    zygotes: ZygoteManager
    users: int = 0
    idle_since: float = 0.0
    changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    ready: trio.Event = field(factory=trio.Event)
    failed: str | None = None
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def release(self) -> None:
        self.users -= 1
        self.idle_since = trio.current_time()
        self.changed.unpark_all()


class ZygotePool:
    """All zygotes of one node.

    Args:
        own: the node's own.
        make: for another environment.
    """

    def __init__(self, own: ZygoteManager, make: Make, *, idle_s: float = IDLE_S, most_idle: int = MOST_IDLE) -> None:
        self.own, self.idle_s, self.most_idle = PooledZygote(own), idle_s, most_idle
        self._make = make
        self._others: dict[str, PooledZygote] = {}
        self._leaving: set[PooledZygote] = set()
        self._nursery: trio.Nursery | None = None

    @property
    def pids(self) -> set[int]:
        """Of all zygotes, those that start or end too."""
        broods = (self.own, *self._others.values(), *self._leaving)
        return {brood.zygotes.pid for brood in broods if brood.zygotes.pid is not None}

    @property
    def interpreters(self) -> dict[str, int]:
        """Of other environments that have a zygote now, with the number of attempts that use it."""
        return {interpreter: brood.users for interpreter, brood in self._others.items()}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the node's own alive, and the others as long as they are used; started when the own one is ready.

        Raises:
            LaunchFailed: the node's own could not be started.
        """
        error: LaunchFailed | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._nursery.start(self.own.zygotes.run)
            except LaunchFailed as reason:
                error = reason
            else:
                task_status.started()
                await trio.sleep_forever()
        if error is not None:
            raise error

    async def take(self, prepared: PreparedEnvironment) -> PooledZygote:
        """A zygote of that environment, started first if there is none. `Brood.release` it.

        Raises:
            NotPrepared: it cannot be started.
        """
        brood = self._of(prepared)
        brood.users += 1
        brood.changed.unpark_all()
        taken = False
        try:
            if brood is not self.own:
                await brood.ready.wait()
            taken = brood.failed is None
        finally:
            if not taken:
                brood.release()
        if brood.failed is not None:
            raise NotPrepared(brood.failed)
        return brood

    def _of(self, prepared: PreparedEnvironment) -> PooledZygote:
        if not prepared.interpreter:
            return self.own
        brood = self._others.get(prepared.interpreter)
        if brood is None:
            assert self._nursery is not None, "zygotes need to run"
            brood = self._others[prepared.interpreter] = PooledZygote(self._make(prepared))
            self._nursery.start_soon(self._live, prepared.interpreter, brood)
        return brood

    async def _live(self, interpreter: str, brood: PooledZygote) -> None:
        try:
            with brood.scope:
                async with trio.open_nursery() as nursery:
                    await self._start(nursery, brood)
                    await self._wait_unused(brood)
                    self._leave(interpreter, brood)
                    nursery.cancel_scope.cancel()
        finally:
            self._leave(interpreter, brood)
            self._leaving.discard(brood)

    async def _start(self, nursery: trio.Nursery, brood: PooledZygote) -> None:
        try:
            await nursery.start(brood.zygotes.run)
        except LaunchFailed as error:
            brood.failed = f"no process can be started in the environment: {error}"
        brood.ready.set()

    async def _wait_unused(self, brood: PooledZygote) -> None:
        """Returns when nobody has used it for `idle_s`, when too many others are idle, or at once if it has failed."""
        while brood.failed is None:
            while brood.users:
                await brood.changed.park()
            if brood in self._too_idle():
                return
            with trio.move_on_after(self.idle_s) as patience:
                await brood.changed.park()
            if patience.cancelled_caught and not brood.users:
                return

    def _too_idle(self) -> list[PooledZygote]:
        idle = sorted((one for one in self._others.values() if not one.users), key=lambda one: one.idle_since)
        gone = idle[: max(0, len(idle) - self.most_idle)]
        for brood in gone:
            brood.changed.unpark_all()
        return gone

    def _leave(self, interpreter: str, brood: PooledZygote) -> None:
        """Whoever comes from now on gets another one."""
        if self._others.get(interpreter) is brood:
            del self._others[interpreter]
            self._leaving.add(brood)
