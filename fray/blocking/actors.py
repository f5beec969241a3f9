"""Handles of remote actors for sync code: their methods wait for the result."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Concatenate, Generic, TypeVar, cast, overload

from fray.api.actors import handle as native
from fray.api.actors.handle import Context, Items, named_method
from fray.blocking.bridge.call_sender import CallSender, call_sender_of
from fray.blocking.bridge.portal import Portal, refuse_in_loop
from fray.blocking.futures import ActorFuture
from fray.missing_names import BLOCKING_METHOD_LINES, ExplainsMissing
from fray.model.monitoring.served_calls import ActorMetrics
from fray.tracebacks import short_traceback, shorten_traceback
from fray.type_variables import A_co, I_co, P, T_co

T = TypeVar("T")
Item = TypeVar("Item")


class ActorMethod(ExplainsMissing, Generic[P, T_co]):
    """Method of a remote actor: ``method(...)`` waits, ``method.remote(...)`` returns a future at once. ``T_co`` is
    what the method returns, as in `fray`.
    """

    __slots__ = ("_handle", "_method", "_name", "_options")
    _meant = BLOCKING_METHOD_LINES

    def __init__(self, handle: ActorHandle, method: native.ActorMethod[P, T_co]) -> None:
        self._handle, self._method = handle, method
        self._name, self._options = method._name, method._options

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
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
        except Exception as error:
            shorten_traceback(error)
            raise

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T_co]:
        """Make the call and return a future of its result. Calls of one thread start in the order in which they are
        made.

        Waits only if the maximum number of calls is unanswered (never in a done-callback).

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot be sent.
            ChannelClosed: the cluster has been closed.
        """
        sender = self._handle._sender or self._handle._connect()
        try:
            call = sender.make(self._name, args, kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise
        future: ActorFuture[T_co] = ActorFuture(call, sender.portal)
        sender.send(call, self._options)
        return future

    @overload
    def stream(self: ActorMethod[P, Generator[Item, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[Item]: ...
    @overload
    def stream(self: ActorMethod[P, Items[Item]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[Item]: ...

    @short_traceback
    def stream(self, /, *args: Any, **kwargs: Any) -> Stream:
        """Return an iterator over a generator method: ``with method.stream(...) as items: for item in items``."""
        sender = self._handle._sender or self._handle._connect()
        method: native.ActorMethod[..., Any] = self._method
        return Stream(sender.portal, sender.portal.run(lambda: method.stream(*args, **kwargs)))

    @short_traceback
    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Open a duplex stream to a method that takes a `fray.Stream`: ``with method.open(...) as stream``, then
        ``stream.send(item)`` and ``stream.receive()``, or ``for item in stream``.
        """
        sender = self._handle._sender or self._handle._connect()
        return DuplexStream(sender.portal, sender.portal.run(lambda: self._method.open(*args, **kwargs)))

    def options(self, **options: Any) -> ActorMethod[P, T_co]:
        """Return the same method with other call options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return ActorMethod(self._handle, self._method.options(**options))

    def __repr__(self) -> str:
        return repr(self._method)


class ActorHandle(Generic[A_co]):
    """Handle of a remote actor; its public methods wait. Usable before the actor is up, on any thread; picklable.
    ``ActorHandle(handle)`` makes one of a handle of the async API. ``A_co``, for type checkers, is the actor's class.
    """

    def __init__(self, handle: native.ActorHandle[A_co]) -> None:
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

    @property
    def call(self) -> ActorCall[A_co]:
        """Calls by the method itself, which every type checker checks: ``counter.call(Counter.add, 3)``, and so
        ``counter.call.remote(Counter.add, 3)``, ``.stream``, ``.open`` and ``.options``. As `fray.ActorHandle.call`.
        """
        methods = self._native._methods
        if methods is not None and "call" in methods:
            return cast(ActorCall[A_co], self.__getattr__("call"))
        return ActorCall(self, {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorHandle, (self._native,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._native == self._native

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str:
        return self._native._repr_html_()


class ActorCall(Generic[A_co]):
    """Calls of an actor by its class's methods; made by `ActorHandle.call`. Raises as `ActorMethod` does."""

    __slots__ = ("_handle", "_options")

    def __init__(self, handle: ActorHandle[A_co], options: dict[str, Any]) -> None:
        self._handle, self._options = handle, options

    @overload
    def __call__(
        self, method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def __call__(self, method: Callable[Concatenate[A_co, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(
        self,
        method: Callable[Concatenate[A_co, Context, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[A_co, Context, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait for its result: ``counter.call(Counter.add, 3)``."""
        method, rest = self._find(args)
        return method(*rest, **kwargs)

    @overload
    def remote(
        self, method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[T]: ...
    @overload
    def remote(
        self, method: Callable[Concatenate[A_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[T]: ...
    @overload
    def remote(
        self,
        method: Callable[Concatenate[A_co, Context, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ActorFuture[T]: ...
    @overload
    def remote(
        self, method: Callable[Concatenate[A_co, Context, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorFuture[T]: ...

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Make the call and return a future of its result. As `ActorMethod.remote`."""
        method, rest = self._find(args)
        return method.remote(*rest, **kwargs)

    @overload
    def stream(
        self, method: Callable[Concatenate[A_co, P], Items[Item]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[Item]: ...
    @overload
    def stream(
        self, method: Callable[Concatenate[A_co, Context, P], Items[Item]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[Item]: ...

    @short_traceback
    def stream(self, /, *args: Any, **kwargs: Any) -> Stream:
        """Return an iterator over a generator method. As `ActorMethod.stream`."""
        method, rest = self._find(args)
        return method.stream(*rest, **kwargs)

    def open(self, method: Callable[Concatenate[A_co, ...], Any], /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Open a duplex stream to a method that takes a `fray.Stream`. As `ActorMethod.open`."""
        found, rest = self._find((method, *args))
        return found.open(*rest, **kwargs)

    def options(self, **options: Any) -> ActorCall[A_co]:
        """Return the same with other call options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return ActorCall(self._handle, options)

    def _find(self, args: tuple[Any, ...]) -> tuple[ActorMethod, tuple[Any, ...]]:
        """Return the method that the first argument is, and the other arguments."""
        name, rest = named_method(self._handle._native, args)
        method = self._handle.__getattr__(name)
        return method.options(**self._options) if self._options else method, rest

    def __repr__(self) -> str:
        return f"<calls of {self._handle!r}>"


def actor_handle(portal: Portal, handle: native.ActorHandle[T]) -> ActorHandle[T]:
    """Return the handle for sync code. It finds the portal of its runtime when it is first used."""
    return ActorHandle(handle)


class Stream(Generic[I_co]):
    """Items of a remote generator: ``with`` it, then iterate, once. Leaving early closes the generator."""

    def __init__(self, portal: Portal, stream: Any) -> None:
        self._portal, self._stream = portal, stream

    def __enter__(self) -> Stream[I_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[I_co]:
        return self

    def __next__(self) -> I_co:
        """Return the next item. Raises what the generator raised, or the `FrayError` that says why there are no more
        items.
        """
        try:
            item: I_co = self._portal.call(self._stream.__anext__)
            return item
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Close the remote generator, if it has not ended."""
        self._portal.call(self._stream.aclose)


class DuplexStream(Stream[I_co]):
    """Connection to a method that sends and receives: ``with`` it; threads may use it at once. Errors as in `fray`."""

    def send(self, item: Any) -> None:
        """Send one item; waits while 64 items or 4 MiB have not been received.

        Raises:
            trio.BrokenResourceError: the method has returned; trio.ClosedResourceError: after `done_sending`.
            BaseException: what the method raised, or why it was lost, if that is how it ended.
        """
        self._portal.call(self._stream.send, item)

    def receive(self) -> I_co:
        """Return the method's next item.

        Raises:
            trio.EndOfChannel: it has returned.
            BaseException: what it raised, or the `FrayError` that says why there are no more items.
        """
        item: I_co = self._portal.call(self._stream.receive)
        return item

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
