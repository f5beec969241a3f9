"""Errors of the modules of a run: kept in memory, and summed up as a health status."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any

RECENT_S = 300.0
"""Age of the oldest error that counts for the health status."""


class ErrorSeverity(Enum):
    """Severity of an error. CRITICAL is what a run cannot repair itself."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@dataclass
class ErrorInfo:
    """One reported error."""

    error_id: str
    timestamp: float
    """Seconds since the epoch."""
    module_name: str
    work_context: str
    severity: ErrorSeverity
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    exception_type: str | None = None
    exception_traceback: str | None = None


class ErrorReporter:
    """Errors of a run, the last ``max_errors`` of them. May be used by several threads.

    Args:
        max_errors: errors that are kept. Default 1000.
        clock: seconds since the epoch.
    """

    def __init__(self, max_errors: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self._errors: deque[ErrorInfo] = deque(maxlen=max_errors)
        self._clock = clock
        self._numbers = count(1)
        self._lock = threading.Lock()

    def report_exception(
        self,
        module_name: str,
        work_context: str,
        exception: BaseException,
        severity: ErrorSeverity = ErrorSeverity.ERROR,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """Keep an exception with its traceback; return the id of the error."""
        text = "".join(traceback.format_exception(exception))
        kind = type(exception).__name__
        return self._add(module_name, work_context, severity, str(exception) or kind, details, kind, text)

    def report_error(
        self,
        module_name: str,
        work_context: str,
        message: str,
        severity: ErrorSeverity = ErrorSeverity.ERROR,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """Keep an error; return its id."""
        return self._add(module_name, work_context, severity, message, details, None, None)

    @property
    def recent_errors(self) -> list[ErrorInfo]:
        """Errors of the last 5 minutes, the oldest first."""
        since = self._clock() - RECENT_S
        with self._lock:
            return [error for error in self._errors if error.timestamp >= since]

    def get_health_status(self) -> dict[str, Any]:
        """Return what the errors of the last 5 minutes say.

        Keys: ``status`` ("error" if there is an error, else "warning" if there is a warning, else "healthy"),
        ``message``, ``recent_error_count`` (of all severities), ``error_level_count`` (critical ones included),
        ``warning_level_count``, ``critical_level_count``.
        """
        recent = self.recent_errors
        counts = Counter(error.severity for error in recent)
        critical, warnings = counts[ErrorSeverity.CRITICAL], counts[ErrorSeverity.WARNING]
        errors = counts[ErrorSeverity.ERROR] + critical
        status = "error" if errors else "warning" if warnings else "healthy"
        message = "no errors in the last 5 minutes"
        if errors or warnings:
            worst = [error for error in recent if error.severity is not ErrorSeverity.INFO]
            if errors:
                worst = [error for error in worst if error.severity is not ErrorSeverity.WARNING]
            last = worst[-1]
            message = f"{errors} errors and {warnings} warnings in the last 5 minutes; last {status}: "
            message += f"{last.module_name}, {last.work_context}: {last.message}"
        return {
            "status": status,
            "message": message,
            "recent_error_count": len(recent),
            "error_level_count": errors,
            "warning_level_count": warnings,
            "critical_level_count": critical,
        }

    def _add(
        self,
        module: str,
        work: str,
        severity: ErrorSeverity,
        message: str,
        details: Mapping[str, Any] | None,
        kind: str | None,
        text: str | None,
    ) -> str:
        with self._lock:
            error_id = f"error-{next(self._numbers)}"
            now = self._clock()
            self._errors.append(
                ErrorInfo(error_id, now, module, work, severity, message, dict(details or {}), kind, text)
            )
        return error_id
