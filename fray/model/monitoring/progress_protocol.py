"""Protocol of the progress pipe: lines with which a job's processes report progress and health.

    30                 so much is done
    30 100             of so much
    30 100 steps       of these
    30 - steps         of an unknown total
    well               its health method has returned
    unwell TEXT        it has not, and why
    calls JSON         calls that its actors serve (`fray.model.monitoring.served_calls`)

Any process of the job may write such a line to the file that ``FRAY_PROGRESS`` names (a named pipe: nothing is stored
there); `fray.progress` does it for Python.
"""

from __future__ import annotations

from typing import TypeAlias

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.monitoring import served_calls
from fray.model.monitoring.health import Progress
from fray.model.monitoring.served_calls import ServedCalls

VARIABLE = "FRAY_PROGRESS"
PIPE = "progress"
"""Name of the pipe in the attempt's directory."""
STACKS_FILE = "stacks"
"""Name of the file in the attempt's directory into which its process writes its stacks on request."""
STACKS_SIGNAL = 40
"""Signal that requests the stacks: a real-time signal, which no library uses by accident. Its default action kills a
process, so it is sent only to processes that catch it."""
TASKS_END = "-- end of tasks --"
"""Last line of a process's answer when the shim requests its Trio tasks."""
LINE_LIMIT_BYTES = 4000
"""Longest line that is read. The kernel writes up to 4096 bytes to a pipe atomically, whatever else is written."""
UNIT_LIMIT_CHARS = 40
TEXT_LIMIT_CHARS = 300
UNKNOWN = "-"
CALLS = "calls"


@frozen
class HealthReport:
    """One answer of a job's own health method."""

    good: bool
    text: str = ""
    """Reason for a bad answer; empty for a good one."""


@frozen(kw_only=True)
class UsageReport:
    """Resources that the processes of an attempt use, as measured by its shim."""

    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_s: float = 0.0


WrittenReport: TypeAlias = Progress | HealthReport | ServedCalls
"""Reports that have a line of their own in the pipe."""
AttemptReport: TypeAlias = WrittenReport | UsageReport


def check_progress(done: float, total: float | None, unit: str) -> None:
    """Raise InvalidRequest, saying what to write instead, unless the numbers are valid."""
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
    """Raise InvalidRequest unless ``unit`` is a short printable word."""
    if not isinstance(unit, str) or len(unit) > UNIT_LIMIT_CHARS or not unit.isprintable():
        raise InvalidRequest(
            f"progress(unit={unit!r}): write a word of at most {UNIT_LIMIT_CHARS} characters, such as 'steps'"
        )


def format_line(report: WrittenReport) -> bytes:
    """Return the report's line, with its newline; `parse` is the inverse."""
    if isinstance(report, HealthReport):
        text = " ".join(report.text[:TEXT_LIMIT_CHARS].split())
        line = "well" if report.good else f"unwell {text}"
    elif isinstance(report, ServedCalls):
        line = f"{CALLS} {served_calls.to_text(report, LINE_LIMIT_BYTES - len(CALLS) - 2)}"
    else:
        total = UNKNOWN if report.total is None else repr(report.total)
        line = f"{report.done!r} {total} {report.unit}".rstrip()
    return line.encode("utf-8", "replace")[: LINE_LIMIT_BYTES - 1] + b"\n"


def parse(line: bytes) -> WrittenReport | None:
    """Return the report of a line; None for an invalid line."""
    head, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    if head in ("well", "unwell"):
        shown = "".join(char if char.isprintable() else " " for char in rest[:TEXT_LIMIT_CHARS])
        return HealthReport(head == "well", " ".join(shown.split()))
    if head == CALLS:
        return served_calls.from_text(rest)
    second, _, unit = rest.strip().partition(" ")
    try:
        done, total = float(head), None if second in ("", UNKNOWN) else float(second)
        check_progress(done, total, unit.strip())
    except (ValueError, InvalidRequest):
        return None
    return Progress(done=done, total=total, unit=unit.strip())


def progress_text(progress: Progress) -> str:
    """Return ``30 of 100 steps (30%)``."""
    text = _number(progress.done)
    if progress.total is not None:
        text += f" of {_number(progress.total)}"
    if progress.unit:
        text += f" {progress.unit}"
    if progress.total:
        text += f" ({100 * progress.done / progress.total:.0f}%)"
    return text


def _number(amount: float) -> str:
    """Return the number as text: up to six digits unless it is whole."""
    return str(int(amount)) if amount == int(amount) and abs(amount) < 1e16 else f"{amount:.6g}"
