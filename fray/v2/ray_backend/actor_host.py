"""Ray actors that run user actors: `RayActorHost` in its own process, `Mailbox` for an actor in another process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from time import monotonic, sleep
from typing import Any, TypeVar

import ray

from fray.errors import ActorUnavailableError
from fray.v2.interface import ActorContext, _current_client_var, _set_current_actor, _set_process_actor
from fray.v2.job import JobStatus, refuse_async
from fray.v2.ray_backend import process_context
from fray.v2.ray_backend.errors import PickledError, packed
from fray.v2.ray_backend.output_capture import Output
from fray.v2.ray_backend.specs import ActorOutcome, ActorSpec

LINGER_S = 0.5
"""Seconds before the process is killed: Ray sends an answer after its call has returned."""
CONTROL = "fray"
"""Concurrency group for calls of the registry, so that they do not wait behind those of users."""


F = TypeVar("F", bound=Callable[..., Any])


def _control_method(**options: int) -> Callable[[F], F]:
    """Mark a method as called by the registry."""
    marking: Callable[[F], F] = process_context.untyped.method(concurrency_group=CONTROL, **options)
    return marking


def dead_actor(name: str) -> ActorUnavailableError:
    """Return the error for calls of an actor that has ended."""
    return ActorUnavailableError(f"actor {name!r} is dead: it has ended, or was never made")


class RayActorHost:
    """Makes a user's actor and calls it. The registry calls the methods of the concurrency group ``fray``.

    A user's class is not a Ray actor itself: so errors arrive with their type, also those of the constructor, calls of
    the registry never wait behind those of users, and running calls can finish before the process ends.
    """

    def __init__(self, spec: ActorSpec, registry: Any, work: list[Any]) -> None:
        self._spec = spec
        self._change = threading.Condition()
        self._running = 0
        self._last_answer = -LINGER_S
        self._end: ActorOutcome | None = None
        self._instance: Any = None
        self.about: ActorContext | None = None
        self.failure: PickledError | None = None
        process_context.enter(spec.job_id, registry)
        Output(lambda text: registry.printed.remote(spec.job_id, text)).__enter__()
        try:
            self._make(*ray.get(work[0]))
        except BaseException as error:  # noqa: BLE001 (the registry gets the error, and ends this process)
            self.failure = packed(error)

    def _make(self, client: Any, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._context, self.about = context_of(self._spec, client, self._ending)
        _set_process_actor(self.about)
        self._instance = self._context.copy().run(cls, *args, **kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the user's method. Raises PickledError with the error that the method raised."""
        # Counted under the lock: an end that begins now waits for this call.
        with self._change:
            if self._end is not None or self._instance is None:
                raise packed(dead_actor(self._spec.name))
            self._running += 1
        try:
            found = getattr(self._instance, method)
            refuse_async(found, f"method {method!r} of actor {self._spec.name!r}")
            return self._context.copy().run(found, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (the caller raises it; also SystemExit)
            # Packed, as Ray would change the type of the exception.
            raise packed(error) from None
        finally:
            with self._change:
                self._running -= 1
                self._last_answer = monotonic()
                self._change.notify_all()

    @_control_method()
    def has(self, method: str) -> bool:
        return callable(getattr(self._instance, method, None))

    # Ray repeats the call after it has restarted the process, so the registry follows all incarnations by one call.
    @_control_method(max_task_retries=-1)
    def ready(self) -> PickledError | None:
        """Return, once the actor was constructed, the error of its constructor, or None."""
        return self.failure

    @_control_method(max_task_retries=-1)
    def life(self) -> ActorOutcome:
        """Return the outcome once the actor has ended. Ray repeats the call after it has restarted this process."""
        if self.failure is not None:
            return ActorOutcome(JobStatus.FAILED, self.failure)
        self._finished()
        assert self._end is not None
        return self._end

    @_control_method()
    def end(self) -> None:
        """Accept no more calls; return when none is running."""
        self._ending(ActorOutcome(JobStatus.STOPPED))
        self._finished()

    def _ending(self, outcome: ActorOutcome) -> None:
        with self._change:
            self._end = self._end or outcome
            self._change.notify_all()
        # After the outcome: setting the event ends the actor as succeeded.
        if self.about is not None:
            self.about.shutdown_event.set()

    def _finished(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._end is not None and self._running == 0)
            # Ray sends an answer after the method has returned; killed at once, the caller would get ActorDied.
            lingering = self._last_answer + LINGER_S - monotonic()
        sleep(max(0.0, lingering))


def context_of(spec: ActorSpec, client: Any, end: Callable[[ActorOutcome], None]) -> tuple[Context, ActorContext]:
    """Return the context of an actor's code, with itself as current actor and its maker's client, and the actor."""

    def terminate() -> None:
        end(ActorOutcome(JobStatus.SUCCEEDED))

    def fail(error: BaseException | str) -> None:
        raised = error if isinstance(error, BaseException) else RuntimeError(error)
        end(ActorOutcome(JobStatus.FAILED, packed(raised)))

    about = ActorContext(spec.handle, spec.index, spec.group, terminate=terminate, fail=fail)
    context = copy_context()
    context.run(_set_current_actor, about)
    context.run(_current_client_var.set, client)
    return context, about


class Mailbox:
    """Queue of calls for an actor in its maker's process, which fetches them from here: a driver can call Ray actors,
    but cannot be called."""

    def __init__(self, spec: ActorSpec, registry: Any, work: list[Any]) -> None:
        self._name = spec.name
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] = []
        self._arrived = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outcome: ActorOutcome | None = None
        self._ended = asyncio.Event()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._outcome is not None:
            raise packed(dead_actor(self._name))
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, method, args, kwargs))
        self._arrived.set()
        failure, value = await answer
        if failure is not None:
            raise failure
        return value

    async def take(self) -> list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] | None:
        """Wait for calls and return them; None once no more will come."""
        await self._arrived.wait()
        if self._outcome is not None and not self._waiting:
            return None
        self._arrived.clear()
        # All that wait: one round trip of the maker for a burst.
        taken, self._waiting = self._waiting, []
        return taken

    async def answer(self, number: int, failure: PickledError | None, value: Any) -> None:
        """Pass on the answer to a call."""
        answer = self._answers.pop(number, None)
        if answer is not None:
            answer.set_result((failure, value))
        if self._outcome is not None and not self._answers:
            self._ended.set()

    async def has(self, method: str) -> bool:
        return False  # its maker has sent all of its methods to the registry

    async def ready(self) -> None:
        return None

    async def life(self) -> ActorOutcome:
        await self._ended.wait()
        await asyncio.sleep(LINGER_S)
        assert self._outcome is not None
        return self._outcome

    async def end(self, outcome: ActorOutcome = ActorOutcome(JobStatus.STOPPED)) -> None:  # noqa: B008 (frozen)
        """Accept no more calls; return when all are answered."""
        self._outcome = self._outcome or outcome
        self._arrived.set()
        if not self._answers:
            self._ended.set()
        await self._ended.wait()
        await asyncio.sleep(LINGER_S)
