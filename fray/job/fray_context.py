"""`FrayContext`: functions, objects and actors on a cluster.

Functions run on a pool of workers that belongs to the job or driver that made the context, and is launched with the
first of them. Code that runs there has the same context: what it runs goes to the same pool, what it puts belongs to
the same owner. A function that waits for others gives its place to another one meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from fray.blocking.actors import ActorHandle, metrics_of
from fray.blocking.bridge import objects, remote_generators
from fray.blocking.bridge.objects import (
    ObjectOwner,
    ObjectRef,
    sending,
    step_aside,
)
from fray.blocking.bridge.portal import refuse_in_loop
from fray.blocking.cluster import Cluster
from fray.blocking.open import current_cluster, open_cluster
from fray.blocking.pools import TaskPool, WorkerPool, arrived_pool
from fray.errors import InvalidRequest, UnknownClusterSpec
from fray.job.context import JobContext, Lifetime, is_generator_function
from fray.job.default_context import JOB_CONTEXT
from fray.job.handles import JobActor, RunFuture, arriving, hold_until_done, value_of
from fray.job.remote_function import ItemMaker, ShippedFunction
from fray.model.actors import ActorStatus
from fray.model.resources import ResourceConfig
from fray.model.service_key import ServiceKey
from fray.model.specs import ActorConfig

NAMESPACE = "job-context"
"""Of contexts that are given an address: those of one cluster find each other's actors by name."""
WORKERS_LIMIT = 16
"""Of a pool whose size nobody has said."""
ALWAYS = -1


@frozen
class PickledContext:
    """Context as it is sent to other processes: where its pool and its objects are."""

    pool: tuple[Any, ...]
    home: tuple[Any, ...]

    def opened(self) -> FrayContext:
        """Return a context of this process that uses that pool and puts objects there."""
        return FrayContext(_shared=self)


class FrayContext(JobContext):
    """Functions, objects and actors on a cluster, for sync code.

    Args:
        address: ``http://host:port`` or ``fray://host:port`` of a controller (``FRAY_TOKEN`` opens it); ``machine`` and
            ``local``, with options, as `fray.open_cluster` has them: such a cluster ends with this context. Default:
            the cluster of the running code, see `fray.blocking.current_cluster`.
        num_workers: functions that run at once. Default: as many as the cluster has CPUs now, at most 16.
        resources: of each worker. Default: nothing is reserved for it, so that it starts at once.
        max_retries: how often a function is repeated because its worker died. Default 3.
        object_memory: what the objects of this process may take in memory, such as ``"4GB"``; the others lie in
            ``object_storage``. Default 1 GB.
        object_storage: a directory, or an address that fsspec knows. Default: a directory of its own, removed at the
            end. Of several contexts of one process and cluster, the first one's count.
        namespace: in which names of actors are unique. Default with an address: one for all contexts of that cluster.
        token: in place of ``FRAY_TOKEN``.

    Raises:
        UnknownClusterSpec: the address names nothing.
        InvalidRequest: a number out of its range.
        Unreachable, Unauthorized, ProtocolMismatch: the controller is not there or refuses us.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_workers: int | None = None,
        resources: ResourceConfig | None = None,
        max_retries: int = 3,
        object_memory: str | int | None = None,
        object_storage: str | None = None,
        namespace: str | None = None,
        token: str | None = None,
        _shared: PickledContext | None = None,
    ) -> None:
        super().__init__()
        if num_workers is not None and num_workers < 1:
            raise InvalidRequest(f"num_workers={num_workers!r} must be 1 or more")
        self._num_workers, self._max_retries = num_workers, max_retries
        self._resources = resources or ResourceConfig(cpu=0, memory=0)
        self._making = threading.Lock()
        self._is_guest = _shared is not None
        self._pool: TaskPool | None = arrived_pool(_shared.pool) if _shared is not None else None
        self._arguments: dict[JobActor, list[ObjectRef]] = {}
        """Of actors that may be made anew from them."""
        self._is_closed = False
        self._pid = os.getpid()
        self._opened: Cluster | None = None
        if address is not None:
            # In a context of its own: it is no block around what this thread does next, nor inside of another.
            opening = partial(open_cluster, spec_of(address), namespace=namespace or NAMESPACE, token=token)
            self._opened = Context().run(opening)
        self.cluster: Cluster = self._opened or current_cluster()
        """For all that a context has no words for: jobs, scopes, logs, nodes."""
        home = _shared.home if _shared is not None else None
        self._objects = ObjectOwner(self.cluster._runtime, object_memory, object_storage, home)

    # Objects ---------------------------------------------------------------------------------------------------------

    def put(self, obj: Any) -> ObjectRef:
        """Keep a copy of an object, and return a reference to it: picklable, also inside of other things.

        The object belongs to the job or driver that made this context, lives as long as anybody has a reference, and
        ends with its owner: who asks then gets `ObjectLost`.

        Raises:
            NotPicklable, MessageTooLarge (over 4 GiB).
        """
        return self._objects.put(obj)

    def _wait_for(self, ref: Any, timeout: float | None) -> Any:
        step_aside()
        return ref.result(timeout)

    def _wait_until(self, refs: list[Any], num_returns: int, timeout: float | None) -> None:
        refuse_in_loop("not so many are done, wait() would wait")
        step_aside()
        super()._wait_until(refs, num_returns, timeout)

    # Functions -------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)``, sync or async, on one of the workers: a `RunFuture`; for a generator function,
        a generator of its items, which come as they are made.

        References and futures among the arguments (not inside of them) arrive as their values. A function whose
        worker dies is run again (a generator skips what was received); its own errors are its result.

        Raises:
            NotPicklable: it cannot travel. Nor do more than 32 MiB: the result is then `MessageTooLarge`;
                pass what is large by `put`.
            InvalidRequest: ``fn`` is not callable, or the context was shut down.
        """
        pool, label = self._tasks(), name or getattr(fn, "__name__", None) or type(fn).__name__
        pending = [arg._answer for arg in (*args, *kwargs.values()) if isinstance(arg, RunFuture) and not arg.done()]
        values, named = tuple(map(arriving, args)), {key: arriving(value) for key, value in kwargs.items()}
        stream = remote_generators.RemoteItems(self.cluster._runtime) if is_generator_function(fn) else None
        with sending() as refs:
            if stream is not None:
                answer = pool.submit_after(pending, ItemMaker.of(fn), stream.sink, *values, **named)
            else:
                answer = pool.submit_after(pending, ShippedFunction.of(fn), *values, **named)
        hold_until_done(refs, answer)
        if stream is None:
            return RunFuture(answer, label)
        stream.follow(answer)
        return remote_generators.RemoteGenerator(stream, label)

    def _tasks(self) -> TaskPool:
        with self._making:
            if self._is_closed:
                raise InvalidRequest("this FrayContext has been shut down: make another one")
            if self._pool is None:
                self._pool = WorkerPool(
                    self.cluster,
                    self._num_workers or _cpus_of(self.cluster),
                    self._resources,
                    name_prefix="run",
                    max_retries=self._max_retries,
                    services=partial(_services, self._objects.home),
                )
            return self._pool

    # Actors ----------------------------------------------------------------------------------------------------------

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str | None = None,
        get_if_exists: bool = False,
        lifetime: Lifetime = "non_detached",
        preemptible: bool = True,
        num_cpus: float | None = None,
        max_restarts: int = ALWAYS,
        **kwargs: Any,
    ) -> JobActor:
        """Make ``actor_class(*args, **kwargs)`` in a process of its own and wait until its constructor has returned.

        It belongs to the job or driver whose code calls this, and ends with it. When its process or machine is lost
        it is made anew from its arguments; its state begins anew, too.

        Args:
            name: unique among the living of the namespace.
            get_if_exists: with ``name``: if such an actor lives, whoever made it, that is it, and nothing is made.
            lifetime: ``"detached"``, with a name: it outlives its maker, until `delete_actor`.
            preemptible: False: only on machines that are not taken away.
            num_cpus: reserved for it. Default none.
            max_restarts: how often it is made anew after a failure. Default -1: always. What its constructor raises at
                first is raised here, and it is not made anew.

        Raises:
            BaseException: what the constructor raised.
            NameInUse: the name is another living actor's.
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable: nothing was made.
        """
        reserved = None
        if num_cpus is not None or not preemptible:
            reserved = ResourceConfig(cpu=num_cpus or 0, memory=0, preemptible=preemptible)
        sent = value_of if objects.lives_in_loop(actor_class) else arriving
        with sending() as refs:
            handle = self.cluster.create_actor(
                actor_class,
                *map(sent, args),
                name=name,
                get_if_exists=get_if_exists,
                lifetime=lifetime,
                resources=reserved,
                actor_config=ActorConfig(max_restarts=max_restarts, must_start=True),
                **{key: sent(value) for key, value in kwargs.items()},
            )
        metrics_of(handle)  # answered once it is there
        is_unknown = handle._native._methods is None  # it was there already: its class may be any
        actor = JobActor(handle, is_unknown or objects.lives_in_loop(actor_class))
        if refs:
            self._arguments[actor] = refs
        return actor

    def delete_actor(self, actor: JobActor | str) -> None:
        """End an actor, whoever made it, and wait until it has ended: its name is free then.

        Raises:
            NoSuchActor: none of this name lives, or the handle's is not known (any more).
        """
        self.cluster.delete_actor(_plain(actor))
        if isinstance(actor, JobActor):
            self._arguments.pop(actor, None)

    def actor_status(self, actor: JobActor | str) -> ActorStatus:
        """Where it is in its life: creating, ready, restarting, failed, ended. Raises NoSuchActor."""
        return self.cluster.actor_status(_plain(actor))

    # Life ------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for the functions that run, end the workers, and close the cluster if this context has opened it."""
        self._end(wait=True)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """`shutdown`; a ``with`` that is left by an error, Ctrl-C for one, waits for no function: they end."""
        self._end(wait=kind is None)

    def _end(self, wait: bool) -> None:
        if self._is_guest or os.getpid() != self._pid:
            return  # it is its maker's
        with self._making:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if isinstance(pool, WorkerPool):
            pool.shutdown(wait)
        if self._opened is not None:
            self._opened.close()

    def opened(self) -> FrayContext:
        """Return this context; see `fray.job.default_context.StoredContext`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives, functions go to the pool here, and objects too."""
        return PickledContext.opened, (PickledContext(self._tasks().__reduce__()[1], self._objects.home),)

    def __repr__(self) -> str:
        return f"<FrayContext of {self.cluster!r}>"


def _plain(actor: JobActor | str) -> ActorHandle | str:
    return actor._handle if isinstance(actor, JobActor) else actor


def spec_of(address: str) -> str:
    """A cluster spec of an address as seed 004 writes it. Raises UnknownClusterSpec."""
    url = urlsplit(address)
    if url.scheme == "http":
        return f"fray://{url.netloc}"
    if url.scheme == "https":
        raise UnknownClusterSpec(
            f"{address!r} is no controller: write http://host:port or fray://host:port", spec=address
        )
    return address


def _cpus_of(cluster: Cluster) -> int:
    cpus = sum(node.cpu_milli for node in cluster.nodes() if node.alive) // 1000
    return max(1, min(WORKERS_LIMIT, cpus))


# In the workers ------------------------------------------------------------------------------------------------------


def _services(home: tuple[Any, ...], pool: TaskPool) -> Mapping[ServiceKey[Any], object]:
    return {JOB_CONTEXT: PickledContext(pool.__reduce__()[1], home)}
