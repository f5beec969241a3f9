"""What all contexts can do, and how values behind futures and references are had."""

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
    """What `put`, `run` and the methods of actors give."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """The value, or the error, raised. TimeoutError: it has not come within ``timeout`` seconds."""

    @abstractmethod
    def done(self) -> bool:
        """Whether that is there."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` when it is; on any thread."""


def is_ref(value: object) -> bool:
    """Whether it stands for a value, as an argument too."""
    return isinstance(value, Ref | ObjectRef | ActorFuture | Future)


def is_generator_function(fn: Any) -> bool:
    """Whether calling it makes a generator; sees through ``functools.partial`` and callable objects."""
    while hasattr(fn, "func") and not inspect.isfunction(fn):
        fn = fn.func
    return inspect.isgeneratorfunction(fn) or inspect.isgeneratorfunction(type(fn).__call__)


class JobContext(ABC):
    """Runs functions and keeps objects and actors: here, on threads, or on a cluster. Leaving a ``with`` of it is
    `shutdown`."""

    def __init__(self) -> None:
        self._watch = WaitSet()

    # Objects and results ---------------------------------------------------------------------------------------------

    @abstractmethod
    def put(self, obj: Any) -> Any:
        """Keep an object for many to read, and return a reference to it."""

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        """The value of a reference or future, or those of a list of them, in its order.

        Args:
            timeout: seconds, for all of them; after them TimeoutError. Default: no end.

        Raises:
            BaseException: what the function or method raised.
            TimeoutError: the built-in one.
            InvalidRequest: (a ValueError) something that this gives no value for.
        """
        timeout = lock_timeout(timeout)
        until = None if timeout is None else monotonic() + timeout
        if isinstance(ref, list | tuple):
            return [self._value(each, until) for each in ref]
        return self._value(ref, until)

    def _value(self, ref: Any, until: float | None) -> Any:
        if not is_ref(ref):
            raise InvalidRequest(
                f"get() takes what put(), run() and methods of actors gave, or a list of that; not {ref!r}. "
                "Iterate over what run() gave for a generator function"
            )
        if ref.done():
            return ref.result()
        return self._wait_for(ref, None if until is None else max(0.0, until - monotonic()))

    def _wait_for(self, ref: Ref, timeout: float | None) -> Any:
        return ref.result(timeout)

    def wait(
        self, refs: Sequence[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Wait until ``num_returns`` of them are ready: those, and the others, both in the order given.

        A generator is ready when its next item, or its end, is there. What has failed is ready, too.

        Args:
            timeout: seconds; after them there are fewer than ``num_returns``. Default: no end.

        Raises:
            InvalidRequest: (a ValueError) ``num_returns`` is not 1 to the number of refs.
        """
        refs = list(refs)
        if not 1 <= num_returns <= len(refs):
            raise InvalidRequest(f"num_returns={num_returns!r} must be 1 to {len(refs)}, the number of refs given")
        if sum(ref.done() for ref in refs) < num_returns:
            self._wait_until(refs, num_returns, timeout)
        ready = [ref for ref in refs if ref.done()][:num_returns]
        chosen = set(map(id, ready))
        return ready, [ref for ref in refs if id(ref) not in chosen]

    def _wait_until(self, refs: list[Any], num_returns: int, timeout: float | None) -> None:
        self._watch.wait(refs, num_returns, timeout)

    # Functions -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)``: a future of its value; for a generator function, a generator of its items.

        References and futures among the arguments (not inside of them) are replaced by their values.

        Args:
            name: for people. Default: the function's.
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

        ``handle.method.remote(...)`` gives a future, ``handle.method(...)`` waits for the value.

        Args:
            name: under which it is found; one at a time has it.
            get_if_exists: with ``name``: if such an actor lives, that is it, and nothing is made.
            lifetime: ``"detached"``, with a name: it outlives the code that made it, until `delete_actor`.
            preemptible: False: not on machines that may be taken away.
            num_cpus: reserved for it. Default none.

        Raises:
            BaseException: what the constructor raised.
            NameInUse: the name is another's.
        """

    @abstractmethod
    def delete_actor(self, actor: Any) -> None:
        """End an actor, by its handle or its name, and wait for that. Raises NoSuchActor."""

    @abstractmethod
    def actor_status(self, actor: Any) -> ActorStatus:
        """Where it is in its life. Raises NoSuchActor."""

    # Life ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self) -> None:
        """End what belongs to this context. It may be called again."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
