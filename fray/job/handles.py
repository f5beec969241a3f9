"""What `FrayContext` gives: futures of functions and methods, and handles of actors."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from fray.blocking.actors import ActorHandle
from fray.blocking.bridge.objects import (
    BoxedArgument,
    ObjectRef,
    argument,
    sending,
    step_aside,
)
from fray.blocking.futures import ActorFuture
from fray.job.context import Ref, is_ref


class RunFuture(Ref):
    """The result of a function or method, which arrives later. Picklable; for any thread."""

    def __init__(self, answer: ActorFuture[Any], what: str) -> None:
        self._answer, self._what = answer, what

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise what the code raised.

        Large arrays in the result of a function (from 1 MiB on) are read-only, as of objects that were put.

        Args:
            timeout: seconds; after them `TimeoutError`, and the code goes on: ask again. Default: no end.

        Raises:
            TimeoutError: the built-in one.
            FrayError: why there is no result: ActorDied, MachineLost, OutcomeUnknown, ObjectLost, ChannelClosed.
        """
        until = None if timeout is None else monotonic() + timeout
        if not self._answer.done():
            step_aside()
        value = self._answer.result(timeout)
        if isinstance(value, BoxedArgument):
            return value.ref.get(None if until is None else max(0.0, until - monotonic()))
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of what has failed; None when it returned, and while it is pending: this never waits."""
        return self._answer.exception()

    def done(self) -> bool:
        """Whether the result, or the error, is there."""
        return self._answer.done()

    def cancel(self) -> bool:
        """Ask for its end, and whether that can be. It may still come to a result."""
        return self._answer.cancel()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` when it is done: in the loop's thread, so it must be short and never wait."""
        self._answer.add_done_callback(lambda _: callback(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFuture, (self._answer, self._what)

    def __repr__(self) -> str:
        return f"<RunFuture of {self._what}: {'done' if self.done() else 'pending'}>"


def hold_until_done(refs: list[ObjectRef], answer: ActorFuture[Any]) -> None:
    """As long as the code has not ended, which may be repeated, its arguments are there."""
    if refs:
        answer.add_done_callback(lambda _: refs.clear())


# Actors --------------------------------------------------------------------------------------------------------------


class JobActor:
    """A remote actor: ``handle.method.remote(...)`` gives a future, ``handle.method(...)`` waits. Picklable."""

    def __init__(self, handle: ActorHandle, in_loop: bool) -> None:
        self._handle = handle
        self._in_loop = in_loop
        """It has async methods: what arrives there must not wait."""

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
    """One method of a remote actor."""

    def __init__(self, method: Any, in_loop: bool) -> None:
        self._method, self._in_loop = method, in_loop

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait for its value. Ctrl-C while waiting cancels the call. Raises as `RunFuture.result`."""
        future = self.remote(*args, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def remote(self, /, *args: Any, **kwargs: Any) -> RunFuture:
        """Call it; a future of its value. Refs and futures among the arguments arrive as their values.

        Raises:
            NotPicklable, MessageTooLarge, ChannelClosed.
        """
        sent = value_of if self._in_loop else arriving
        with sending() as refs:
            answer = self._method.remote(*map(sent, args), **{name: sent(kwargs[name]) for name in kwargs})
        hold_until_done(refs, answer)
        return RunFuture(answer, repr(self._method))

    def __repr__(self) -> str:
        return repr(self._method)


def arriving(value: Any) -> Any:
    """An argument that, being a reference or a future, arrives as its value."""
    return argument(value) if is_ref(value) else value


def value_of(value: Any) -> Any:
    """An argument that is, being a reference or a future, its value already."""
    return value.result() if is_ref(value) else value
