"""Actors: handles to call, and the server that exposes objects of this process."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio
from attrs import evolve, frozen

from fray.errors import FrayError, NoSuchMethod
from fray.model.ids import ActorId, JobId, Namespace, check_name, mint
from fray.model.messages.calls import ActorMetrics
from fray.model.messages.client import ActorEndpoint, Register, Unregister
from fray.runtime.actors.endpoints import make_endpoint
from fray.runtime.actors.methods import public_names
from fray.runtime.actors.server import host_of
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import DEFAULT_OPTIONS, CallOptions, Route
from fray.runtime.calls.streams import CallStream, DuplexStream
from fray.runtime.runtime import Runtime, current
from fray.runtime.services import ServiceKey

if TYPE_CHECKING:
    from fray.api.cluster import Cluster
    from fray.api.resolver import Resolver

UNREGISTER_WITHIN_S = 1.0


class ActorMethod:
    """One method of a remote actor: ``await method(...)``, or ``method.start(...)`` for a future at once."""

    __slots__ = ("_handle", "_name", "_options")

    def __init__(self, handle: ActorHandle, name: str, options: CallOptions) -> None:
        self._handle, self._name, self._options = handle, name, options

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result. Cancelling the await cancels the remote call.

        Raises:
            BaseException: what the method raised, with its remote traceback as cause.
            ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, NoSuchMethod, NotPicklable, MessageTooLarge.
        """
        return await self._handle._way().call(self._name, args, kwargs, self._options)

    def start(self, /, *args: Any, **kwargs: Any) -> CallFuture:
        """Make the call now, without a checkpoint, and return a future of its result. Calls start in this order.

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot travel.
            ChannelFull: too many calls are unanswered: await some first.
        """
        return self._handle._way().start(self._name, args, kwargs, self._options)

    def stream(self, /, *args: Any, **kwargs: Any) -> CallStream:
        """Iterate over a generator method: ``async with method.stream(...) as items: async for item in items``.

        Items come as fast as they are taken: the generator waits for a slow consumer. Leaving the ``async with``
        closes the generator where it runs. Raises as `start`, and while iterating as calling does.
        """
        return self._handle._way().stream(self._name, args, kwargs, self._options)

    def open(self, /, *args: Any, **kwargs: Any) -> DuplexStream:
        """Talk with a method that takes a `fray.Stream`: ``async with method.open(...) as stream``, then
        ``await stream.send(item)`` and ``await stream.receive()``, or ``async for item in stream``.

        Both sides run at most 64 items ahead of one another. Leaving the ``async with`` ends the method if it has not
        ended. Raises as `start`, and later as `Conversation` says.
        """
        return self._handle._way().open(self._name, args, kwargs, self._options)

    def options(self, *, timeout_s: float | None = None, retry: int = 0, idempotent: bool = False) -> ActorMethod:
        """The same method with other options.

        Args:
            timeout_s: deadline of the call and of all calls it makes; DeadlineExceeded after it. Default none.
            retry: how many times a call may be repeated on the actor's next incarnation. Default 0.
            idempotent: it may be repeated even when it may already have taken effect. Default False.
        """
        return ActorMethod(
            self._handle, self._name, CallOptions(timeout_s=timeout_s, retry=retry, idempotent=idempotent)
        )

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._handle!r}>"


class ActorHandle:
    """A remote actor. Its public methods are this object's; usable before the actor is up; picklable."""

    __slots__ = ("_actor_id", "_label", "_methods", "_route", "_runtime")

    def __init__(
        self, actor_id: ActorId, label: str, methods: tuple[str, ...] | None = None, runtime: Runtime | None = None
    ) -> None:
        self._actor_id = actor_id
        self._label = label
        self._methods = methods
        self._runtime = runtime
        self._route: Route | None = None

    def _way(self) -> Route:
        """Found on first use: a handle that came by pickle belongs to the cluster of the code that uses it."""
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
    """Which actor a handle means. A function: a handle's own names are the actor's methods."""
    return handle._actor_id


async def metrics_of(actor: ActorHandle | ActorEndpoint) -> ActorMetrics:
    """What an actor has counted since its incarnation began: calls, errors, what is running and queued, latencies.

    The actor's process answers beside its methods, also while one keeps its thread busy. Waits for an actor that is
    not up yet.

    Args:
        actor: a handle, or one of `ActorPool.endpoints`.

    Raises:
        ActorDied, MachineLost: it is gone for good.
    """
    route = actor._way() if isinstance(actor, ActorHandle) else current().caller.route_to(actor)
    return await route.metrics()


def label_of(handle: ActorHandle) -> str:
    """The name of an actor, for people."""
    return handle._label


def methods_of(cls: type) -> tuple[str, ...] | None:
    """Names a handle offers, or None when the class makes attributes up and only the actor itself can tell."""
    return None if any("__getattr__" in vars(base) for base in cls.__mro__) else tuple(public_names(cls))


@frozen
class ActorContext:
    """What an actor's method may use to reach others (seed 000).

    A method whose first parameter is named ``ctx``, or annotated with this class, receives it.
    """

    cluster: Cluster
    resolver: Resolver
    job_id: JobId
    namespace: Namespace

    @classmethod
    def from_environment(cls) -> ActorContext:
        """The context of the running code: of its job, or of the driver (``job_id`` is then empty).

        Raises:
            FrayError: neither in a job nor in `open_cluster`.
        """
        return context_of(current())


ACTOR_CONTEXT: ServiceKey[ActorContext] = ServiceKey("actor context")


def context_of(runtime: Runtime) -> ActorContext:
    """The context of a runtime; one resolver for all its calls, so that pools are followed once."""
    from fray.api.cluster import cluster_of
    from fray.api.resolver import ClusterResolver

    def make() -> ActorContext:
        cluster = cluster_of(runtime)
        return ActorContext(cluster, ClusterResolver(cluster), runtime.job_id or "", runtime.namespace)

    return runtime.services.get_or_make(ACTOR_CONTEXT, make)


class ActorServer:
    """Serve objects of this process as actors, under names that several servers may share.

    Use as ``async with ActorServer(cluster) as server``, or call `shutdown` yourself; the cluster's end ends it too.

    Args:
        cluster: where the names are registered.
        host: address to bind. Default loopback; beyond it only where the node is networked and authenticated. None:
            where actors that are jobs listen: at a socket of the machine and, where the node is networked, at an
            address that other machines reach.
        port: 0 picks one.
    """

    def __init__(self, cluster: Cluster, host: str | None = "127.0.0.1", port: int = 0) -> None:
        self._runtime = cluster._runtime
        self._host, self._port = host, port
        self._endpoints: dict[ActorId, ActorEndpoint] = {}
        self._address: str | None = None
        self._over = trio.Event()

    async def __aenter__(self) -> ActorServer:
        await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    @property
    def address(self) -> str:
        """``host:port`` once it listens (after entering, or after the first `register`).

        Raises:
            FrayError: it does not listen yet.
        """
        if self._address is None:
            raise FrayError("this ActorServer does not listen yet: enter it with `async with`, or register an actor")
        return self._address

    @property
    def token(self) -> str:
        """What a `FixedResolver` of another process must know to call these actors. Keep it secret."""
        return host_of(self._runtime).key

    async def _listen(self) -> None:
        host = host_of(self._runtime)
        if self._address is None and self._host is None:
            self._address = (await host.listen())[0]
        elif self._address is None and self._host is not None:
            self._address = await host.listen_tcp(self._host, self._port)

    async def register(
        self,
        name: str,
        actor: Any,
        metadata: dict[str, str] | None = None,
        *,
        max_concurrency: int | None = None,
        concurrency_groups: Mapping[str, int] | None = None,
    ) -> ActorId:
        """Serve ``actor`` under ``name``; returns its unique id.

        Args:
            max_concurrency: calls under way at once. Default: any number for a class with an async method, else 1.
            concurrency_groups: name to limit; a method says its group with `fray.method`.

        Raises:
            InvalidRequest: the name has blanks or other forbidden characters, a limit is below 1, or a method names a
                group that has none.
            ConnectionFailed: the conversation with the controller has ended.
        """
        check_name(name, "an actor")
        await self._listen()
        host = host_of(self._runtime)
        actor_id = f"{name}-{mint(self._runtime.rng)}"
        number = host.register(
            actor, name, actor_id=actor_id, max_concurrency=max_concurrency, concurrency_groups=concurrency_groups
        )
        endpoint = make_endpoint(self._runtime, actor_id, name, number, metadata)
        try:
            await self._runtime.link.request(Register(endpoint=endpoint))
        except BaseException:
            host.unregister(number)
            raise
        self._endpoints[actor_id] = evolve(endpoint, key="")
        return actor_id

    async def unregister(self, name: str) -> None:
        """Take every actor this server has under ``name`` (or with this id) off the registry and stop serving it."""
        for actor_id, endpoint in list(self._endpoints.items()):
            if name in (endpoint.name, actor_id):
                del self._endpoints[actor_id]
                await self._runtime.link.request(Unregister(actor_id=actor_id))
                host_of(self._runtime).unregister(endpoint.number)

    async def serve(self) -> None:
        """Serve until `shutdown`, or until cancelled."""
        await self._listen()
        await self._over.wait()

    async def shutdown(self, grace_period: float = 5.0) -> None:
        """Take the names back, let running calls finish for ``grace_period`` seconds, then end them."""
        endpoints, self._endpoints = list(self._endpoints.values()), {}
        with trio.move_on_after(grace_period + UNREGISTER_WITHIN_S, shield=True):
            async with trio.open_nursery() as nursery:
                for endpoint in endpoints:
                    nursery.start_soon(self._retire, endpoint, grace_period)
        self._address = None
        self._over.set()
        self._over = trio.Event()

    async def _retire(self, endpoint: ActorEndpoint, grace_s: float) -> None:
        with trio.move_on_after(UNREGISTER_WITHIN_S):
            try:
                await self._runtime.link.request(Unregister(actor_id=endpoint.actor_id))
            except FrayError:
                pass  # the conversation has ended, and the name with it
        await host_of(self._runtime).drain(endpoint.number, grace_s)
