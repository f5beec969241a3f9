"""What is measured of living attempts. The latest counts, nobody keeps it for good, and nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from fray.model.frozen import frozen
from fray.model.ids import AttemptId, split_attempt
from fray.model.monitoring.health import Progress
from fray.model.specs import AttemptInfo, JobInfo

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


def complete(info: JobInfo, vitals: Mapping[AttemptId, AttemptMetrics]) -> JobInfo:
    """The same with what is measured of its attempts; the progress is that of the newest life's first member."""
    attempts = tuple(
        _complete(attempt, vitals[attempt.attempt_id]) if attempt.attempt_id in vitals else attempt
        for attempt in info.attempts
    )
    telling = [attempt for attempt in attempts if attempt.progress is not None]
    if attempts == info.attempts and not telling:
        return info
    best = min(telling, key=_newest_first, default=None)
    return evolve(info, attempts=attempts, progress=info.progress if best is None else best.progress)


def _newest_first(attempt: AttemptInfo) -> tuple[int, int]:
    _, generation, member = split_attempt(attempt.attempt_id)
    return -generation, member


def _complete(attempt: AttemptInfo, vital: AttemptMetrics) -> AttemptInfo:
    """What the record has is final; what was measured last stands in for it before."""
    over = attempt.cause is not None
    return evolve(
        attempt,
        progress=vital.progress or attempt.progress,
        memory_bytes=0 if over else vital.memory_bytes,
        peak_memory_bytes=max(attempt.peak_memory_bytes, vital.peak_memory_bytes),
        cpu_s=attempt.cpu_s if over and attempt.cpu_s else vital.cpu_s,
        health="" if over else vital.health,
        captured=attempt.captured or vital.captured,
    )


def cut(text: str, limit_bytes: int) -> str:
    """The text, or its beginning and its end with a word on what is missing between them."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    half = max(0, limit_bytes // 2 - 40)
    head, tail = data[:half].decode("utf-8", "ignore"), data[len(data) - half :].decode("utf-8", "ignore")
    return f"{head}\n… {len(data) - 2 * half} bytes are left out here …\n{tail}"
