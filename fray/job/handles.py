"""Futures of functions and methods, and handles of actors, of `FrayContext`."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from fray.blocking.actors import ActorHandle
from fray.blocking.bridge.objects import (
    BoxedArgument,
    ObjectRef,
    argument,
    release_worker,
    sending,
)
from fray.blocking.futures import ActorFuture
from fray.job.context import Ref, is_ref, value_of


class RunFuture(Ref):
    """Pending result of a function or method. Picklable; usable on any thread."""

    def __init__(self, answer: ActorFuture[Any], what: str) -> None:
        self._answer, self._what = answer, what

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise the error that the code raised.

        Large arrays in the result of a function (from 1 MiB on) are read-only, like those of objects that were put.

        Args:
            timeout: seconds. Default: without limit. After a timeout the code continues, and `result` may be called
                again.

        Raises:
            TimeoutError: (the built-in one) not within ``timeout`` seconds.
            FrayError: there is no result: ActorDied, MachineLost, OutcomeUnknown, ObjectLost, ChannelClosed.
        """
        until = None if timeout is None else monotonic() + timeout
        if not self._answer.done():
            # Only if it has to wait: giving the worker away starts another thread.
            release_worker()
        value = self._answer.result(timeout)
        if isinstance(value, BoxedArgument):
            return value.ref.get(None if until is None else max(0.0, until - monotonic()))
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None after success and while the result is pending. Never waits."""
        return self._answer.exception() if self._answer.done() else None

    def done(self) -> bool:
        """Return whether the result or the error is there."""
        return self._answer.done()

    def cancel(self) -> bool:
        """Request the end of the code; return whether that is possible. There may still be a result."""
        return self._answer.cancel()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` once it is done, in the loop's thread: the callback must be short and must not
        wait."""
        self._answer.add_done_callback(lambda _: callback(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFuture, (self._answer, self._what)

    def __repr__(self) -> str:
        return f"<RunFuture of {self._what}: {'done' if self.done() else 'pending'}>"


def hold_until_done(refs: list[ObjectRef], answer: ActorFuture[Any]) -> None:
    """Hold the objects that the arguments refer to until the code has ended, as it may be repeated."""
    # A worker may die and its task be run again, from the same arguments.
    if refs:
        answer.add_done_callback(lambda _: refs.clear())


# Actors --------------------------------------------------------------------------------------------------------------


class JobActor:
    """Remote actor: ``handle.method.remote(...)`` returns a future, ``handle.method(...)`` waits. Picklable."""

    def __init__(self, handle: ActorHandle, in_loop: bool) -> None:
        self._handle = handle
        self._in_loop = in_loop
        """True if the actor has async methods: there, references among arguments cannot be waited for."""

    def __getattr__(self, name: str) -> JobMethod:
        return JobMethod(getattr(self._handle, name), self._in_loop)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobActor, (self._handle, self._in_loop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobActor) and other._handle == self._handle

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        return repr(self._handle)


class JobMethod:
    """Method of a remote actor."""

    def __init__(self, method: Any, in_loop: bool) -> None:
        self._method, self._in_loop = method, in_loop

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait for its value. Ctrl-C while waiting cancels the call. Raises as
        `RunFuture.result`."""
        future = self.remote(*args, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            # The caller owns this call alone, as no future of it exists elsewhere.
            future.cancel()
            raise

    def remote(self, /, *args: Any, **kwargs: Any) -> RunFuture:
        """Start a call; return a future of its value. References among the arguments arrive as their values.

        Raises:
            NotPicklable, MessageTooLarge, ChannelClosed.
        """
        convert = value_of if self._in_loop else as_argument
        with sending() as refs:
            answer = self._method.remote(*map(convert, args), **{name: convert(kwargs[name]) for name in kwargs})
        hold_until_done(refs, answer)
        return RunFuture(answer, repr(self._method))

    def __repr__(self) -> str:
        return repr(self._method)


def as_argument(value: Any) -> Any:
    """Return an argument in a form that, for a reference or a future, arrives as its value."""
    return argument(value) if is_ref(value) else value
