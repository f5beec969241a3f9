"""`current_actor`: the actor whose code is running, seen from that code."""

from __future__ import annotations

from fray.api.actors.handle import ActorHandle, methods_of
from fray.errors import FrayError
from fray.model.ids import ActorId
from fray.runtime.actors.checkpoints import checkpoints_of
from fray.runtime.actors.lifecycle import ActorLifecycle, ShutdownEvent, current_lifecycle
from fray.runtime.current_call import CurrentCall as RunningCall
from fray.runtime.current_call import current_actor_var
from fray.runtime.runtime import current


class CurrentActor:
    """Actor whose code is running, and the call in which it runs, if any. Made by `current_actor`."""

    __slots__ = ("_call", "_life")

    def __init__(self, life: ActorLifecycle, call: RunningCall | None) -> None:
        self._life = life
        self._call = call

    # The actor -------------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> ActorHandle:
        """Handle of this actor: pass it to others so that they can call back."""
        life = self._life
        return ActorHandle(life.actor_id, life.name, methods_of(life.cls), current())

    @property
    def actor_id(self) -> ActorId:
        return self._life.actor_id

    @property
    def name(self) -> str:
        return self._life.name

    @property
    def group(self) -> str:
        """Name of its group; empty outside groups."""
        return self._life.group

    @property
    def index(self) -> int:
        """Index in its group, from 0; 0 also outside groups."""
        return self._life.index

    @property
    def incarnation(self) -> str:
        """Id of the attempt (or session) whose process this is; a restart has another."""
        return self._life.incarnation

    # End -------------------------------------------------------------------------------------------------------------

    @property
    def shutdown_event(self) -> ShutdownEvent:
        """Set once the actor has been asked to end, by itself, its owner or a cancellation.

        ``is_set()`` from anywhere, ``await wait()`` in the loop, ``wait_sync(timeout_s)`` in a thread.
        """
        return self._life.shutdown_event

    def shutdown(self) -> None:
        """Request an orderly end of the actor; returns at once, on any thread.

        It accepts no more calls, finishes those that are running (this one too), cleans up, and is not restarted.

        Raises:
            InvalidRequest: it was registered with an `ActorServer`, which ends it.
        """
        self._life.shut_down()

    def fail(self, error: BaseException | str) -> None:
        """Request the end of the actor as failed; returns at once, on any thread.

        Calls that are running end with ``error`` (a text becomes `ActorFailed`), the cleanup hook runs, and the actor
        is restarted if it has restarts left.

        Raises:
            InvalidRequest: as `shutdown`; or ``error`` is neither a text nor an exception.
        """
        self._life.fail(error)

    # State -----------------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Save the state that ``__fray_checkpoint__`` returns now; returns once the controller has saved it.

        For async methods; the next incarnation starts from it (``__fray_restore__``).

        Raises:
            InvalidRequest: the class has no checkpoints, or it is a light or served actor.
            NotPicklable, MessageTooLarge: the state cannot be saved.
            ActorDied: another incarnation has taken over.
        """
        await checkpoints_of(self._life).take_here()

    def checkpoint_nowait(self) -> None:
        """Save a checkpoint without waiting, in any method or thread: the state is taken now and saved soon.

        Raises:
            InvalidRequest, NotPicklable: as `checkpoint`; errors while saving are logged.
        """
        checkpoints_of(self._life).take_soon()

    # The call --------------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str | None:
        """Name of the running method; None in a constructor, in the cleanup hook, or in the actor's own tasks and
        threads.
        """
        return None if self._call is None else self._call.method

    @property
    def deadline(self) -> float | None:
        """Deadline of the call on Trio's clock; None: none."""
        return None if self._call is None else self._call.deadline

    @property
    def chain(self) -> tuple[ActorId, ...]:
        """Ids of the actors whose calls led to this one, outermost first, without this actor."""
        return () if self._call is None else self._call.chain

    @property
    def cancelled(self) -> bool:
        """True if the caller no longer waits; may be read on any thread."""
        return self._call is not None and self._call.cancelled

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """Sleep, in a method on a thread, until the caller no longer waits; at most ``timeout_s`` seconds (None: no
        limit).

        Returns whether the call is cancelled. A loop that works in steps may use ``while not
        actor.wait_cancelled(0.1)``.

        Raises:
            FrayError: called in the loop (an async method is cancelled where it awaits), or outside a call.
        """
        if self._call is None:
            raise FrayError("wait_cancelled() is for methods: this code does not run in a call")
        return self._call.wait_cancelled(timeout_s)

    def __repr__(self) -> str:
        return f"<current actor {self.name} ({self.actor_id}), in {self.method or 'no'} call>"


def current_actor() -> CurrentActor:
    """Return the actor whose code is running: in its constructor, methods and generators, its cleanup hook, and the
    tasks and threads it started (a plain thread: only where the process serves a single actor).

    Raises:
        FrayError: the running code belongs to no actor.
    """
    life = current_lifecycle()
    if life is None:
        raise FrayError("current_actor() is for code of an actor: this code belongs to none", reason="no actor")
    return CurrentActor(life, current_actor_var.get())
