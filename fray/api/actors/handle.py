"""Handles of remote actors, and of their methods."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Iterable
from html import escape
from typing import Any, Concatenate, Generic, Protocol, TypeAlias, TypeVar, cast, overload

from fray.api.job_html import job_html
from fray.errors import InvalidRequest, NoSuchMethod
from fray.missing_names import METHOD_LINES, ExplainsMissing
from fray.model.ids import ActorId
from fray.model.messages.client import ActorEndpoint
from fray.model.monitoring.served_calls import ActorMetrics
from fray.model.resources import short_repr
from fray.runtime.actors.methods import public_names
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import DEFAULT_OPTIONS, CallOptions, Route
from fray.runtime.calls.streams import CallStream, DuplexStream
from fray.runtime.runtime import Runtime, current
from fray.tracebacks import short_traceback, shorten_traceback
from fray.type_variables import A_co, P, T_co

T = TypeVar("T")
Item = TypeVar("Item")
Items: TypeAlias = Iterable[Item] | AsyncIterable[Item]
"""Return type of a generator method of either kind."""


class ActorMethod(ExplainsMissing, Generic[P, T_co]):
    """Method of a remote actor: ``await method(...)``, or ``method.start(...)`` for a future at once.

    ``T_co`` is what the method returns; of an async one, what awaiting it returns; of a generator, the iterator.
    """

    __slots__ = ("_handle", "_name", "_options")
    _meant = METHOD_LINES

    def __init__(self, handle: ActorHandle, name: str, options: CallOptions) -> None:
        self._handle, self._name, self._options = handle, name, options

    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Call the method and return its result. Cancelling the await cancels the remote call.

        Raises:
            BaseException: the exception that the method raised, with its remote traceback as cause.
            ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, NoSuchMethod, NotPicklable, MessageTooLarge.
        """
        try:
            return await self._handle._connection_route().call(self._name, args, kwargs, self._options)  # type: ignore[no-any-return]
        except Exception as error:
            shorten_traceback(error)
            raise

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T_co]:
        """Make the call now, without a checkpoint, and return a future of its result. Calls start in this order.

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot be sent.
            ChannelFull: too many calls are unanswered: await some first.
        """
        try:
            return self._handle._connection_route().start(self._name, args, kwargs, self._options)
        except Exception as error:
            shorten_traceback(error)
            raise

    @overload
    def stream(
        self: ActorMethod[P, Generator[Item, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallStream[Item, T]: ...
    @overload
    def stream(self: ActorMethod[P, Items[Item]], /, *args: P.args, **kwargs: P.kwargs) -> CallStream[Item]: ...

    @short_traceback
    def stream(self, /, *args: Any, **kwargs: Any) -> CallStream:
        """Return an iterator over a generator method: ``async with method.stream(...) as items: async for item in
        items``.

        The generator waits for a slow consumer. Leaving the ``async with``
        closes the generator where it runs. Raises as `start`, and while iterating as calling does.
        """
        return self._handle._connection_route().stream(self._name, args, kwargs, self._options)

    @short_traceback
    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream[Any, T_co]:
        """Open a duplex stream to a method that takes a `fray.Stream`: ``async with method.open(...) as stream``, then
        ``await stream.send(item)`` and ``await stream.receive()``, or ``async for item in stream``.

        Either side may be at most 64 items ahead of the other. Leaving the ``async with`` ends the method if it has not
        ended. Raises as `start`, and later as the methods of `DuplexStream`.
        """
        return self._handle._connection_route().open(self._name, args, kwargs, self._options)

    def options(
        self, *, timeout_s: float | None = None, retry: int = 0, idempotent: bool = False
    ) -> ActorMethod[P, T_co]:
        """Return the same method with other call options.

        Args:
            timeout_s: deadline of the call and of all calls it makes; DeadlineExceeded after it. Default none.
            retry: how many times a call may be repeated on the actor's next incarnation. Default 0.
            idempotent: whether it may be repeated even when it may already have taken effect. Default False.
        """
        return ActorMethod(
            self._handle, self._name, CallOptions(timeout_s=timeout_s, retry=retry, idempotent=idempotent)
        )

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._handle!r}>"


class ActorHandle(Generic[A_co]):
    """Handle of a remote actor, with the actor's public methods; usable before the actor is up; picklable.

    ``A_co``, for type checkers, is the actor's class. What they see of attribute calls is in docs/types.md.
    """

    __slots__ = ("_actor_id", "_label", "_methods", "_route", "_runtime")

    def __init__(
        self, actor_id: ActorId, label: str, methods: tuple[str, ...] | None = None, runtime: Runtime | None = None
    ) -> None:
        self._actor_id = actor_id
        self._label = label
        self._methods = methods
        self._runtime = runtime
        self._route: Route | None = None

    def _connection_route(self) -> Route:
        """Return the route to the actor. It is found on first use: an unpickled handle belongs to the cluster of its
        user.
        """
        if self._route is None:
            if self._runtime is None:
                self._runtime = current()
            self._route = self._runtime.caller.route(f"actor:{self._actor_id}", self._label)
        return self._route

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: only public methods of an actor can be called")
        if self._methods is not None and name not in self._methods:
            near = difflib.get_close_matches(name, self._methods, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else f"; it has {', '.join(self._methods) or 'none'}"
            raise NoSuchMethod(f"actor {self._label!r} has no public method {name!r}{hint}")
        return ActorMethod(self, name, DEFAULT_OPTIONS)

    @property
    def call(self) -> ActorCall[A_co]:
        """Calls by the method itself, which every type checker checks: ``await counter.call(Counter.add, 3)``, and so
        ``counter.call.start(Counter.add, 3)``, ``.stream``, ``.open`` and ``.options``.

        Of an actor whose class has a public method of this name, it is that method.
        """
        if self._methods is not None and "call" in self._methods:
            return cast(ActorCall[A_co], ActorMethod(self, "call", DEFAULT_OPTIONS))
        return ActorCall(self, DEFAULT_OPTIONS)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorHandle, (self._actor_id, self._label, self._methods))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._actor_id == self._actor_id

    def __hash__(self) -> int:
        return hash(self._actor_id)

    def __repr__(self) -> str:
        return f"<actor {self._label} ({self._actor_id})>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the state of the actor's process, if this process follows it."""
        known = self._runtime.client.jobs.known([self._actor_id]) if self._runtime is not None else []
        return job_html(known[0].info) if known else f"<div>{escape(repr(self))}</div>"


class CallContext(Protocol):
    """`ActorContext` of any face: a first parameter that the caller of a method does not give."""

    @property
    def job_id(self) -> str: ...

    @property
    def namespace(self) -> str: ...


Context = TypeVar("Context", bound=CallContext)


class ActorCall(Generic[A_co]):
    """Calls of an actor by its class's methods; made by `ActorHandle.call`. Raises as `ActorMethod` does."""

    __slots__ = ("_handle", "_options")

    def __init__(self, handle: ActorHandle[A_co], options: CallOptions) -> None:
        self._handle, self._options = handle, options

    @overload
    def __call__(
        self, method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[A_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        method: Callable[Concatenate[A_co, Context, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[A_co, Context, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call the method and return its result: ``await counter.call(Counter.add, 3)``."""
        method, rest = self._find(args)
        return method(*rest, **kwargs)

    @overload
    def start(
        self, method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...
    @overload
    def start(
        self, method: Callable[Concatenate[A_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...
    @overload
    def start(
        self,
        method: Callable[Concatenate[A_co, Context, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> CallFuture[T]: ...
    @overload
    def start(
        self, method: Callable[Concatenate[A_co, Context, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...

    def start(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        """Make the call now and return a future of its result. As `ActorMethod.start`."""
        method, rest = self._find(args)
        return method.start(*rest, **kwargs)

    @overload
    def stream(
        self, method: Callable[Concatenate[A_co, P], Generator[Item, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallStream[Item, T]: ...
    @overload
    def stream(
        self, method: Callable[Concatenate[A_co, P], Items[Item]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallStream[Item]: ...
    @overload
    def stream(
        self, method: Callable[Concatenate[A_co, Context, P], Items[Item]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallStream[Item]: ...

    @short_traceback
    def stream(self, /, *args: Any, **kwargs: Any) -> CallStream:
        """Return an iterator over a generator method. As `ActorMethod.stream`."""
        method, rest = self._find(args)
        return method.stream(*rest, **kwargs)

    @overload
    def open(
        self, method: Callable[Concatenate[A_co, ...], Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
    ) -> DuplexStream[Any, T]: ...
    @overload
    def open(
        self, method: Callable[Concatenate[A_co, ...], T], /, *args: Any, **kwargs: Any
    ) -> DuplexStream[Any, T]: ...

    # The stream may be any parameter of the method, so no type says which arguments are left.
    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Open a duplex stream to a method that takes a `fray.Stream`. As `ActorMethod.open`."""
        method, rest = self._find(args)
        return method.open(*rest, **kwargs)

    def options(self, *, timeout_s: float | None = None, retry: int = 0, idempotent: bool = False) -> ActorCall[A_co]:
        """Return the same with other call options: those of `ActorMethod.options`."""
        return ActorCall(self._handle, CallOptions(timeout_s=timeout_s, retry=retry, idempotent=idempotent))

    def _find(self, args: tuple[Any, ...]) -> tuple[ActorMethod, tuple[Any, ...]]:
        """Return the method that the first argument is, and the other arguments."""
        name, rest = named_method(self._handle, args)
        return ActorMethod(self._handle, name, self._options), rest

    def __repr__(self) -> str:
        return f"<calls of {self._handle!r}>"


def named_method(handle: ActorHandle, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the method that the first argument of ``handle.call`` is, and the other arguments.

    Raises:
        InvalidRequest: the first argument is not a method.
        NoSuchMethod: the actor has none of this name.
    """
    name = getattr(args[0], "__name__", None) if args and not isinstance(args[0], type) else None
    if isinstance(name, str):
        getattr(handle, name)  # raises NoSuchMethod
        return name, args[1:]
    # Of a handle by name the class is not known: it may have a method `call`, which gets all arguments.
    if getattr(handle, "_methods", None) is None:
        return "call", args
    given = short_repr(args[0]) if args else "nothing"
    raise InvalidRequest(f"call needs a method of the actor's class, not {given}: write handle.call(Counter.add, 3)")


def actor_id_of(handle: ActorHandle) -> ActorId:
    """Return the id of the actor. This is not an attribute of the handle, whose attributes are the actor's methods."""
    return handle._actor_id


async def metrics_of(actor: ActorHandle | ActorEndpoint) -> ActorMetrics:
    """Return counts of an actor since its incarnation began: calls, errors, running and queued calls, latencies.

    The actor's process answers, also while a method keeps the actor's thread busy. Waits for an actor that is not up
    yet.

    Args:
        actor: a handle, or an element of `ActorPool.endpoints`.

    Raises:
        ActorDied, MachineLost: it has ended for good.
    """
    route = actor._connection_route() if isinstance(actor, ActorHandle) else current().caller.route_to(actor)
    return await route.metrics()


def label_of(handle: ActorHandle) -> str:
    """Return the name of an actor, for messages."""
    return handle._label


def methods_of(cls: type) -> tuple[str, ...] | None:
    """Return the methods that a handle offers; None if the class has a ``__getattr__``: only the actor knows them
    then.
    """
    return None if any("__getattr__" in vars(base) for base in cls.__mro__) else tuple(public_names(cls))
