"""Meaning of exit codes, as declared by the author of a job."""

from __future__ import annotations

from enum import StrEnum


class ExitRule(StrEnum):
    RETRY = "retry"
    """Retry; counts against the failure budget."""
    FAIL = "fail"
    """Fail the job, whatever budget is left."""
    IGNORE = "ignore"
    """Treat as success, like 0."""
