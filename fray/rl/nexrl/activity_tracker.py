"""Work in progress, health of modules, and metrics of a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import count
from types import TracebackType
from typing import Any

from attrs import frozen

from fray.rl.nexrl.error_reporter import ErrorReporter, ErrorSeverity
from fray.rl.nexrl.execution import execute_async

logger = logging.getLogger("fray.rl")
Sink = Callable[..., None]
"""Called with the keywords of `ActivityTracker.experiment_logger_post`."""


@frozen
class _Work:
    module: str
    description: str
    began: float


class ExperimentLogger:
    """Destinations of metrics and messages, by name. One that a run has not configured gets a log line.

    Args:
        sinks: by the names that callers give as ``backend``.
        elsewhere: gets what is for any other name, instead of the log.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink] | None = None,
        elsewhere: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.sinks: dict[str, Sink] = dict(sinks or {})
        self.elsewhere = elsewhere

    def post(self, backend: str, **kwargs: Any) -> None:
        """Send to one destination."""
        if (sink := self.sinks.get(backend)) is not None:
            sink(**kwargs)
        elif self.elsewhere is not None:
            self.elsewhere(backend, kwargs)
        else:
            logger.info("%s (not configured): %s", backend, kwargs)


class ActivityTracker:
    """Work in progress of all modules. May be used by several threads.

    Args:
        config: ``project_name`` and ``experiment_name`` begin its log lines.
        max_errors: errors that are kept. Default 1000.
        clock: seconds, for the age of work.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        max_errors: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [(config or {}).get(key) for key in ("project_name", "experiment_name")]
        self._title = "/".join(str(name) for name in names if name) or "fray.rl"
        self._clock = clock
        self._reporter = ErrorReporter(max_errors)
        self._module_refs: dict[str, Any] = {}
        self._rollout_workers: set[str] = set()
        self._work: dict[str, _Work] = {}
        self._tokens = count(1)
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._step = 0
        self.experiment_logger = ExperimentLogger()

    # Work

    def start(self, module: str, work: str) -> str:
        """Note that a module begins work; return the token for `end`."""
        with self._changed:
            token = f"{module}-{next(self._tokens)}"
            self._work[token] = _Work(module, work, self._clock())
        return token

    def end(self, token: str) -> None:
        """Note that work has ended; a token that is not open is ignored."""
        with self._changed:
            self._work.pop(token, None)
            self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call a function whenever work has ended, in the thread that has done it; it must not block."""
        self._listeners.append(listener)

    def is_quiescent(self) -> bool:
        """Return whether no work is in progress."""
        return not self._work

    def wait_quiescent(self, timeout: float | None = None) -> bool:
        """Wait until no work is in progress; return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(self.is_quiescent, timeout)

    def is_rollout_worker_quiescent(self) -> bool:
        """Return whether no registered rollout worker works."""
        with self._changed:
            return not any(work.module in self._rollout_workers for work in self._work.values())

    def get_running_status_summary(self) -> str:
        """Return what is in progress, the oldest first, in one line."""
        with self._changed:
            works = sorted(self._work.values(), key=lambda work: work.began)
        text = ", ".join(f"{work.module}: {work.description} ({self._clock() - work.began:.1f} s)" for work in works)
        return f"{self._title}, step {self._step}: {text or 'no work in progress'}"

    # Modules

    def register_module(self, module_name: str, module_ref: Any, is_rollout_worker: bool = False) -> None:
        """Add a module to those whose liveness is checked: an object with `health_check`, or a wrapper of an actor."""
        self._module_refs[module_name] = module_ref
        if is_rollout_worker:
            self._rollout_workers.add(module_name)

    def check_module_liveness(self, timeout: float = 5.0) -> bool:
        """Ask all modules for their health; False if one says that it is not, raises, or takes too long.

        Each module that is not alive is reported as an error.

        Args:
            timeout: seconds for all modules that are actors.
        """
        deadline = time.monotonic() + timeout
        asked = {name: _ask(module) for name, module in list(self._module_refs.items())}
        is_alive = True
        for name, answer in asked.items():
            try:
                if hasattr(answer, "result"):
                    answer = answer.result(max(0.0, deadline - time.monotonic()))
                if isinstance(answer, Exception):
                    raise answer
                if answer is not True:
                    raise RuntimeError(f"health_check returned {answer!r}")
            except Exception as error:  # noqa: BLE001 (a module that raises anything is not alive)
                self.report_exception(name, "health check", error)
                is_alive = False
        return is_alive

    # Errors

    def report_exception(
        self, module: str, work: str, exception: BaseException, severity: ErrorSeverity | None = None
    ) -> str:
        """Keep an exception; return the id of the error. Default severity: ERROR."""
        return self._reporter.report_exception(module, work, exception, severity or ErrorSeverity.ERROR)

    def report_error(self, module: str, work: str, message: str, severity: ErrorSeverity | None = None) -> str:
        """Keep an error that is not an exception; return its id. Default severity: ERROR."""
        return self._reporter.report_error(module, work, message, severity or ErrorSeverity.ERROR)

    def get_error_health_status(self) -> dict[str, Any]:
        """Return what `ErrorReporter.get_health_status` says."""
        return self._reporter.get_health_status()

    # Steps and metrics

    def set_training_step(self, step: int) -> None:
        """Set the number of the current update."""
        self._step = step

    def get_training_step(self) -> int:
        """Return the number of the current update."""
        return self._step

    def experiment_logger_post(self, backend: str, **kwargs: Any) -> None:
        """Send metrics or a message to a destination of the run.

        Args:
            backend: name of the destination, such as ``"wandb"``.
            kwargs: what it takes: ``data`` and ``step``, or ``content`` and ``title``.
        """
        self.experiment_logger.post(backend, **kwargs)


def _ask(module: Any) -> Any:
    """Return the answer of a health check, a future of it, or the error."""
    try:
        return execute_async(module.health_check)
    except Exception as error:  # noqa: BLE001 (as above)
        return error


class ActivityTrackerProxy:
    """Activity tracker as modules use it.

    Args:
        central_tracker: an `ActivityTracker`, or the wrapper of an actor of this class.
    """

    def __init__(self, central_tracker: Any) -> None:
        self._central_tracker = central_tracker

    def track(self, module: str, work: str, auto_report_errors: bool = True) -> AbstractContextManager[None]:
        """Return a context manager whose block is work in progress.

        Args:
            module: name of the module.
            work: what it does.
            auto_report_errors: whether an exception of the block is reported; it leaves the block in any case.
        """
        return _ProxyTrackCtx(self._central_tracker, module, work, auto_report_errors)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call a function whenever work has ended, unless the tracker is in another process."""
        if isinstance(self._central_tracker, ActivityTracker):
            self._central_tracker.add_listener(listener)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._central_tracker, name)


class _ProxyTrackCtx(AbstractContextManager[None]):
    def __init__(self, tracker: Any, module: str, work: str, auto_report_errors: bool) -> None:
        self._tracker, self._module, self._description = tracker, module, work
        self._auto_report_errors = auto_report_errors

    def __enter__(self) -> None:
        self._token = self._tracker.start(self._module, self._description)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and self._auto_report_errors:
                self._tracker.report_exception(self._module, self._description, error)
        finally:
            self._tracker.end(self._token)
