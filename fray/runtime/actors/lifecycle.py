"""The life of one actor as its own code may know it: who it is, how it asks for its end, whether it has been told.

A `Life` belongs to one incarnation of one object. The running code finds it through the call it runs in, else through
a context variable (constructors, tasks and threads that inherit it), else, in a process that serves one actor and
nothing else, through the process: a plain thread there can only be that actor's.
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
    """Why an actor ends by its own doing. ``error``: it has failed with it; None: in order, and for good."""

    text: str
    error: BaseException | None = None
    constructing: bool = False
    """It was the constructor that raised."""

    def refusal_error(self, name: str) -> ActorDied:
        """What a call hears that came too late to be begun."""
        return ActorDied(f"actor {name} takes no more calls: {self.text}", actor=name)


class ShutdownEvent:
    """Set once the actor has been asked to end, by itself or by others. Made when first asked for."""

    def __init__(self) -> None:
        self._in_loop = trio.Event()
        self._in_threads = threading.Event()

    def is_set(self) -> bool:
        """From any thread."""
        return self._in_threads.is_set()

    async def wait(self) -> None:
        """Wait in the loop."""
        await self._in_loop.wait()

    def wait_sync(self, timeout_s: float | None = None) -> bool:
        """Wait in a thread, at most ``timeout_s`` (None: for ever); whether it is set. Never call it in the loop."""
        return self._in_threads.wait(timeout_s)

    def set_in_loop(self) -> None:
        """In the loop."""
        self._in_loop.set()
        self._in_threads.set()


class ActorLifecycle:
    """See above."""

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
        """False: its end is the business of whoever serves it (`ActorServer`)."""
        self.context: Context | None = None
        """The context variables that the constructor left; each call sees a copy of them."""
        self.checkpoints: object = None
        """`fray.runtime.actors.checkpoints.Checkpoints` of an actor that keeps its state."""
        self.ending: ShutdownRequest | None = None
        """Set once the actor has asked for its end."""
        self._on_ending: Callable[[], object] | None = None
        self._event: ShutdownEvent | None = None
        self._event_lock = _EVENTS
        self._is_shutdown_set = False
        self._token: trio.lowlevel.TrioToken | None = None

    def __repr__(self) -> str:
        return f"<life of {self.name} ({self.actor_id}) in {self.incarnation}>"

    # What its owner does, in the loop --------------------------------------------------------------------------------

    def set_on_ending(self, on_ending: Callable[[], object]) -> None:
        """From now on the actor may ask for its end; then ``on_ending`` is called once, in the loop (at once, if it
        has asked already, in its constructor)."""
        self._on_ending = on_ending
        self._token = trio.lowlevel.current_trio_token()
        if self.ending is not None:
            on_ending()

    def set_shutdown_event(self) -> None:
        """It is asked to end: set its shutdown event."""
        with self._event_lock:
            self._is_shutdown_set = True
            event = self._event
        if event is not None:
            event.set_in_loop()

    # What its own code does, from any thread -------------------------------------------------------------------------

    @property
    def shutdown_event(self) -> ShutdownEvent:
        with self._event_lock:
            if self._event is None:
                self._event = ShutdownEvent()
                if self._is_shutdown_set:
                    self._event.set_in_loop()
            return self._event

    def shut_down(self) -> None:
        """Ask for an end in order."""
        self._ask_from_anywhere(ShutdownRequest("it has shut itself down"))

    def fail(self, error: BaseException | str) -> None:
        """Ask for an end as failed."""
        if isinstance(error, str):
            error = ActorFailed(error, actor=self.name)
        if not isinstance(error, BaseException):
            raise InvalidRequest(f"fail() takes a message or an exception, not {error!r}")
        self._ask_from_anywhere(ShutdownRequest(f"it has failed ({type(error).__name__}: {error})", error))

    def _ask_from_anywhere(self, ending: ShutdownRequest) -> None:
        if not self.can_shut_down:
            raise InvalidRequest(f"actor {self.name} cannot end itself: whoever registered it with its ActorServer can")
        if self._token is None:
            self.request_shutdown(ending)  # in its constructor: `attend` will find it
            return
        if _runs_in(self._token):
            self.request_shutdown(ending)
            return
        try:
            self._token.run_sync_soon(self.request_shutdown, ending)
        except trio.RunFinishedError:
            pass  # it has ended

    def request_shutdown(self, ending: ShutdownRequest) -> None:
        """In the loop: the first one counts."""
        if self.ending is None:
            self.ending = ending
            if self._on_ending is not None:
                self._on_ending()


def _runs_in(token: trio.lowlevel.TrioToken) -> bool:
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        return False


_EVENTS = threading.Lock()
"""One lock for the events of all lives: it is held for a moment, and a thousand lives need no thousand locks."""
lifecycle_var: ContextVar[ActorLifecycle | None] = ContextVar("fray_life", default=None)
_alone: list[ActorLifecycle] | None = None


def track_process_actors() -> None:
    """This process serves one attempt and nothing else: from now on its plain threads may be found to be an actor's."""
    global _alone
    _alone = []


@contextmanager
def actor_of_process(life: ActorLifecycle) -> Iterator[None]:
    """While ``life`` lasts."""
    lives = _alone if _alone is not None else []
    lives.append(life)
    try:
        yield
    finally:
        lives.remove(life)


def current_lifecycle() -> ActorLifecycle | None:
    """Whose code is running."""
    call = current_actor_var.get()
    life: ActorLifecycle | None = getattr(call, "lifecycle", None)
    life = life or lifecycle_var.get()
    if life is None and _alone is not None and len(_alone) == 1:
        life = _alone[0]
    return life


# The two ends of a life ----------------------------------------------------------------------------------------------


async def construct(
    life: ActorLifecycle, args: tuple[Any, ...], kwargs: dict[str, Any], runner: SerialExecutor | None
) -> Any:
    """Make the object: on the thread that will run its calls, or (None) in the loop, as a class with async methods."""

    if runner is None:
        return make_instance(life, args, kwargs)
    return await runner.run(lambda: make_instance(life, args, kwargs))


def make_instance(life: ActorLifecycle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the constructor here and now; it belongs to no call, also where a call (of a light actors' host) runs it."""
    token, call = lifecycle_var.set(life), current_actor_var.set(None)
    try:
        instance = life.cls(
            *map(construct_deferred, args), **{name: construct_deferred(value) for name, value in kwargs.items()}
        )
        life.context = copy_context()
        return instance
    finally:
        lifecycle_var.reset(token)
        current_actor_var.reset(call)


async def clean_up(life: ActorLifecycle, instance: Any, runner: SerialExecutor | None, within_s: float) -> None:
    """Call the hook of an ending actor where its methods ran, for at most ``within_s``; what it raises is logged.

    The caller shields it from cancellation: an actor that is being cancelled cleans up, too.
    """
    hook = getattr(type(instance), CLEANUP, None)
    if hook is None:
        return

    def call() -> Any:
        token = lifecycle_var.set(life)
        try:
            return hook(instance)
        finally:
            lifecycle_var.reset(token)

    token = lifecycle_var.set(life)
    with trio.move_on_after(within_s) as patience:
        try:
            value = call() if runner is None else await runner.run(call)
            if inspect.isawaitable(value):
                await value
        except ActorDied as error:
            log.warning("%s of actor %s was not run: %s", CLEANUP, life.name, error)
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("%s of actor %s failed; it ends all the same", CLEANUP, life.name)
    lifecycle_var.reset(token)
    if patience.cancelled_caught:
        log.warning("%s of actor %s did not end within %g s and was left", CLEANUP, life.name, within_s)
