"""Handles of remote actors for sync code: their methods wait for the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fray.api.actors import handle as native
from fray.blocking.bridge.call_sender import CallSender, call_sender_of
from fray.blocking.bridge.portal import Portal, refuse_in_loop
from fray.blocking.futures import ActorFuture
from fray.model.messages.calls import ActorMetrics


class ActorMethod:
    """One method of a remote actor: ``method(...)`` waits, ``method.remote(...)`` gives a future at once."""

    __slots__ = ("_handle", "_method", "_name", "_options")

    def __init__(self, handle: ActorHandle, method: native.ActorMethod) -> None:
        self._handle, self._method = handle, method
        self._name, self._options = method._name, method._options

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait for its result. Ctrl-C while waiting cancels the remote call.

        Raises:
            BaseException: what the method raised, with its remote traceback as cause.
            ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, NoSuchMethod, NotPicklable, MessageTooLarge.
        """
        refuse_in_loop("calling a method waits for its answer")
        future = self.remote(*args, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Make the call and return a future of its result. Calls of one thread start in the order they are made.

        It waits only when so many calls are unanswered that more would not be taken (in a done-callback, never).

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot travel.
            ChannelClosed: the cluster has been closed.
        """
        line = self._handle._line or self._handle._connect()
        call = line.make(self._name, args, kwargs)
        future: ActorFuture[Any] = ActorFuture(call, line.portal)
        line.send(call, self._options)
        return future

    def stream(self, /, *args: Any, **kwargs: Any) -> Stream:
        """Iterate over a generator method: ``with method.stream(...) as items: for item in items``."""
        line = self._handle._line or self._handle._connect()
        return Stream(line.portal, line.portal.run(lambda: self._method.stream(*args, **kwargs)))

    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Talk with a method that takes a `fray.Stream`: ``with method.open(...) as stream``, then
        ``stream.send(item)`` and ``stream.receive()``, or ``for item in stream``."""
        line = self._handle._line or self._handle._connect()
        return DuplexStream(line.portal, line.portal.run(lambda: self._method.open(*args, **kwargs)))

    def options(self, **options: Any) -> ActorMethod:
        """The same method with other options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return ActorMethod(self._handle, self._method.options(**options))

    def __repr__(self) -> str:
        return repr(self._method)


class ActorHandle:
    """A remote actor. Its public methods are this object's, and wait; usable before the actor is up; picklable; for
    any thread. ``ActorHandle(handle)`` makes one of a handle of the native face."""

    def __init__(self, handle: native.ActorHandle) -> None:
        self._native = handle
        self._line: CallSender | None = None

    def _connect(self) -> CallSender:
        """Found on first use: a handle that came by pickle belongs to the cluster of the code that uses it."""
        line = self._line = call_sender_of(self._native._runtime, self._native._connection_route)
        return line

    def __getattr__(self, name: str) -> ActorMethod:
        method = ActorMethod(self, getattr(self._native, name))
        self.__dict__[name] = method  # the next time it is found at once
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorHandle, (self._native,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._native == self._native

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        return repr(self._native)


def actor_handle(portal: Portal, handle: native.ActorHandle) -> ActorHandle:
    """Return the handle for sync code. It finds the portal of its runtime when it is first used."""
    return ActorHandle(handle)


class Stream:
    """The items of a remote generator: ``with`` it, then iterate, once. Leaving early closes the generator there."""

    def __init__(self, portal: Portal, stream: Any) -> None:
        self._portal, self._stream = portal, stream

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Raises what the generator raised, or the `FrayError` that says why there are no more items."""
        try:
            return self._portal.call(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Close the remote generator, if it has not ended."""
        self._portal.call(self._stream.aclose)


class DuplexStream(Stream):
    """A conversation with a method: ``with`` it; threads may send and receive at once. Errors as `fray` has them."""

    def send(self, item: Any) -> None:
        """Send one item; waits while 64 items or 4 MiB are on their way.

        Raises:
            trio.BrokenResourceError: the method has returned; trio.ClosedResourceError: after `done_sending`.
            BaseException: what the method raised, or why it is gone, if it has ended so.
        """
        self._portal.call(self._stream.send, item)

    def receive(self) -> Any:
        """The method's next item.

        Raises:
            trio.EndOfChannel: it has returned.
            BaseException: what it raised, or the `FrayError` that says why there are no more items.
        """
        return self._portal.call(self._stream.receive)

    def done_sending(self) -> None:
        """Tell the method that nothing more comes. May be said again."""
        self._portal.call(self._stream.done_sending)

    def result(self) -> Any:
        """Wait for what the method returns, once all its items have been received."""
        return self._portal.call(self._stream.wait)


def metrics_of(actor: ActorHandle) -> ActorMetrics:
    """What an actor has counted: `fray.metrics_of`."""
    line = actor._line or actor._connect()
    return line.portal.call(native.metrics_of, actor._native)


__all__ = [
    "ActorFuture",
    "ActorHandle",
    "ActorMethod",
    "DuplexStream",
    "Stream",
    "metrics_of",
]
