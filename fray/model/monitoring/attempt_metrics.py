"""What is measured of living attempts. The latest counts, nobody keeps it for good, and nothing is decided by it."""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import AttemptId
from fray.model.monitoring.health import Progress

CAPTURE_LIMIT_BYTES = 32 * 1024
"""Of stacks in a record; the middle is cut out of more."""
STACKS_LIMIT_BYTES = 256 * 1024
"""Of stacks that were asked for."""


@frozen(kw_only=True)
class AttemptMetrics:
    """What is known of one attempt. Zero and empty: not known."""

    attempt_id: AttemptId
    progress: Progress | None = None
    age_s: float = 0.0
    """How long ago it said so: the time in ``progress`` is written in by who tells it to people."""
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_s: float = 0.0
    health: str = ""
    """``well``, ``stalled``, or what was wrong the last time it was asked."""
    captured: str = ""
    """Stacks of the last stall. Sent once, and again to a controller that has forgotten."""


def truncate_middle(text: str, limit_bytes: int) -> str:
    """The text, or its beginning and its end with a word on what is missing between them."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    half = max(0, limit_bytes // 2 - 40)
    head, tail = data[:half].decode("utf-8", "ignore"), data[len(data) - half :].decode("utf-8", "ignore")
    return f"{head}\n… {len(data) - 2 * half} bytes are left out here …\n{tail}"
