"""Backend of joblib on a cluster: ``joblib.parallel_config(backend="fray")``. ``fray/__init__.py`` registers it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attrs import evolve
from joblib.parallel import FallbackToBackend, ParallelBackendBase, SequentialBackend

from fray.blocking.cluster import Cluster
from fray.blocking.executor import Executor, cpu_count
from fray.blocking.futures import ActorFuture
from fray.blocking.open import current_cluster
from fray.model.environment import EnvironmentConfig
from fray.model.resources import ResourceConfig


class FrayBackend(ParallelBackendBase):  # type: ignore[misc]
    """Runs the calls of `joblib.Parallel` on an `Executor`.

    Args:
        nesting_level, inner_max_num_threads: set by joblib. Default of the latter: the CPUs of a worker.
        executor: whose workers are used, and stay. Default: workers that start and end with each call of `Parallel`, or
            with its ``with`` block.
        options: arguments of `Executor`, such as ``cluster`` and ``environment``.
    """

    default_n_jobs = -1
    supports_inner_max_num_threads = True
    supports_retrieve_callback = True

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        executor: Executor | None = None,
        cluster: Cluster | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level, inner_max_num_threads)
        self._given, self._executor = executor, executor
        self._cluster = cluster or current_cluster()
        self._resources, self._environment, self._options = resources or ResourceConfig(), environment, options
        self._n_jobs = 1
        self._callbacks = ThreadPoolExecutor(1, "fray-joblib")
        self._unfinished: set[ActorFuture[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers for ``n_jobs``: -1 is one for each CPU of the cluster, -2 one less.

        Raises:
            ValueError: it is 0.
            InvalidRequest: it is negative, and the cluster has no machine now.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs=0 has no meaning: write -1 for all CPUs of the cluster")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, cpu_count(self._cluster) + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Prepare for a call with ``n_jobs``; return the number of workers. Raises FallbackToBackend for one, as the
        other backends of joblib do.
        """
        self._n_jobs = self.effective_n_jobs(n_jobs)
        if self._n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        return self._n_jobs

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None) -> ActorFuture[Any]:
        """Queue a batch of calls; ``callback`` is called with its future."""
        if self._executor is None:
            self._executor = self._start()
        future = self._executor.submit(func)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        if callback is not None:
            # On a thread: callbacks take locks of joblib, for which the loop must not wait.
            future.add_done_callback(lambda done: self._callbacks.submit(callback, done))
        return future

    apply_async = submit
    """Name of `submit` before joblib 1.5."""

    def _start(self) -> Executor:
        threads = self.inner_max_num_threads or max(1, int(self._resources.cpu))
        environment = self._environment or EnvironmentConfig.create()
        limits = dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(threads))
        environment = evolve(environment, env_vars={**limits, **environment.env_vars})
        return Executor(
            self._n_jobs, cluster=self._cluster, resources=self._resources, environment=environment, **self._options
        )

    def retrieve_result_callback(self, out: ActorFuture[Any]) -> Any:
        """Return the result of a future that `submit` has returned, or raise its error."""
        return out.result()

    def terminate(self) -> None:
        """End the workers, unless they are those of an executor that was given."""
        if self._executor is not None and self._given is None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._given

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all calls."""
        for future in list(self._unfinished):
            future.cancel()
        self.terminate()

    def get_nested_backend(self) -> tuple[ParallelBackendBase, int | None]:
        """Return the backend for `Parallel` inside of a call: a worker has no CPUs to spare."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None
