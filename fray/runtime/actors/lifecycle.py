"""Lifecycle of one actor as its own code may use it: identity, shutdown requests, the shutdown event, cleanup.

An `ActorLifecycle` belongs to one incarnation of one object. The running code finds it through the call it runs in,
else through a context variable (constructors, and the tasks and threads that inherit it), else, in a process that
serves one actor only, through the process: a plain thread there can only be that actor's.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

import trio
from attrs import frozen

from fray.errors import ActorDied, ActorFailed, InvalidRequest
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization.pickling import construct_deferred

if TYPE_CHECKING:
    from fray.runtime.threads.executor import SerialExecutor

log = logging.getLogger("fray.actor")

CLEANUP = "__fray_cleanup__"
"""Method of a user's class: called once when the actor ends, sync or async."""


@frozen
class ShutdownRequest:
    """Reason for which an actor ends itself. ``error``: it has failed with it; None: an orderly end, for good."""

    text: str
    error: BaseException | None = None
    constructing: bool = False
    """True if the constructor raised the error."""

    def refusal_error(self, name: str) -> ActorDied:
        """Return the error of a call that arrived too late to be begun."""
        return ActorDied(f"actor {name} accepts no further calls: {self.text}", actor=name)


class ShutdownEvent:
    """Event that is set once the end of the actor was requested, by itself or by others. Created on first use."""

    def __init__(self) -> None:
        self._in_loop = trio.Event()
        self._in_threads = threading.Event()

    def is_set(self) -> bool:
        """Return whether it is set; from any thread."""
        return self._in_threads.is_set()

    async def wait(self) -> None:
        """Wait in the loop."""
        await self._in_loop.wait()

    def wait_sync(self, timeout_s: float | None = None) -> bool:
        """Wait in a thread, at most ``timeout_s`` (None: no limit), and return whether it is set. Not for the loop."""
        return self._in_threads.wait(timeout_s)

    def set_in_loop(self) -> None:
        """Set it; in the loop."""
        # Two events, as neither kind can be waited for on the other side.
        self._in_loop.set()
        self._in_threads.set()


class ActorLifecycle:
    """Identity of one incarnation of an actor, and the state of its shutdown."""

    __slots__ = (
        "_event",
        "_event_lock",
        "_is_shutdown_set",
        "_on_ending",
        "_token",
        "actor_id",
        "can_shut_down",
        "checkpoints",
        "cls",
        "context",
        "ending",
        "group",
        "incarnation",
        "index",
        "name",
    )

    def __init__(
        self,
        actor_id: str,
        name: str,
        cls: type,
        *,
        incarnation: str,
        group: str = "",
        index: int = 0,
        can_shut_down: bool = True,
    ) -> None:
        self.actor_id = actor_id
        self.name = name
        self.cls = cls
        self.incarnation = incarnation
        self.group = group
        self.index = index
        self.can_shut_down = can_shut_down
        """False if it cannot end itself: the code that registered it with an `ActorServer` ends it."""
        self.context: Context | None = None
        """The context variables that the constructor left; each call sees a copy of them."""
        self.checkpoints: object = None
        """`fray.runtime.actors.checkpoints.Checkpoints` of an actor that keeps its state."""
        self.ending: ShutdownRequest | None = None
        """Request of the actor's own code to end it, once there is one."""
        self._on_ending: Callable[[], object] | None = None
        self._event: ShutdownEvent | None = None
        self._event_lock = _EVENT_LOCK
        self._is_shutdown_set = False
        self._token: trio.lowlevel.TrioToken | None = None

    def __repr__(self) -> str:
        return f"<lifecycle of {self.name} ({self.actor_id}) in {self.incarnation}>"

    # For its owner, in the loop --------------------------------------------------------------------------------------

    def set_on_ending(self, on_ending: Callable[[], object]) -> None:
        """Call ``on_ending`` once, in the loop, when the actor requests its end.

        It is called at once if the actor has done so already, in its constructor.
        """
        self._on_ending = on_ending
        # From here on a request of another thread is sent to the loop.
        self._token = trio.lowlevel.current_trio_token()
        if self.ending is not None:
            on_ending()

    def set_shutdown_event(self) -> None:
        """Set the shutdown event: the end of the actor was requested."""
        # A thread may be making the event at this moment: either it sees the flag, or it is found here.
        with self._event_lock:
            self._is_shutdown_set = True
            event = self._event
        if event is not None:
            event.set_in_loop()

    # For its own code, from any thread -------------------------------------------------------------------------------

    @property
    def shutdown_event(self) -> ShutdownEvent:
        with self._event_lock:
            if self._event is None:
                self._event = ShutdownEvent()
                if self._is_shutdown_set:
                    self._event.set_in_loop()
            return self._event

    def shut_down(self) -> None:
        """Ask for an orderly end.

        Raises:
            InvalidRequest: it was registered with an `ActorServer`, which ends it.
        """
        # For good: an orderly end is not restarted, whatever the restart policy.
        self._request_from_any_thread(ShutdownRequest("it has shut itself down"))

    def fail(self, error: BaseException | str) -> None:
        """Ask for an end as failed, with an exception or the message of one.

        Raises:
            InvalidRequest: ``error`` is neither, or it was registered with an `ActorServer`, which ends it.
        """
        if isinstance(error, str):
            error = ActorFailed(error, actor=self.name)
        if not isinstance(error, BaseException):
            raise InvalidRequest(f"fail() takes a message or an exception, not {error!r}")
        self._request_from_any_thread(ShutdownRequest(f"it has failed ({type(error).__name__}: {error})", error))

    def _request_from_any_thread(self, ending: ShutdownRequest) -> None:
        if not self.can_shut_down:
            raise InvalidRequest(f"actor {self.name} cannot shut itself down; call ActorServer.shutdown")
        if self._token is None:
            self.request_shutdown(ending)  # in its constructor: `set_on_ending` will find it
            return
        # At once where possible, so that no further call is accepted after the line that asked for the end.
        if _runs_in(self._token):
            self.request_shutdown(ending)
            return
        try:
            self._token.run_sync_soon(self.request_shutdown, ending)
        except trio.RunFinishedError:
            pass  # it has ended

    def request_shutdown(self, ending: ShutdownRequest) -> None:
        """Ask for the end, in the loop; the first request counts."""
        # A shutdown often causes further failures; they must not replace its reason.
        if self.ending is None:
            self.ending = ending
            if self._on_ending is not None:
                self._on_ending()


def _runs_in(token: trio.lowlevel.TrioToken) -> bool:
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        return False


_EVENT_LOCK = threading.Lock()
"""Lock for the events of all actors: it is held for a moment, so a thousand light actors need not have one each."""
lifecycle_var: ContextVar[ActorLifecycle | None] = ContextVar("fray_life", default=None)
# Set only in the process of one attempt. In `local` several attempts share the process, and a thread proves nothing.
_process_actors: list[ActorLifecycle] | None = None


def track_process_actors() -> None:
    """Find the actor of a plain thread by the process from now on; it serves one attempt only."""
    global _process_actors
    _process_actors = []


def has_own_process() -> bool:
    """Return whether this process serves one attempt only, and no program of a user runs beside it."""
    return _process_actors is not None


@contextmanager
def actor_of_process(lifecycle: ActorLifecycle) -> Iterator[None]:
    """Count the actor among those of this process while entered."""
    actors = _process_actors if _process_actors is not None else []
    actors.append(lifecycle)
    try:
        yield
    finally:
        actors.remove(lifecycle)


def current_lifecycle() -> ActorLifecycle | None:
    """Return the lifecycle of the actor whose code is running; None outside of actors."""
    call = current_actor_var.get()
    lifecycle: ActorLifecycle | None = getattr(call, "lifecycle", None)
    # The call first: it is exact, while a context variable may have been copied from the maker of a task.
    lifecycle = lifecycle or lifecycle_var.get()
    # With several actors in the process a plain thread could be that of any of them.
    if lifecycle is None and _process_actors is not None and len(_process_actors) == 1:
        lifecycle = _process_actors[0]
    return lifecycle


# Construction and cleanup --------------------------------------------------------------------------------------------


async def construct(
    lifecycle: ActorLifecycle, args: tuple[Any, ...], kwargs: dict[str, Any], executor: SerialExecutor | None
) -> Any:
    """Make the object: on the thread that will run its calls, or (None) in the loop, for a class with async methods."""

    # Thread-bound objects (SQLite connections, CUDA contexts) have to be made on the thread that uses them.
    if executor is None:
        return make_instance(lifecycle, args, kwargs)
    return await executor.run(lambda: make_instance(lifecycle, args, kwargs))


def make_instance(lifecycle: ActorLifecycle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the constructor on this thread. It belongs to no call, even if a call (of a `LightActorHost`) runs it."""
    token, call = lifecycle_var.set(lifecycle), current_actor_var.set(None)
    try:
        instance = lifecycle.cls(
            # Arguments whose unpickling would have waited are made here, on the constructor's thread.
            *map(construct_deferred, args),
            **{name: construct_deferred(value) for name, value in kwargs.items()},
        )
        # Copied after the constructor: what it sets holds for all calls.
        lifecycle.context = copy_context()
        return instance
    finally:
        lifecycle_var.reset(token)
        current_actor_var.reset(call)


async def clean_up(lifecycle: ActorLifecycle, instance: Any, executor: SerialExecutor | None, within_s: float) -> None:
    """Call the cleanup hook where the methods ran, for at most ``within_s``; log what it raises.

    The caller shields it from cancellation: an actor that is being cancelled cleans up, too.
    """
    # Looked up on the class, as Python does for special methods.
    hook = getattr(type(instance), CLEANUP, None)
    if hook is None:
        return

    def call() -> Any:
        token = lifecycle_var.set(lifecycle)
        try:
            return hook(instance)
        finally:
            lifecycle_var.reset(token)

    token = lifecycle_var.set(lifecycle)
    # A hook that hangs must not delay the end for ever: the actor's resources and its name are wanted by others.
    with trio.move_on_after(within_s) as patience:
        try:
            # On the thread of the methods, after the call that may still run there.
            value = call() if executor is None else await executor.run(call)
            if inspect.isawaitable(value):
                await value
        # The thread was killed (`kill_after_s`) and runs nothing any more.
        except ActorDied as error:
            log.warning("%s of actor %s was not run: %s", CLEANUP, lifecycle.name, error)
        # Logged only: the end has a cause already, and a failed cleanup must not hide it.
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("%s of actor %s failed; the actor ends regardless", CLEANUP, lifecycle.name)
    lifecycle_var.reset(token)
    if patience.cancelled_caught:
        log.warning("%s of actor %s did not end within %g s and was abandoned", CLEANUP, lifecycle.name, within_s)
