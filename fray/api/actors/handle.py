"""Handles of remote actors, and of their methods."""

from __future__ import annotations

import difflib
from typing import Any

from fray.errors import NoSuchMethod
from fray.model.ids import ActorId
from fray.model.messages.calls import ActorMetrics
from fray.model.messages.client import ActorEndpoint
from fray.runtime.actors.methods import public_names
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import DEFAULT_OPTIONS, CallOptions, Route
from fray.runtime.calls.streams import CallStream, DuplexStream
from fray.runtime.runtime import Runtime, current


class ActorMethod:
    """Method of a remote actor: ``await method(...)``, or ``method.start(...)`` for a future at once."""

    __slots__ = ("_handle", "_name", "_options")

    def __init__(self, handle: ActorHandle, name: str, options: CallOptions) -> None:
        self._handle, self._name, self._options = handle, name, options

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result. Cancelling the await cancels the remote call.

        Raises:
            BaseException: the exception that the method raised, with its remote traceback as cause.
            ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, NoSuchMethod, NotPicklable, MessageTooLarge.
        """
        return await self._handle._connection_route().call(self._name, args, kwargs, self._options)

    def start(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        """Make the call now, without a checkpoint, and return a future of its result. Calls start in this order.

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot be sent.
            ChannelFull: too many calls are unanswered: await some first.
        """
        return self._handle._connection_route().start(self._name, args, kwargs, self._options)

    def stream(self, /, *args: Any, **kwargs: Any) -> CallStream:
        """Return an iterator over a generator method: ``async with method.stream(...) as items: async for item in
        items``.

        The generator waits for a slow consumer. Leaving the ``async with``
        closes the generator where it runs. Raises as `start`, and while iterating as calling does.
        """
        return self._handle._connection_route().stream(self._name, args, kwargs, self._options)

    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Open a duplex stream to a method that takes a `fray.Stream`: ``async with method.open(...) as stream``, then
        ``await stream.send(item)`` and ``await stream.receive()``, or ``async for item in stream``.

        Either side may be at most 64 items ahead of the other. Leaving the ``async with`` ends the method if it has not
        ended. Raises as `start`, and later as the methods of `DuplexStream`.
        """
        return self._handle._connection_route().open(self._name, args, kwargs, self._options)

    def options(self, *, timeout_s: float | None = None, retry: int = 0, idempotent: bool = False) -> ActorMethod:
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


class ActorHandle:
    """Handle of a remote actor, with the actor's public methods; usable before the actor is up; picklable."""

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

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorHandle, (self._actor_id, self._label, self._methods))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._actor_id == self._actor_id

    def __hash__(self) -> int:
        return hash(self._actor_id)

    def __repr__(self) -> str:
        return f"<actor {self._label} ({self._actor_id})>"


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
