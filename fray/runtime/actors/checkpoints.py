"""The state of one actor, kept over its restarts: taken, handed to the controller, given back.

The law. ``__fray_checkpoint__`` runs where the actor's methods run, between two of its calls (in a class with async
methods: while the others are at an await), or where its own code asks for it. What it returned is pickled there and
then, so that later changes do not show in it. Checkpoints are handed in one after the other in the order they were
taken; the controller takes them only from the incarnation that lives.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import trio

from fray.errors import FrayError, InvalidRequest, MessageTooLarge
from fray.model.messages.client import Checkpoint, FetchCheckpoint, SaveCheckpoint
from fray.model.specs import BLOB_LIMIT_BYTES, ActorConfig
from fray.net import storage
from fray.runtime.actors.lifecycle import ActorLifecycle, lifecycle_var
from fray.runtime.context import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.threads.executor import SerialExecutor

log = logging.getLogger("fray.actor")

CHECKPOINT, RESTORE = "__fray_checkpoint__", "__fray_restore__"
AT_END_S = 2.0
"""How long the last checkpoint of an actor that is being ended may take."""


def check_class(cls: type, config: ActorConfig) -> bool:
    """Whether actors of this class keep their state.

    Raises:
        InvalidRequest: it has one hook of the two, or an async one, or the config asks for what it has not.
    """
    both = f"{CHECKPOINT}(self) and {RESTORE}(self, state)"
    hooks = {hook: getattr(cls, hook) for hook in (CHECKPOINT, RESTORE) if hasattr(cls, hook)}
    if len(hooks) == 1 or any(map(inspect.iscoroutinefunction, hooks.values())):
        raise InvalidRequest(f"{cls.__name__} has {', '.join(hooks)}: write both, {both}, neither of them async")
    if not hooks and (config.checkpoint_every_s is not None or config.checkpoint_storage is not None):
        raise InvalidRequest(f"{cls.__name__} can keep no state: it needs {both}")
    return bool(hooks)


class Checkpoints:
    """Those of one incarnation. ``runner``: the thread of an all-sync object; None: it lives in the loop."""

    def __init__(
        self, runtime: Runtime, life: ActorLifecycle, instance: Any, runner: SerialExecutor | None, config: ActorConfig
    ) -> None:
        self._runtime, self._life, self._instance, self._runner = runtime, life, instance, runner
        self._storage = config.checkpoint_storage
        self._numbers = count(1)
        self._token = trio.lowlevel.current_trio_token()
        self._turn = trio.Lock()
        self._saved = 0
        self._last: str | None = None
        self._stored: str | None = None

    # Back ------------------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Give the object the state that is kept, if any is; raises what its hook raises."""
        reply, blobs = await self._runtime.link.request_blobs(FetchCheckpoint())
        assert isinstance(reply, Checkpoint)
        if reply.location:
            data = await storage.read(reply.location)
            self._stored = reply.location
        elif blobs:
            data = bytes(blobs[0])
        else:
            return
        await self._run_hook(lambda: getattr(self._instance, RESTORE)(pickling.loads(data)))

    # Taken -----------------------------------------------------------------------------------------------------------

    def capture(self) -> tuple[int, bytes]:
        """Its state now, pickled, and its place in the order; runs on whichever thread calls.

        Raises:
            NotPicklable: the state cannot be kept; or whatever the hook raises.
        """
        number, state = next(self._numbers), getattr(self._instance, CHECKPOINT)()
        return number, pickling.dumps(state, f"the checkpoint of {self._life.name}")

    async def take(self) -> None:
        """Its state between two calls, saved."""
        await self.save(*await self._run_hook(self.capture))

    async def take_here(self) -> None:
        """Its state at this point of its own async code, saved."""
        await self.save(*self.capture())

    def take_soon(self) -> None:
        """Its state at this point of its own code, on whichever thread; saved soon. What goes wrong then is logged."""
        number, data = self.capture()
        try:
            self._token.run_sync_soon(self._runtime.nursery.start_soon, self._save_or_log, number, data)
        except trio.RunFinishedError:
            pass  # the actor has ended

    async def take_every(self, period_s: float) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(period_s)
            await self._or_log(self.take)

    async def take_at_end(self) -> None:
        """The last one, in an orderly end that may be followed by a new incarnation. To be shielded; bounded."""
        with trio.move_on_after(AT_END_S):
            await self._or_log(self.take)

    async def _run_hook(self, hook: Callable[[], Any]) -> Any:
        def call() -> Any:
            token = lifecycle_var.set(self._life)
            try:
                return hook()
            finally:
                lifecycle_var.reset(token)

        return call() if self._runner is None else await self._runner.run(call)

    # Saved -----------------------------------------------------------------------------------------------------------

    async def save(self, number: int, data: bytes) -> None:
        """Hand it in, unless a later one was already; returns once it is on the controller's disk.

        Raises:
            MessageTooLarge: over 8 MiB, and there is no `ActorConfig.checkpoint_storage`.
            ActorDied: this incarnation has ended for the cluster.
        """
        async with self._turn:
            name = pickling.name_of(data)
            if number < self._saved or name == self._last:
                return
            if len(data) <= BLOB_LIMIT_BYTES:
                await self._runtime.link.request_blobs(SaveCheckpoint(number=number, blob=name), [data])
                await self._replace_stored(None)
            else:
                await self._store(number, data)
            self._saved, self._last = number, name

    async def _store(self, number: int, data: bytes) -> None:
        if self._storage is None:
            raise MessageTooLarge(
                f"the checkpoint of {self._life.name} has {len(data):,} bytes; the controller keeps at most "
                f"{BLOB_LIMIT_BYTES:,}: give ActorConfig(checkpoint_storage='file:///shared/dir' or 'gs://bucket/dir')",
                size_bytes=len(data),
                limit_bytes=BLOB_LIMIT_BYTES,
            )
        incarnation = self._life.incarnation.replace(":", ".")
        location = f"{self._storage.rstrip('/')}/{self._runtime.namespace}/{incarnation}-{number}.ckpt"
        await storage.write(location, data)
        await self._runtime.link.request(SaveCheckpoint(number=number, location=location))
        await self._replace_stored(location)

    async def _replace_stored(self, location: str | None) -> None:
        """What was in the storage before is needed no more."""
        old, self._stored = self._stored, location
        if old is not None and old != location:
            await storage.delete(old)

    async def _save_or_log(self, number: int, data: bytes) -> None:
        await self._or_log(lambda: self.save(number, data))

    async def _or_log(self, act: Callable[[], Any]) -> None:
        """The actor goes on without this one."""
        try:
            await act()
        except FrayError as error:
            log.warning("no checkpoint of actor %s was kept: %s", self._life.name, error)
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("no checkpoint of actor %s was kept", self._life.name)


def checkpoints_of(life: ActorLifecycle) -> Checkpoints:
    """Those of the running actor.

    Raises:
        InvalidRequest: it keeps no state.
    """
    found = life.checkpoints
    if not isinstance(found, Checkpoints):
        raise InvalidRequest(
            f"actor {life.name} keeps no state: its class needs {CHECKPOINT}(self) and {RESTORE}(self, state), and it "
            "needs a process of its own"
        )
    return found
