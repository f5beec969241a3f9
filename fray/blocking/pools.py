"""WorkerPool for sync code: stateless workers that run any callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from fray import pools as native
from fray.blocking.cluster import Cluster
from fray.blocking.futures import ActorFuture
from fray.blocking.portal import Held


class WorkerPool:
    """Workers for tasks that keep no state. They are launched when it is made; `shutdown`, or leaving a ``with`` of it,
    ends them, and so does the cluster's end. Arguments and errors are those of `fray.WorkerPool`.
    """

    def __init__(self, cluster: Cluster, num_workers: int, *args: Any, **kwargs: Any) -> None:
        self._portal = cluster._portal
        self._held = Held(self._portal, native.WorkerPool(cluster._native, num_workers, *args, **kwargs))
        self._native = self._held.enter(around_body=False)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.leave(error)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ActorFuture:
        """Queue ``fn(*args, **kwargs)`` (sync, or async) and return a future at once.

        Raises:
            InvalidRequest: the pool has been shut down, or ``fn`` is not callable.
            NotPicklable, MessageTooLarge: it cannot travel.
        """
        return self._portal.run(lambda: ActorFuture(self._native.submit(fn, *args, **kwargs), self._portal))

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> list[ActorFuture]:
        """`submit` for each item; futures in the order of the items."""
        wanted = list(items)
        return self._portal.run(lambda: [ActorFuture(f, self._portal) for f in self._native.map(fn, wanted)])

    @property
    def size(self) -> int:
        """Workers running now."""
        return self._native.size

    @property
    def retried(self) -> int:
        """How many times a task was given to another worker because its own died."""
        return self._native.retried

    def workers(self) -> list[native.WorkerInfo]:
        """A snapshot of the workers."""
        return self._portal.run(self._native.workers)

    def wait_for_workers(self, min_workers: int | None = None, timeout: float = 60.0) -> None:
        """Wait until ``min_workers`` (default all) run. Raises DeadlineExceeded (a TimeoutError)."""
        self._portal.call(self._native.wait_for_workers, min_workers, timeout)

    def shutdown(self, wait: bool = True) -> None:
        """Take no more tasks; with ``wait`` let those submitted finish, else fail them; end the workers."""
        self._portal.call(self._native.shutdown, wait)
        self._held.leave()
