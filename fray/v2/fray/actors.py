"""Actors of `FrayClient`: handles by name, built on the calls of `fray.blocking`."""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from fray.api.actors import handle as native
from fray.blocking import ActorHandle, ActorMethod, Cluster
from fray.blocking.bridge.call_sender import CallSender, call_sender_of
from fray.blocking.futures import ActorFuture
from fray.errors import ChannelClosed, NoSuchActor
from fray.type_variables import A_co, P, T_co
from fray.v2.fray.current_cluster import cluster_here
from fray.v2.types import ActorConfig

APPEAR_S = 60.0
"""Seconds that the first call of a handle made by name waits for an actor of that name."""
# Polling, as a name that does not exist yet has no key that could be watched.
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.25
"""Pauses between two looks for it: doubled each time, up to the last."""


class FrayActorMethod(ActorMethod[P, T_co]):
    """Method of an actor: see `fray.v2.ActorMethod`, and `fray.blocking.ActorMethod`, which adds more kinds of
    calls."""

    __slots__ = ()

    _handle: FrayActorHandle

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T_co]:
        """Start a call; calls of one thread start in the order in which they are made.

        Raises:
            RuntimeError: no actor of this name has appeared within `APPEAR_S`; or the client is closed, or was made
                before a fork.
            TypeError, ValueError: an argument cannot be pickled, or the arguments have more than 4 GiB.
        """
        try:
            line = self._handle._sender
            # One look for each call: a handle by name follows the name to the next actor that has it.
            if line is None or line.is_over:
                line = self._handle._connect()
            call = line.make(self._name, args, kwargs)
        except ChannelClosed as error:
            raise _client_ended(self._handle._name, error) from error
        future: ActorFuture[T_co] = ActorFuture(call, line.portal)
        line.send(call, self._options)
        return future

    submit = remote


class FrayActorHandle(ActorHandle[A_co]):
    """Reference to an actor on a cluster of Fray by name: usable before the actor exists, on any thread, picklable.

    It stores which actor answered to the name; when that actor has ended and another has the name, it refers to the new
    one. Unknown methods are AttributeErrors at access where the class is known (from `FrayClient.create_actor`, pickled
    or not), else when the call is answered. It pickles to the name and the actor id: the id needs no lookup, and the
    name outlives the actor.
    """

    def __init__(
        self,
        name: str,
        actor: native.ActorHandle | None = None,
        *,
        cluster: Cluster | None = None,
        retries: int = 0,
    ) -> None:
        self._name, self._cluster, self._retries = name, cluster, retries
        super().__init__(actor if actor is not None else native.ActorHandle("", name))

    def __getattr__(self, name: str) -> FrayActorMethod:
        method = getattr(self._native, name)
        if self._retries:
            method = method.options(retry=max(0, self._retries), idempotent=self._retries < 0)
        found = FrayActorMethod(self, method)
        self.__dict__[name] = found  # so that the next access does not come here
        return found

    if not TYPE_CHECKING:

        @property
        def call(self) -> FrayActorMethod:
            """Return the actor's method of this name: handles of `fray.v2` have no names of their own."""
            return self.__getattr__("call")

    def _connect(self) -> CallSender:
        """Connect to the actor that has the name now; if none has, to the last one."""
        cluster = self._cluster = self._cluster or cluster_here(f"actor handle {self._name!r}")
        # An actor that has ended may have a successor under its name. If there is none, calls get the error of the last
        # one.
        known = self._native
        if self._sender is not None and self._sender.is_over:
            known = _successor(cluster, known) or known
        elif not native.actor_id_of(known):
            known = _await_actor(cluster, known)
        if known is not self._native or self._sender is None:
            self._native = _on_cluster(cluster, known)
            self._sender = call_sender_of(cluster._runtime, self._native._connection_route)
        return self._sender

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._name, self._native, self._retries)

    def __eq__(self, other: object) -> bool:
        # By name, as handles of two clients mean the same actor.
        return isinstance(other, FrayActorHandle) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"FrayActorHandle({self._name!r})"


def _unpickled(name: str, actor: native.ActorHandle, retries: int) -> FrayActorHandle:
    return FrayActorHandle(name, actor, retries=retries)


def _on_cluster(cluster: Cluster, actor: native.ActorHandle) -> native.ActorHandle:
    """Return a handle of the same actor that uses this cluster's connection."""
    return native.ActorHandle(actor._actor_id, actor._label, actor._methods, cluster._runtime)


def _with_id(actor: native.ActorHandle, actor_id: str) -> native.ActorHandle:
    return native.ActorHandle(actor_id, actor._label, actor._methods)


def _successor(cluster: Cluster, before: native.ActorHandle) -> native.ActorHandle | None:
    """Return the actor that has the name of ``before`` now; None if there is none."""
    try:
        found = cluster.get_actor(native.label_of(before))._native
    except NoSuchActor:
        return None
    return None if found == before else _with_id(before, native.actor_id_of(found))


def _await_actor(cluster: Cluster, wanted: native.ActorHandle) -> native.ActorHandle:
    """Wait until an actor has the name, and return it.

    Raises:
        RuntimeError: the actor of that name has ended, or none has appeared within `APPEAR_S`.
    """
    name, until, pause = native.label_of(wanted), monotonic() + APPEAR_S, FIRST_POLL_S
    while True:
        try:
            info = cluster.actor_info(name)
        except NoSuchActor as missing:
            if monotonic() > until:
                raise RuntimeError(f"no actor {name!r} has appeared within {APPEAR_S:g} s: {missing}") from missing
        else:
            # The name was used: to wait a minute for another actor would only delay the error.
            if info.ended is not None:
                raise RuntimeError(f"actor {name!r} has ended: {info.reason or 'in order'}")
            return _with_id(wanted, info.actor_id)
        sleep(pause)
        pause = min(LAST_POLL_S, 2 * pause)


def _client_ended(name: str, error: ChannelClosed) -> ChannelClosed:
    text = f"the client of this handle of actor {name!r} has ended ({error}): make another client and other handles"
    return ChannelClosed(text, **error.details)


def handle_of(cluster: Cluster, name: str, actor_id: str, cls: type, config: ActorConfig) -> FrayActorHandle:
    """Return the handle of an actor that this process has made."""
    actor = native.ActorHandle(actor_id, name, native.methods_of(cls), cluster._runtime)
    return FrayActorHandle(name, actor, cluster=cluster, retries=config.max_task_retries or 0)
