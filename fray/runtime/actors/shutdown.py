"""Service of one object from its first call to its end.

Invariants:

- An actor that ends itself ends in order (it accepts no further calls, those it has finish) or as failed (those it has
  end with its error). One that is ended by others is cancelled, and its calls with it.
- The end has one order: the shutdown event is set, calls end, a last checkpoint is taken, the cleanup hook runs, the
  actor is gone. Only the actor's work is cancelled, not its place in the cluster: its hook may call other actors.
"""

from __future__ import annotations

import trio

from fray.errors import ActorDied
from fray.model.specs import ActorConfig
from fray.runtime.actors.checkpoints import AT_END_S, Checkpoints
from fray.runtime.actors.lifecycle import (
    CLEANUP,
    ActorLifecycle,
    ShutdownRequest,
    clean_up,
)
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.actors.threaded_actor import ThreadedActor
from fray.runtime.background import open_background_nursery
from fray.runtime.threads.executor import SerialExecutor


async def serve_until_shutdown(
    host: ActorHostServer, number: int, lifecycle: ActorLifecycle, config: ActorConfig
) -> ShutdownRequest:
    """Serve the actor that is registered under ``number`` until it ends itself; return why. Cancelled, end it too."""
    hosted = host.actors[number]
    requested = trio.Event()
    lifecycle.set_on_ending(lambda: _close(hosted, lifecycle, requested))
    try:
        async with open_background_nursery() as nursery:
            if config.idle_s is not None:
                nursery.start_soon(end_when_idle, hosted, lifecycle, config.idle_s)
            await requested.wait()
        assert lifecycle.ending is not None
        # An actor that has failed ends its calls with its error instead of letting them finish.
        if lifecycle.ending.error is None:
            await hosted.wait_idle()
        return lifecycle.ending
    finally:
        # Also if it is cancelled: calls get an answer, and the cleanup hook runs, within `cleanup_s`.
        with trio.CancelScope(shield=True):
            await shut_down(hosted, lifecycle, config.cleanup_s)
        # Last: until then late calls are refused with the reason, which a missing actor could not give.
        host.unregister(number)


def _close(hosted: ServedActor, lifecycle: ActorLifecycle, requested: trio.Event) -> None:
    """Refuse calls at once: also one that arrives right after the answer to the call that requested the end."""
    assert lifecycle.ending is not None
    hosted.close(lifecycle.ending.refusal_error(hosted.name))
    lifecycle.set_shutdown_event()
    requested.set()


async def shut_down(hosted: ServedActor, lifecycle: ActorLifecycle, cleanup_s: float) -> None:
    """End what is still under way, then run the hook for at most ``cleanup_s``. The caller shields it."""
    # Each step may have been done before, by `_close`; all of them may be repeated.
    lifecycle.set_shutdown_event()
    hosted.close(ActorDied("the process of this actor is shutting down"))
    hosted.end_calls(lifecycle.ending.error if lifecycle.ending is not None else None)
    # After the calls have ended and before the hook, which may destroy the state.
    await _take_last_checkpoint(hosted, lifecycle)
    if not hasattr(lifecycle.cls, CLEANUP):
        return
    began = trio.current_time()
    # Cancelled tasks may still be in their `finally` blocks. A thread is not waited for: its executor runs the hook
    # behind its last call anyway.
    if not isinstance(hosted, ThreadedActor):
        with trio.move_on_after(cleanup_s):
            await hosted.wait_idle()
    # One limit for both: waiting for calls uses up the time of the hook.
    await clean_up(lifecycle, hosted.instance, executor_of(hosted), began + cleanup_s - trio.current_time())


async def _take_last_checkpoint(hosted: ServedActor, lifecycle: ActorLifecycle) -> None:
    """Take a checkpoint of an actor that others end: it may be restarted elsewhere.

    There is none of an actor whose thread was interrupted within a call: it may be half-way through a change.
    """
    if not isinstance(lifecycle.checkpoints, Checkpoints) or lifecycle.ending is not None:
        return
    # In the loop a cancelled call has run its `finally` blocks, so the state is consistent again.
    if not isinstance(hosted, ThreadedActor):
        with trio.move_on_after(AT_END_S):
            await hosted.wait_idle()
    elif hosted.interrupted:
        return
    await lifecycle.checkpoints.take_at_end()


def executor_of(hosted: ServedActor) -> SerialExecutor | None:
    """Return the thread of an all-sync object; None for one that lives in the loop."""
    return hosted.executor if isinstance(hosted, ThreadedActor) else None


async def end_when_idle(hosted: ServedActor, lifecycle: ActorLifecycle, idle_s: float) -> None:
    """Ask for an orderly end once no call has arrived, run or waited for ``idle_s``."""
    hosted.last_active_s = trio.current_time()
    # One sleep for each idle period: a call only stores the time, and this task looks when it would be over.
    while True:
        left_s = hosted.last_active_s + idle_s - trio.current_time()
        if left_s <= 0 and not hosted.is_busy:
            lifecycle.request_shutdown(ShutdownRequest(f"it ended after {idle_s:g} s without a call"))
            return
        await trio.sleep(left_s if left_s > 0 else idle_s)
