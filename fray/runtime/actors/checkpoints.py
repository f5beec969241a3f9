"""State of one actor, saved over its restarts: taken, saved by the controller, restored.

Invariants:

- ``__fray_checkpoint__`` runs where the actor's methods run, between two of its calls (in a class with async methods:
  while the others are at an await), or where its own code requests it. What it returns is pickled right there, so that
  later changes do not show in it.
- Checkpoints are saved one after the other in the order they were taken. The controller keeps the latest one and
  accepts them from the living incarnation only.
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
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.threads.executor import SerialExecutor

log = logging.getLogger("fray.actor")

CHECKPOINT, RESTORE = "__fray_checkpoint__", "__fray_restore__"
AT_END_S = 2.0
"""Time limit of the last checkpoint of an actor that is being ended, in seconds."""


def check_class(cls: type, config: ActorConfig) -> bool:
    """Return whether actors of this class keep their state.

    Raises:
        InvalidRequest: it has one hook of the two, or an async one, or the config requests checkpoints it cannot take.
    """
    both = f"{CHECKPOINT}(self) and {RESTORE}(self, state)"
    hooks = {hook: getattr(cls, hook) for hook in (CHECKPOINT, RESTORE) if hasattr(cls, hook)}
    # Found at creation and not at the first restart, when the state would already be lost.
    if len(hooks) == 1 or any(map(inspect.iscoroutinefunction, hooks.values())):
        raise InvalidRequest(f"{cls.__name__} has {', '.join(hooks)}: write both, {both}, neither of them async")
    if not hooks and (config.checkpoint_every_s is not None or config.checkpoint_storage is not None):
        raise InvalidRequest(f"{cls.__name__} can keep no state: it needs {both}")
    return bool(hooks)


class Checkpoints:
    """Checkpoints of one incarnation.

    Args:
        executor: the thread of an all-sync object; None: it lives in the loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        lifecycle: ActorLifecycle,
        instance: Any,
        executor: SerialExecutor | None,
        config: ActorConfig,
    ) -> None:
        self._runtime, self._lifecycle, self._instance, self._executor = runtime, lifecycle, instance, executor
        self._storage = config.checkpoint_storage
        # Numbers order the checkpoints by when they were taken; saving them may overlap.
        self._numbers = count(1)
        # `take_soon` may be called by a thread of the actor.
        self._token = trio.lowlevel.current_trio_token()
        self._lock = trio.Lock()
        self._saved = 0
        self._last: str | None = None
        self._location: str | None = None

    # Restoring -------------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Restore the saved state, if there is one; raises any error of the hook."""
        reply, blobs = await self._runtime.client.request_blobs(FetchCheckpoint())
        assert isinstance(reply, Checkpoint)
        if reply.location:
            # Read before the new incarnation saves anything: its first save deletes this file.
            data = await storage.read(reply.location)
            self._location = reply.location
        elif blobs:
            data = bytes(blobs[0])
        else:
            return
        await self._run_hook(lambda: getattr(self._instance, RESTORE)(pickling.loads(data)))

    # Taking ----------------------------------------------------------------------------------------------------------

    def capture(self) -> tuple[int, bytes]:
        """Return a number that orders checkpoints, and the present state, pickled; on the calling thread.

        Raises:
            NotPicklable: the state cannot be pickled; or any error of the hook.
        """
        number, state = next(self._numbers), getattr(self._instance, CHECKPOINT)()
        return number, pickling.dumps(state, f"the checkpoint of {self._lifecycle.name}")

    async def take(self) -> None:
        """Save the state between two calls."""
        await self.save(*await self._run_hook(self.capture))

    async def take_here(self) -> None:
        """Save the state at this point of the actor's own async code."""
        await self.save(*self.capture())

    def take_soon(self) -> None:
        """Capture the state here, on any thread, and save it soon. Errors of saving are logged."""
        number, data = self.capture()
        try:
            # Without waiting: a sync method cannot await the save, and blocking its thread would stop the actor.
            self._token.run_sync_soon(self._runtime.nursery.start_soon, self._save_or_log, number, data)
        except trio.RunFinishedError:
            pass  # the actor has ended

    async def take_every(self, period_s: float) -> None:
        """Take one every ``period_s`` until cancelled."""
        # The pause begins after the save, so a slow storage is not given a second one meanwhile.
        while True:
            await trio.sleep(period_s)
            await self._or_log(self.take)

    async def take_at_end(self) -> None:
        """Take the last one, in an orderly end that a new incarnation may follow. Bounded; the caller shields it."""
        with trio.move_on_after(AT_END_S):
            await self._or_log(self.take)

    async def _run_hook(self, hook: Callable[[], Any]) -> Any:
        def call() -> Any:
            # The hook may call `fray.current_actor`, and an executor's thread has no context of the actor.
            token = lifecycle_var.set(self._lifecycle)
            try:
                return hook()
            finally:
                lifecycle_var.reset(token)

        # On the thread of the methods: a call that is running there ends first, so the state is consistent.
        return call() if self._executor is None else await self._executor.run(call)

    # Saving ----------------------------------------------------------------------------------------------------------

    async def save(self, number: int, data: bytes) -> None:
        """Save a checkpoint, unless a later one was saved already; return once it is on the controller's disk.

        Raises:
            MessageTooLarge: over 8 MiB, and there is no `ActorConfig.checkpoint_storage`.
            ActorDied: this incarnation has ended for the cluster.
        """
        # One at a time: the controller replaces the checkpoint, so an older one must not arrive last.
        async with self._lock:
            name = pickling.blob_name(data)
            # An older one is superseded. An equal one (by hash of its contents) is there already: an idle actor costs
            # nothing.
            if number < self._saved or name == self._last:
                return
            # The controller's limit for one blob; larger state goes to the user's storage.
            if len(data) <= BLOB_LIMIT_BYTES:
                await self._runtime.client.request_blobs(SaveCheckpoint(number=number, blob=name), [data])
                # After the controller has recorded the new one: a crash in between leaves a file too many, not a state
                # too few.
                await self._replace_stored(None)
            else:
                await self._store(number, data)
            self._saved, self._last = number, name

    async def _store(self, number: int, data: bytes) -> None:
        if self._storage is None:
            raise MessageTooLarge(
                f"the checkpoint of {self._lifecycle.name} has {len(data):,} bytes; the controller keeps at most "
                f"{BLOB_LIMIT_BYTES:,}: give ActorConfig(checkpoint_storage='file:///shared/dir' or 'gs://bucket/dir')",
                size_bytes=len(data),
                limit_bytes=BLOB_LIMIT_BYTES,
            )
        # A file belongs to its incarnation, so two that overlap for a moment cannot overwrite each other's. What
        # replaces a checkpoint is the controller's record of its location; the last file stays when the actor ends.
        incarnation = self._lifecycle.incarnation.replace(":", ".")
        location = f"{self._storage.rstrip('/')}/{self._runtime.namespace}/{incarnation}-{number}.ckpt"
        await storage.write(location, data)
        # The file first, then its record: the record never names a file that is not complete.
        await self._runtime.client.request(SaveCheckpoint(number=number, location=location))
        await self._replace_stored(location)

    async def _replace_stored(self, location: str | None) -> None:
        """Note where the checkpoint is now, and delete the file that held the one before."""
        old, self._location = self._location, location
        if old is not None and old != location:
            await storage.delete(old)

    async def _save_or_log(self, number: int, data: bytes) -> None:
        await self._or_log(lambda: self.save(number, data))

    async def _or_log(self, act: Callable[[], Any]) -> None:
        """Log what goes wrong: the actor continues without this checkpoint."""
        try:
            await act()
        except FrayError as error:
            log.warning("no checkpoint of actor %s was saved: %s", self._lifecycle.name, error)
        # A hook of the user: its failure must not end a task of Fray, nor the actor.
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("no checkpoint of actor %s was saved", self._lifecycle.name)


def checkpoints_of(lifecycle: ActorLifecycle) -> Checkpoints:
    """Return the checkpoints of the running actor.

    Raises:
        InvalidRequest: it keeps no state.
    """
    found = lifecycle.checkpoints
    if not isinstance(found, Checkpoints):
        raise InvalidRequest(
            f"actor {lifecycle.name} keeps no state: its class needs {CHECKPOINT}(self) and {RESTORE}(self, state), "
            "and it needs a process of its own"
        )
    return found
