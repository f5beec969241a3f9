"""What the processes of a job say of themselves, one line each: how far they are, and whether they are well.

    30                 so much is done
    30 100             of so much
    30 100 steps       of these
    30 - steps         of nobody knows how many
    well               its health method has returned
    unwell TEXT        it has not, and why

Any process of the job may write such a line to the file that ``FRAY_PROGRESS`` names (a named pipe: nothing is kept
there); `fray.progress` does it for Python.
"""

from __future__ import annotations

from typing import TypeAlias

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.monitoring.health import Progress

VARIABLE = "FRAY_PROGRESS"
PIPE = "progress"
"""Name of the pipe in the attempt's directory."""
STACKS_FILE = "stacks"
"""In the attempt's directory: where its process writes its stacks to when it is told to."""
STACKS_SIGNAL = 40
"""Tells it to: a real-time signal, which no library uses by accident. Whoever has not asked for it would die of it, so
it is sent only to processes that catch it."""
TASKS_END = "-- end of tasks --"
"""The last line of a process's answer to the keeper's question for its Trio tasks."""
LINE_LIMIT_BYTES = 512
"""The kernel keeps lines of up to 4096 bytes whole, whoever else writes; longer ones than this are not listened to."""
UNIT_LIMIT_CHARS = 40
TEXT_LIMIT_CHARS = 300
UNKNOWN = "-"


@frozen
class HealthReport:
    """One answer of a job's own health method."""

    good: bool
    text: str = ""
    """What was wrong."""


@frozen(kw_only=True)
class UsageReport:
    """What the processes of an attempt take: the word of its keeper, not their own."""

    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_s: float = 0.0


WrittenReport: TypeAlias = Progress | HealthReport
"""What has a line."""
AttemptReport: TypeAlias = WrittenReport | UsageReport


def check_progress(done: float, total: float | None, unit: str) -> None:
    """Raises InvalidRequest, saying what to write instead."""
    try:
        fine = 0 <= done < float("inf") and (total is None or 0 <= total < float("inf"))
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise InvalidRequest(
            f"progress({done!r}, {total!r}): write how much is done and, if it is known, of how much: two numbers, "
            "0 or more"
        )
    check_unit(unit)


def check_unit(unit: str) -> None:
    """Raises: InvalidRequest."""
    if not isinstance(unit, str) or len(unit) > UNIT_LIMIT_CHARS or not unit.isprintable():
        raise InvalidRequest(
            f"progress(unit={unit!r}): write a word of at most {UNIT_LIMIT_CHARS} characters, such as 'steps'"
        )


def format_line(report: WrittenReport) -> bytes:
    """With its newline; `parse` makes the same of it."""
    if isinstance(report, HealthReport):
        text = " ".join(report.text[:TEXT_LIMIT_CHARS].split())
        line = "well" if report.good else f"unwell {text}"
    else:
        total = UNKNOWN if report.total is None else repr(report.total)
        line = f"{report.done!r} {total} {report.unit}".rstrip()
    return line.encode("utf-8", "replace")[: LINE_LIMIT_BYTES - 1] + b"\n"


def parse(line: bytes) -> WrittenReport | None:
    """What a line says; None if it says nothing of this kind."""
    head, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    if head in ("well", "unwell"):
        shown = "".join(char if char.isprintable() else " " for char in rest[:TEXT_LIMIT_CHARS])
        return HealthReport(head == "well", " ".join(shown.split()))
    second, _, unit = rest.strip().partition(" ")
    try:
        done, total = float(head), None if second in ("", UNKNOWN) else float(second)
        check_progress(done, total, unit.strip())
    except (ValueError, InvalidRequest):
        return None
    return Progress(done=done, total=total, unit=unit.strip())


def progress_text(progress: Progress) -> str:
    """``30 of 100 steps (30%)``."""
    text = _number(progress.done)
    if progress.total is not None:
        text += f" of {_number(progress.total)}"
    if progress.unit:
        text += f" {progress.unit}"
    if progress.total:
        text += f" ({100 * progress.done / progress.total:.0f}%)"
    return text


def _number(amount: float) -> str:
    """For people: six digits of what is no whole number."""
    return str(int(amount)) if amount == int(amount) and abs(amount) < 1e16 else f"{amount:.6g}"
