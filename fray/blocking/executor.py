"""`concurrent.futures.Executor` whose calls run on a cluster, for libraries that take one."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from fray.blocking.cluster import Cluster
from fray.blocking.futures import ActorFuture
from fray.blocking.open import current_cluster
from fray.blocking.pools import WorkerPool
from fray.errors import FrayError, InvalidRequest
from fray.model.environment import EnvironmentConfig
from fray.model.resources import ResourceConfig

T = TypeVar("T")

FIRST_NODE_S = 10.0
"""Seconds to wait for the first machine of a cluster that has just been opened."""


class Executor(concurrent.futures.Executor):
    """`concurrent.futures.Executor` on a `WorkerPool`: ``with Executor(max_workers=4) as executor``.

    Functions, arguments and results are pickled, as by a ``ProcessPoolExecutor``; functions of the main program and
    lambdas may be, too. The workers are launched when the executor is made.

    Args:
        max_workers: worker processes. Default: one for each CPU that the cluster has now.
        cluster: where they run. Default `current_cluster()`.
        resources: of each worker. Default 1 CPU and 2 GB.
        environment: packages, files, image and variables of the workers.
        options: further arguments of `WorkerPool`, such as ``max_retries``.

    Raises:
        InvalidRequest: (a ValueError) fewer than one worker; or by default, the cluster has no machine.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        cluster: Cluster | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        **options: Any,
    ) -> None:
        cluster = cluster or current_cluster()
        count = cpu_count(cluster) if max_workers is None else max_workers
        self._pool = WorkerPool(cluster, count, resources, environment, **{"name_prefix": "executor", **options})
        self._unfinished: set[ActorFuture[Any]] = set()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ActorFuture[T]:
        """Queue ``fn(*args, **kwargs)`` and return its future.

        Raises:
            RuntimeError: the executor has been shut down.
            NotPicklable, MessageTooLarge: function or arguments cannot be sent.
        """
        if self._is_shut_down:
            raise RuntimeError("this executor has been shut down: submit before leaving its `with`, or make another")
        future = self._pool.submit(fn, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **options: Any,
    ) -> Iterator[T]:
        """Return an iterator over ``fn(*items)``, in the order of the items. Those not reached are cancelled when the
        iteration ends.

        Args:
            timeout: seconds from now until the iterator raises TimeoutError. Default: no limit.
            chunksize: items that are sent and computed as one task.
            options: further arguments of ``Executor.map`` in this version of Python.

        Raises:
            ValueError: ``chunksize`` is below 1. And as `submit`.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize!r} must be 1 or more")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **options)
        items = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(items, chunksize)), [])
        return chain.from_iterable(super().map(partial(_call_each, fn), chunks, timeout=timeout, **options))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and end the workers after the last one. May be called again.

        Args:
            wait: return when they have ended. False: at once; the interpreter does not exit before.
            cancel_futures: cancel all calls that have not ended, also those that run.
        """
        self._is_shut_down = True
        if cancel_futures:
            for future in list(self._unfinished):
                with suppress(FrayError):  # the cluster has been closed
                    future.cancel()
        if wait:
            self._end()
        else:
            # A thread that the interpreter waits for, as it does for those of the standard library's executors.
            threading.Thread(target=self._end, name="fray-executor-shutdown").start()

    def _end(self) -> None:
        with suppress(FrayError):  # the cluster has been closed, and the workers with it
            self._pool.shutdown()

    def __repr__(self) -> str:
        return f"<Executor on {self._pool._native!r}>"


def _call_each(fn: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*items) for items in chunk]


def cpu_count(cluster: Cluster) -> int:
    """Return the number of whole CPUs of the machines that the cluster has now, at least 1.

    Waits `FIRST_NODE_S` for the first machine.

    Raises:
        InvalidRequest: there is none.
    """
    try:
        nodes = cluster.wait_for_nodes(1, timeout=FIRST_NODE_S)
    except TimeoutError:
        raise InvalidRequest(
            "the cluster has no machine now, so the number of workers is unknown: write Executor(max_workers=8), or "
            "n_jobs=8 for joblib"
        ) from None
    return max(1, sum(node.cpu_milli // 1000 for node in nodes if node.alive and not node.standing))
