"""Pool of zygotes: the node's own, which always runs, and one per environment in use.

Invariants: an attempt is forked by a zygote of its environment, which runs as long as an attempt uses it and `IDLE_S`
longer. At most `IDLE_LIMIT` of them are idle: the longest idle ends first.
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
IDLE_LIMIT = 4

log = logging.getLogger("fray.node")

MakeManager: TypeAlias = Callable[[PreparedEnvironment], ZygoteManager]


@define(eq=False)
class PooledZygote:
    """Zygote of one environment, with its users."""

    manager: ZygoteManager
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
    """Zygotes of one node.

    Args:
        own: manager of the node's own.
        make: returns a manager for another environment.
    """

    def __init__(
        self, own: ZygoteManager, make: MakeManager, *, idle_s: float = IDLE_S, idle_limit: int = IDLE_LIMIT
    ) -> None:
        self.own, self.idle_s, self.idle_limit = PooledZygote(own), idle_s, idle_limit
        self._make_manager = make
        self._others: dict[str, PooledZygote] = {}
        self._stopping: set[PooledZygote] = set()
        self._adopted: dict[int, PooledZygote] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def pids(self) -> set[int]:
        """Pids of all zygotes, including those that are starting or ending."""
        zygote_pool = (self.own, *self._others.values(), *self._stopping, *self._adopted.values())
        return {pooled.manager.pid for pooled in zygote_pool if pooled.manager.pid is not None}

    @property
    def interpreters(self) -> dict[str, int]:
        """Other environments that have a zygote now, with the number of attempts that use each."""
        return {interpreter: pooled.users for interpreter, pooled in self._others.items()}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the node's own running, and the others as long as they are used; started when the own one is ready.

        Raises:
            LaunchFailed: the node's own could not be started.
        """
        error: LaunchFailed | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._nursery.start(self.own.manager.run)
            except LaunchFailed as reason:
                error = reason
            else:
                task_status.started()
                await trio.sleep_forever()
        if error is not None:
            raise error

    def adopt(self, pid: int, link: int, on_lost: Callable[[], None]) -> None:
        """Take over a zygote of the program that ran in this process before. `adopted` returns it."""
        from fray.node.zygotes.adopted import AdoptedZygote  # rare

        self._adopted[pid] = PooledZygote(AdoptedZygote(pid, link, on_lost))

    def adopted(self, pid: int) -> PooledZygote:
        """Return that zygote for one attempt. Call `PooledZygote.release` when nothing of the attempt is left."""
        self._adopted[pid].users += 1
        return self._adopted[pid]

    def hold_adopted(self) -> None:
        """Hold each adopted zygote as long as it is used."""
        assert self._nursery is not None, "zygotes need to run"
        for pid, pooled in self._adopted.items():
            self._nursery.start_soon(self._hold_adopted, pid, pooled)

    async def _hold_adopted(self, pid: int, pooled: PooledZygote) -> None:
        async def wait_unused() -> None:
            while pooled.users:
                await pooled.changed.park()

        try:
            await pooled.manager.run_until(wait_unused)  # type: ignore[attr-defined]
        finally:
            del self._adopted[pid]

    def hand_over(self) -> dict[int, int]:
        """Return the link of each running zygote by its pid."""
        pooled = (self.own, *self._others.values(), *self._stopping, *self._adopted.values())
        return {pid: link for each in pooled for pid, link in each.manager.running_links().items()}

    async def acquire(self, prepared: PreparedEnvironment) -> PooledZygote:
        """Return the zygote of that environment, started first if necessary. Call `PooledZygote.release` after use.

        Raises:
            NotPrepared: it cannot be started.
        """
        pooled = self._get_or_start(prepared)
        # Before the wait: a zygote without users may be ended while it starts.
        pooled.users += 1
        pooled.changed.unpark_all()
        acquired = False
        try:
            # The node's own was ready before the pool was.
            if pooled is not self.own:
                await pooled.ready.wait()
            acquired = pooled.failed is None
        finally:
            # Also if the attempt was stopped while it waited.
            if not acquired:
                pooled.release()
        if pooled.failed is not None:
            raise NotPrepared(pooled.failed)
        return pooled

    def _get_or_start(self, prepared: PreparedEnvironment) -> PooledZygote:
        if not prepared.interpreter or prepared.starts_cold:
            return self.own
        pooled = self._others.get(prepared.interpreter)
        if pooled is None:
            assert self._nursery is not None, "zygotes need to run"
            # Registered before it is ready: attempts that come meanwhile wait for the same one.
            pooled = self._others[prepared.interpreter] = PooledZygote(self._make_manager(prepared))
            self._nursery.start_soon(self._run_one, prepared.interpreter, pooled)
        return pooled

    async def _run_one(self, interpreter: str, pooled: PooledZygote) -> None:
        try:
            with pooled.scope:
                async with trio.open_nursery() as nursery:
                    await self._start(nursery, pooled)
                    await self._wait_unused(pooled)
                    # Before it ends: a request in between must start another one and not get this one.
                    self._remove(interpreter, pooled)
                    nursery.cancel_scope.cancel()
        finally:
            self._remove(interpreter, pooled)
            # Only now: until it is reaped, its pid has to be spared when orphans are killed.
            self._stopping.discard(pooled)

    async def _start(self, nursery: trio.Nursery, pooled: PooledZygote) -> None:
        try:
            await nursery.start(pooled.manager.run)
        except LaunchFailed as error:
            # The error of this environment is the error of the attempts that wait for it, not of the node.
            pooled.failed = f"cannot start a process in the environment: {error}"
        pooled.ready.set()

    async def _wait_unused(self, pooled: PooledZygote) -> None:
        """Return when it was idle for `idle_s`, when too many others are idle, or at once if it has failed."""
        while pooled.failed is None:
            while pooled.users:
                await pooled.changed.park()
            if pooled in self._too_idle():
                return
            with trio.move_on_after(self.idle_s) as patience:
                await pooled.changed.park()
            # It may have got a user in the same instant.
            if patience.cancelled_caught and not pooled.users:
                return

    def _too_idle(self) -> list[PooledZygote]:
        idle = sorted((one for one in self._others.values() if not one.users), key=lambda one: one.idle_since)
        gone = idle[: max(0, len(idle) - self.idle_limit)]
        # Each ends in a task of its own, which has to look again.
        for pooled in gone:
            pooled.changed.unpark_all()
        return gone

    def _remove(self, interpreter: str, pooled: PooledZygote) -> None:
        """Remove it from the pool: the next user starts another one."""
        # Another may have taken its place already.
        if self._others.get(interpreter) is pooled:
            del self._others[interpreter]
            self._stopping.add(pooled)
