"""What an actor's own code may know of its actor, and ask of it: `current_actor`."""

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
    """The actor whose code is running, and the call it runs in, if it is one. Made by `current_actor`."""

    __slots__ = ("_call", "_life")

    def __init__(self, life: ActorLifecycle, call: RunningCall | None) -> None:
        self._life = life
        self._call = call

    # The actor -------------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> ActorHandle:
        """A handle to this very actor: give it to others, so that they can call back."""
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
        """Name of the group it is a member of; empty when it is none."""
        return self._life.group

    @property
    def index(self) -> int:
        """Its place in the group, from 0; 0 also outside groups."""
        return self._life.index

    @property
    def incarnation(self) -> str:
        """Id of the attempt (or session) whose process this is; another after a restart."""
        return self._life.incarnation

    # Its end ---------------------------------------------------------------------------------------------------------

    @property
    def shutdown_event(self) -> ShutdownEvent:
        """Set once the actor has been asked to end, by itself, its owner or a cancellation.

        ``is_set()`` from anywhere, ``await wait()`` in the loop, ``wait_sync(timeout_s)`` in a thread.
        """
        return self._life.shutdown_event

    def shutdown(self) -> None:
        """Ask for the actor's end in order; returns at once, from any thread.

        It takes no more calls, lets those under way finish (this one, too), cleans up, and is not restarted.

        Raises:
            InvalidRequest: it was registered with an `ActorServer`, whose owner ends it.
        """
        self._life.shut_down()

    def fail(self, error: BaseException | str) -> None:
        """Ask for the actor's end as failed; returns at once, from any thread.

        Calls under way end with ``error`` (a message becomes `ActorFailed`), the cleanup hook runs, and the actor is
        made anew if it has restarts left.

        Raises:
            InvalidRequest: as `shutdown`; or ``error`` is neither a text nor an exception.
        """
        self._life.fail(error)

    # Its state -------------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Keep the state as ``__fray_checkpoint__`` gives it at this point; returns once the controller has saved it.

        For async methods; the next incarnation begins with it (``__fray_restore__``).

        Raises:
            InvalidRequest: the class has no checkpoints, or it is a light or served actor.
            NotPicklable, MessageTooLarge: the state cannot be kept.
            ActorDied: another incarnation has taken over.
        """
        await checkpoints_of(self._life).take_here()

    def checkpoint_nowait(self) -> None:
        """The same from any method or thread, without waiting: the state is taken now and saved soon.

        Raises:
            InvalidRequest, NotPicklable: as `checkpoint`; what goes wrong while it is saved is logged.
        """
        checkpoints_of(self._life).take_soon()

    # The call --------------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str | None:
        """The method that runs; None in a constructor, in the cleanup hook, or in the actor's own tasks and threads."""
        return None if self._call is None else self._call.method

    @property
    def deadline(self) -> float | None:
        """Of the call, on Trio's clock; None: there is none."""
        return None if self._call is None else self._call.deadline

    @property
    def chain(self) -> tuple[ActorId, ...]:
        """Actor ids of the calls this one is part of, outermost first, without this actor."""
        return () if self._call is None else self._call.chain

    @property
    def cancelled(self) -> bool:
        """The caller no longer waits; may be read from any thread."""
        return self._call is not None and self._call.cancelled

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """In a method on a thread: sleep until the caller no longer waits, at most ``timeout_s`` (None: for ever).

        Returns whether it does not. A loop that works in pieces may say ``while not actor.wait_cancelled(0.1)``.

        Raises:
            FrayError: in the loop (an async method is cancelled where it awaits), or in no call.
        """
        if self._call is None:
            raise FrayError("wait_cancelled() is for methods: nobody has called this code")
        return self._call.wait_cancelled(timeout_s)

    def __repr__(self) -> str:
        return f"<current actor {self.name} ({self.actor_id}), in {self.method or 'no'} call>"


def current_actor() -> CurrentActor:
    """The actor whose code is running: in its constructor, methods and generators, its cleanup hook, and the tasks and
    threads it started (a plain thread: where the process serves one actor alone).

    Raises:
        FrayError: the running code belongs to no actor.
    """
    life = current_lifecycle()
    if life is None:
        raise FrayError("current_actor() is for code that an actor runs, and this belongs to none", reason="no actor")
    return CurrentActor(life, current_actor_var.get())
