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
    """Method of a remote actor: ``method(...)`` waits, ``method.remote(...)`` returns a future at once."""

    __slots__ = ("_handle", "_method", "_name", "_options")

    def __init__(self, handle: ActorHandle, method: native.ActorMethod) -> None:
        self._handle, self._method = handle, method
        self._name, self._options = method._name, method._options

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait for its result. Ctrl-C while waiting cancels the remote call.

        Raises:
            BaseException: the exception that the method raised, with its remote traceback as cause.
            ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, NoSuchMethod, NotPicklable, MessageTooLarge.
        """
        refuse_in_loop("calling a method waits for its result")
        future = self.remote(*args, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Make the call and return a future of its result. Calls of one thread start in the order in which they are
        made.

        Waits only if the maximum number of calls is unanswered (never in a done-callback).

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot be sent.
            ChannelClosed: the cluster has been closed.
        """
        sender = self._handle._sender or self._handle._connect()
        call = sender.make(self._name, args, kwargs)
        future: ActorFuture[Any] = ActorFuture(call, sender.portal)
        sender.send(call, self._options)
        return future

    def stream(self, /, *args: Any, **kwargs: Any) -> Stream:
        """Return an iterator over a generator method: ``with method.stream(...) as items: for item in items``."""
        sender = self._handle._sender or self._handle._connect()
        return Stream(sender.portal, sender.portal.run(lambda: self._method.stream(*args, **kwargs)))

    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Open a duplex stream to a method that takes a `fray.Stream`: ``with method.open(...) as stream``, then
        ``stream.send(item)`` and ``stream.receive()``, or ``for item in stream``.
        """
        sender = self._handle._sender or self._handle._connect()
        return DuplexStream(sender.portal, sender.portal.run(lambda: self._method.open(*args, **kwargs)))

    def options(self, **options: Any) -> ActorMethod:
        """Return the same method with other call options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return ActorMethod(self._handle, self._method.options(**options))

    def __repr__(self) -> str:
        return repr(self._method)


class ActorHandle:
    """Handle of a remote actor; its public methods wait. Usable before the actor is up, on any thread; picklable.
    ``ActorHandle(handle)`` makes one of a handle of the async API.
    """

    def __init__(self, handle: native.ActorHandle) -> None:
        self._native = handle
        self._sender: CallSender | None = None

    def _connect(self) -> CallSender:
        """Return the sender to the actor. It is found on first use: an unpickled handle belongs to the cluster of its
        user.
        """
        sender = self._sender = call_sender_of(self._native._runtime, self._native._connection_route)
        return sender

    def __getattr__(self, name: str) -> ActorMethod:
        method = ActorMethod(self, getattr(self._native, name))
        self.__dict__[name] = method  # found without __getattr__ the next time
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
    """Items of a remote generator: ``with`` it, then iterate, once. Leaving early closes the generator."""

    def __init__(self, portal: Portal, stream: Any) -> None:
        self._portal, self._stream = portal, stream

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next item. Raises what the generator raised, or the `FrayError` that says why there are no more
        items.
        """
        try:
            return self._portal.call(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Close the remote generator, if it has not ended."""
        self._portal.call(self._stream.aclose)


class DuplexStream(Stream):
    """Connection to a method that sends and receives: ``with`` it; threads may use it at once. Errors as in `fray`."""

    def send(self, item: Any) -> None:
        """Send one item; waits while 64 items or 4 MiB have not been received.

        Raises:
            trio.BrokenResourceError: the method has returned; trio.ClosedResourceError: after `done_sending`.
            BaseException: what the method raised, or why it was lost, if that is how it ended.
        """
        self._portal.call(self._stream.send, item)

    def receive(self) -> Any:
        """Return the method's next item.

        Raises:
            trio.EndOfChannel: it has returned.
            BaseException: what it raised, or the `FrayError` that says why there are no more items.
        """
        return self._portal.call(self._stream.receive)

    def done_sending(self) -> None:
        """Tell the method that no more items come. May be called again."""
        self._portal.call(self._stream.done_sending)

    def result(self) -> Any:
        """Return what the method returns, once all its items have been received."""
        return self._portal.call(self._stream.wait)


def metrics_of(actor: ActorHandle) -> ActorMetrics:
    """Return the counts of an actor: see `fray.metrics_of`."""
    sender = actor._sender or actor._connect()
    return sender.portal.call(native.metrics_of, actor._native)


__all__ = [
    "ActorFuture",
    "ActorHandle",
    "ActorMethod",
    "DuplexStream",
    "Stream",
    "metrics_of",
]
