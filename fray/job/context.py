"""`JobContext`, the interface of all contexts, and references to values."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Any, Literal, TypeVar

from fray.blocking.bridge.objects import ObjectRef
from fray.blocking.futures import ActorFuture
from fray.errors import InvalidRequest
from fray.job.wait_set import WaitSet
from fray.model.actors import ActorStatus
from fray.threads import lock_timeout

Lifetime = Literal["non_detached", "detached"]
C = TypeVar("C", bound="JobContext")


class Ref(ABC):
    """Reference to a value, as `put`, `run` and the methods of actors return it."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the error. Raises TimeoutError: neither is there within ``timeout`` seconds."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the value or the error is there."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` once it is there; on any thread."""


def is_ref(value: object) -> bool:
    """Return whether an object is a reference, which arguments are replaced by the value of."""
    return isinstance(value, Ref | ObjectRef | ActorFuture | Future)


def value_of(value: Any) -> Any:
    """Return the value of a reference or a future; any other argument as it is."""
    return value.result() if is_ref(value) else value


def is_generator_function(fn: Any) -> bool:
    """Return whether a call of ``fn`` makes a generator, also for ``functools.partial`` and callable objects."""
    # A plain function may have an attribute `func` of its own.
    while hasattr(fn, "func") and not inspect.isfunction(fn):
        fn = fn.func
    return inspect.isgeneratorfunction(fn) or inspect.isgeneratorfunction(type(fn).__call__)


class JobContext(ABC):
    """Runs functions and stores objects and actors, in this process or on a cluster. The end of a ``with`` block calls
    `shutdown`."""

    def __init__(self) -> None:
        self._watch = WaitSet()

    # Objects and results ---------------------------------------------------------------------------------------------

    @abstractmethod
    def put(self, obj: Any) -> Any:
        """Store an object for several readers, and return a reference to it."""

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        """Return the value of a reference or future, or the values of a list of them, in its order.

        Args:
            timeout: seconds, for all of them together. Default: without limit.

        Raises:
            BaseException: the error that the function or method raised.
            TimeoutError: (the built-in one) not within ``timeout`` seconds.
            InvalidRequest: (a ValueError) an argument that is neither a reference nor a future.
        """
        # Before it is added to the clock: infinity would stay infinity and overflow in the lock.
        timeout = lock_timeout(timeout)
        until = None if timeout is None else monotonic() + timeout
        if isinstance(ref, list | tuple):
            return [self._value(each, until) for each in ref]
        return self._value(ref, until)

    def _value(self, ref: Any, until: float | None) -> Any:
        if not is_ref(ref):
            raise InvalidRequest(
                f"get() accepts what put(), run() and methods of actors return, or a list of that; not {ref!r}. "
                "Iterate over what run() returns for a generator function"
            )
        # Without `_wait_for`, which gives the worker's place to another task.
        if ref.done():
            return ref.result()
        return self._wait_for(ref, None if until is None else max(0.0, until - monotonic()))

    def _wait_for(self, ref: Ref, timeout: float | None) -> Any:
        return ref.result(timeout)

    def wait(
        self, refs: Sequence[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Wait until ``num_returns`` references are ready; return these and the others, both in the order given.

        A generator is ready when its next item, or its end, is there. Failed references are ready, too.

        Args:
            timeout: seconds, after which fewer than ``num_returns`` may be returned. Default: without limit.

        Raises:
            InvalidRequest: (a ValueError) ``num_returns`` is not 1 to the number of refs.
        """
        refs = list(refs)
        if not 1 <= num_returns <= len(refs):
            raise InvalidRequest(f"num_returns={num_returns!r} must be 1 to {len(refs)}, the number of refs given")
        if sum(ref.done() for ref in refs) < num_returns:
            self._wait_until(refs, num_returns, timeout)
        ready = [ref for ref in refs if ref.done()][:num_returns]
        # By identity: references need not be hashable, and one may be given twice.
        chosen = set(map(id, ready))
        return ready, [ref for ref in refs if id(ref) not in chosen]

    def _wait_until(self, refs: list[Any], num_returns: int, timeout: float | None) -> None:
        self._watch.wait(refs, num_returns, timeout)

    # Functions -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)``; return a future of its value, or for a generator function a generator of its
        items.

        References and futures among the arguments (not inside of them) are replaced by their values.

        Args:
            name: label in messages. Default: the function's name.
        """

    # Actors ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str | None = None,
        get_if_exists: bool = False,
        lifetime: Lifetime = "non_detached",
        preemptible: bool = True,
        num_cpus: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make ``actor_class(*args, **kwargs)`` and wait until its constructor has returned.

        ``handle.method.remote(...)`` returns a future, ``handle.method(...)`` waits for the value.

        Args:
            name: unique among the living actors of the context.
            get_if_exists: with ``name``: if such an actor lives, return it, and make nothing.
            lifetime: ``"detached"``, with a name: the actor outlives the code that made it, until `delete_actor`.
            preemptible: False: not on machines that may be taken away.
            num_cpus: CPUs reserved for the actor. Default: none.

        Raises:
            BaseException: the error that the constructor raised.
            NameInUse: another living actor has the name.
        """

    @abstractmethod
    def delete_actor(self, actor: Any) -> None:
        """End an actor, given as handle or name, and wait until it has ended. Raises NoSuchActor."""

    @abstractmethod
    def actor_status(self, actor: Any) -> ActorStatus:
        """Return the status of an actor. Raises NoSuchActor."""

    # Life ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self) -> None:
        """End what belongs to this context. May be repeated."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
