"""`FrayContext`: functions, objects and actors on a cluster.

Functions run on a pool of workers that belongs to the job or driver that made the context and is launched with the
first function. Code that runs there has the same context: the functions that it runs go to the same pool, the objects
that it puts belong to the same owner. While a function waits for others, another may run in its place.
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
    release_worker,
    sending,
)
from fray.blocking.bridge.portal import refuse_in_loop
from fray.blocking.cluster import Cluster
from fray.blocking.open import current_cluster, open_cluster
from fray.blocking.pools import TaskPool, WorkerPool, unpickle_pool_handle
from fray.errors import InvalidRequest, UnknownClusterSpec
from fray.job.context import JobContext, Lifetime, is_generator_function, value_of
from fray.job.default_context import JOB_CONTEXT
from fray.job.handles import JobActor, RunFuture, as_argument, hold_until_done
from fray.job.remote_function import ItemMaker, ShippedFunction
from fray.model.actors import ActorStatus
from fray.model.resources import ResourceConfig
from fray.model.service_key import ServiceKey
from fray.model.specs import ActorConfig

NAMESPACE = "job-context"
"""Default namespace of contexts with an address: those of one cluster find each other's actors by name."""
WORKERS_LIMIT = 16
"""Largest default size of a pool."""
ALWAYS = -1
"""Number of restarts without limit."""


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
        address: ``http://host:port`` or ``fray://host:port`` of a controller (with ``FRAY_TOKEN``); ``machine`` and
            ``local``, with options, as for `fray.open_cluster`: such a cluster ends with this context. Default: the
            cluster of the running code, see `fray.blocking.current_cluster`.
        num_workers: functions that run concurrently. Default: the number of CPUs of the cluster now, at most 16.
        resources: resources of each worker. Default: nothing is reserved, so that a worker starts at once, and an idle
            pool keeps no CPUs from other jobs.
        max_retries: number of times that a function is repeated because its worker died. Default 3.
        object_memory: memory limit of the objects of this process, such as ``"4GB"``; the others lie in
            ``object_storage``. Default 1 GB.
        object_storage: a directory, or a URL for fsspec. Default: a new directory, removed at the end. If a process has
            several contexts of one cluster, the settings of the first apply.
        namespace: namespace of the names of actors. Default with an address: one for all contexts of that cluster.
        token: token, in place of ``FRAY_TOKEN``.

    Raises:
        UnknownClusterSpec: the address is invalid.
        InvalidRequest: a number out of its range.
        Unreachable, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses the connection.
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
        self._is_borrowed = _shared is not None
        self._pool: TaskPool | None = unpickle_pool_handle(_shared.pool) if _shared is not None else None
        self._arguments: dict[JobActor, list[ObjectRef]] = {}
        """Objects that the arguments of actors refer to, as the actors may restart from them."""
        self._is_closed = False
        self._pid = os.getpid()
        self._opened: Cluster | None = None
        if address is not None:
            # In a new context: the cluster is neither current for what this thread does next nor inside of another.
            opening = partial(open_cluster, spec_of(address), namespace=namespace or NAMESPACE, token=token)
            self._opened = Context().run(opening)
        self.cluster: Cluster = self._opened or current_cluster()
        """Cluster, for operations that a context does not offer: jobs, scopes, logs, nodes."""
        home = _shared.home if _shared is not None else None
        self._objects = ObjectOwner(self.cluster._runtime, object_memory, object_storage, home)

    # Objects ---------------------------------------------------------------------------------------------------------

    def put(self, obj: Any) -> ObjectRef:
        """Store a copy of an object, and return a reference to it, which can be pickled, also inside of other objects.

        The object belongs to the job or driver that made this context. It lives as long as there are references to it,
        and ends with its owner; a later read raises `ObjectLost`.

        Raises:
            NotPicklable, MessageTooLarge (over 4 GiB).
        """
        return self._objects.put(obj)

    def _wait_for(self, ref: Any, timeout: float | None) -> Any:
        # On a worker, another task takes the place of this thread. A thread needs no resources of the cluster, so it
        # never waits for what it blocks itself.
        release_worker()
        return ref.result(timeout)

    def _wait_until(self, refs: list[Any], num_returns: int, timeout: float | None) -> None:
        refuse_in_loop("too few references are done, so wait() would wait")
        release_worker()
        super()._wait_until(refs, num_returns, timeout)

    # Functions -------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)``, sync or async, on a worker.

        Returns a `RunFuture`; for a generator function, a generator of its items, which arrive as they are made.

        References and futures among the arguments (not inside of them) arrive as their values. A function whose
        worker dies is run again (a generator skips the items that were received); its own errors are its result.

        Raises:
            NotPicklable: the function or an argument cannot be pickled. If they exceed 4 GiB, the result is
                `MessageTooLarge`; pass what several functions need by `put`.
            InvalidRequest: ``fn`` is not callable, or the context was shut down.
        """
        pool, label = self._task_pool(), name or getattr(fn, "__name__", None) or type(fn).__name__
        # The task is submitted when they are done: on a worker it would wait for them and occupy the place of others.
        pending = [arg._answer for arg in (*args, *kwargs.values()) if isinstance(arg, RunFuture) and not arg.done()]
        values, named = tuple(map(as_argument, args)), {key: as_argument(value) for key, value in kwargs.items()}
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

    def _task_pool(self) -> TaskPool:
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
                    services=partial(_worker_services, self._objects.home),
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

        The actor belongs to the job or driver whose code calls this, and ends with it. When its process or machine is
        lost, it restarts from its arguments, with a new state.

        Args:
            name: unique among the living actors of the namespace.
            get_if_exists: with ``name``: if such an actor lives, return it, and make nothing.
            lifetime: ``"detached"``, with a name: the actor outlives its maker, until `delete_actor`.
            preemptible: False: only on machines that are not taken away.
            num_cpus: CPUs reserved for the actor. Default: none.
            max_restarts: number of restarts after failures. Default -1: without limit. An error of the first
                construction is raised here, without a restart.

        Raises:
            BaseException: the error that the constructor raised.
            NameInUse: another living actor has the name.
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable: nothing was made.
        """
        reserved = None
        if num_cpus is not None or not preemptible:
            reserved = ResourceConfig(cpu=num_cpus or 0, memory=0, preemptible=preemptible)
        # In a loop nothing can wait for a reference, so the values are sent.
        convert = value_of if objects.lives_in_loop(actor_class) else as_argument
        with sending() as refs:
            handle = self.cluster.create_actor(
                actor_class,
                *map(convert, args),
                name=name,
                get_if_exists=get_if_exists,
                lifetime=lifetime,
                resources=reserved,
                actor_config=ActorConfig(max_restarts=max_restarts, must_start=True),
                **{key: convert(value) for key, value in kwargs.items()},
            )
        # Restarts are unlimited by default, so an error of the first construction has to be final (``must_start``).
        metrics_of(handle)  # answered once the actor is ready
        is_unknown = handle._native._methods is None  # an existing actor, which may be of any class
        actor = JobActor(handle, is_unknown or objects.lives_in_loop(actor_class))
        if refs:
            self._arguments[actor] = refs
        return actor

    def delete_actor(self, actor: JobActor | str) -> None:
        """End an actor, which any process may have made, and wait until it has ended and its name is free.

        Raises:
            NoSuchActor: no living actor has this name, or the handle's actor is unknown to the cluster.
        """
        self.cluster.delete_actor(_actor_or_name(actor))
        if isinstance(actor, JobActor):
            self._arguments.pop(actor, None)

    def actor_status(self, actor: JobActor | str) -> ActorStatus:
        """Return the status of an actor: creating, ready, restarting, failed, ended. Raises NoSuchActor."""
        return self.cluster.actor_status(_actor_or_name(actor))

    # Life ------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for the running functions, end the workers, and close the cluster if this context has opened it."""
        self._end(wait=True)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Shut down; if an error, such as Ctrl-C, ends the ``with`` block, end the functions instead of waiting."""
        self._end(wait=kind is None)

    def _end(self, wait: bool) -> None:
        if self._is_borrowed or os.getpid() != self._pid:
            return  # the process that made the context ends it
        with self._making:
            self._is_closed = True
            pool, self._pool = self._pool, None
        # Not a borrowed handle of another process's pool.
        if isinstance(pool, WorkerPool):
            pool.shutdown(wait)
        if self._opened is not None:
            self._opened.close()

    def opened(self) -> FrayContext:
        """Return this context; see `fray.job.default_context.StoredContext`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle to a context that sends functions and objects here."""
        return PickledContext.opened, (PickledContext(self._task_pool().__reduce__()[1], self._objects.home),)

    def __repr__(self) -> str:
        return f"<FrayContext of {self.cluster!r}>"


def _actor_or_name(actor: JobActor | str) -> ActorHandle | str:
    return actor._handle if isinstance(actor, JobActor) else actor


def spec_of(address: str) -> str:
    """Return the cluster spec of an address, where ``http://`` means a controller. Raises UnknownClusterSpec."""
    url = urlsplit(address)
    if url.scheme == "http":
        return f"fray://{url.netloc}"
    if url.scheme == "https":
        raise UnknownClusterSpec(
            f"{address!r} is not the address of a controller: use http://host:port or fray://host:port", spec=address
        )
    return address


def _cpus_of(cluster: Cluster) -> int:
    # At least one worker, also if no node has joined yet.
    cpus = sum(node.cpu_milli for node in cluster.nodes() if node.alive) // 1000
    return max(1, min(WORKERS_LIMIT, cpus))


# In the workers ------------------------------------------------------------------------------------------------------


# Code on a worker has the context of the pool's owner: nested functions need no more processes, and objects that they
# put outlive their worker.


def _worker_services(home: tuple[Any, ...], pool: TaskPool) -> Mapping[ServiceKey[Any], object]:
    return {JOB_CONTEXT: PickledContext(pool.__reduce__()[1], home)}
