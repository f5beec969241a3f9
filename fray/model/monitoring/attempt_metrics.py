"""Metrics of living attempts: progress, usage and health.

The latest value counts; nothing stores them permanently, and no decision depends on them.
"""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import AttemptId
from fray.model.monitoring.health import Progress
from fray.model.monitoring.served_calls import ServedCalls

CAPTURE_LIMIT_BYTES = 32 * 1024
"""Limit of the stacks in a job's record; the middle is cut out of longer ones."""
STACKS_LIMIT_BYTES = 256 * 1024
"""Limit of the stacks that a client requested."""


@frozen(kw_only=True)
class AttemptMetrics:
    """Latest measurements of one attempt. Zero and empty mean unknown."""

    attempt_id: AttemptId
    progress: Progress | None = None
    age_s: float = 0.0
    """Age of ``progress``: its time field is filled in by the process that shows it to users."""
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_s: float = 0.0
    health: str = ""
    """``well``, ``stalled``, or what was wrong at the last health check."""
    captured: str = ""
    """Stacks of the last stall. Sent once, and again to a controller that has forgotten."""
    calls: ServedCalls | None = None
    """Calls that its process serves, if it has actors."""


def truncate_middle(text: str, limit_bytes: int) -> str:
    """Return the text, or its beginning and end with a note about the omitted middle."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    half = max(0, limit_bytes // 2 - 40)
    head, tail = data[:half].decode("utf-8", "ignore"), data[len(data) - half :].decode("utf-8", "ignore")
    return f"{head}\n… {len(data) - 2 * half} bytes omitted …\n{tail}"
