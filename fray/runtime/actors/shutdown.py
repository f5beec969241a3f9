"""One served object, from its first call to its end, whichever way that comes.

The law. By its own doing an actor ends in order (it takes no more calls, those it has finish) or as failed (those it
has end with its error). By others' doing, a cancellation, those it has are cancelled. In each case it is told first
(its shutdown event), then its calls end, then its cleanup hook runs, then it is gone.
"""

from __future__ import annotations

import trio

from fray.errors import ActorDied
from fray.model.specs import ActorConfig
from fray.runtime.actors.checkpoints import AT_END_S, Checkpoints
from fray.runtime.actors.hosted_actor import HostedActor
from fray.runtime.actors.lifecycle import (
    CLEANUP,
    ActorLifecycle,
    ShutdownRequest,
    clean_up,
)
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.actors.threaded_actor import ThreadedActor
from fray.runtime.background import open_background_nursery
from fray.runtime.threads.executor import SerialExecutor


async def serve_until_shutdown(
    host: ActorHostServer, number: int, life: ActorLifecycle, config: ActorConfig
) -> ShutdownRequest:
    """Returns once the actor that is registered under ``number`` has ended by its own doing; cancelled, ends it too."""
    hosted = host.actors[number]
    asked = trio.Event()
    life.set_on_ending(lambda: _take_no_more(hosted, life, asked))
    try:
        async with open_background_nursery() as nursery:
            if config.idle_s is not None:
                nursery.start_soon(end_when_idle, hosted, life, config.idle_s)
            await asked.wait()
        assert life.ending is not None
        if life.ending.error is None:
            await hosted.wait_idle()
        return life.ending
    finally:
        with trio.CancelScope(shield=True):
            await shut_down(hosted, life, config.cleanup_s)
        host.unregister(number)


def _take_no_more(hosted: HostedActor, life: ActorLifecycle, asked: trio.Event) -> None:
    """At once: a call that comes after the answer to the one that asked is refused."""
    assert life.ending is not None
    hosted.close(life.ending.refusal_error(hosted.name))
    life.set_shutdown_event()
    asked.set()


async def shut_down(hosted: HostedActor, life: ActorLifecycle, cleanup_s: float) -> None:
    """What is still under way ends now; then the hook. To be shielded: at most ``cleanup_s`` long."""
    life.set_shutdown_event()
    hosted.close(ActorDied("the process of this actor is shutting down"))
    hosted.end_calls(life.ending.error if life.ending is not None else None)
    await _keep_state(hosted, life)
    if not hasattr(life.cls, CLEANUP):
        return
    began = trio.current_time()
    if not isinstance(hosted, ThreadedActor):
        with trio.move_on_after(cleanup_s):
            await hosted.wait_idle()
    await clean_up(life, hosted.instance, executor_of(hosted), began + cleanup_s - trio.current_time())


async def _keep_state(hosted: HostedActor, life: ActorLifecycle) -> None:
    """One that others end may be made anew. A thread that was interrupted within a call has no state worth keeping."""
    if not isinstance(life.checkpoints, Checkpoints) or life.ending is not None:
        return
    if not isinstance(hosted, ThreadedActor):
        with trio.move_on_after(AT_END_S):
            await hosted.wait_idle()
    elif hosted.interrupted:
        return
    await life.checkpoints.take_at_end()


def executor_of(hosted: HostedActor) -> SerialExecutor | None:
    """The thread of an all-sync object."""
    return hosted.executor if isinstance(hosted, ThreadedActor) else None


async def end_when_idle(hosted: HostedActor, life: ActorLifecycle, idle_s: float) -> None:
    """Ask for the end in order once no call has come, run or waited for ``idle_s``."""
    hosted.last_active_s = trio.current_time()
    while True:
        left_s = hosted.last_active_s + idle_s - trio.current_time()
        if left_s <= 0 and not hosted.is_busy:
            life.request_shutdown(ShutdownRequest(f"it ended after {idle_s:g} s without a call"))
            return
        await trio.sleep(left_s if left_s > 0 else idle_s)
