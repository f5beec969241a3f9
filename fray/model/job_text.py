"""A job's state as short text: for `repr`, errors and the command line."""

from __future__ import annotations

from fray.model.ids import split_attempt
from fray.model.monitoring.health import Progress
from fray.model.monitoring.served_calls import ActorMetrics
from fray.model.specs import EndReason, JobInfo, JobState
from fray.model.text import list_text, signal_name

SHORT = 120
"""Characters of a reason in a `repr`."""


def last_machines(info: JobInfo) -> list[str]:
    """Return the machines of the last generation of attempts, each once."""
    if not info.attempts:
        return []
    last = split_attempt(info.attempts[-1].attempt_id)[1]
    nodes = [one.node for one in info.attempts if split_attempt(one.attempt_id)[1] == last]
    return list(dict.fromkeys(nodes))


def run_count(info: JobInfo) -> int:
    """Return how often the job was started."""
    return 1 + sum(info.retries.values()) if info.attempts else 0


def progress_text(progress: Progress | None) -> str:
    """Return ``120 of 500 steps (24%)``; empty without progress."""
    if progress is None:
        return ""
    unit = f" {progress.unit}" if progress.unit else ""
    if not progress.total:
        return f"{progress.done:g}{unit}"
    return f"{progress.done:g} of {progress.total:g}{unit} ({progress.done / progress.total:.0%})"


def state_text(info: JobInfo) -> str:
    """Return ``failed (out_of_memory)``; a cause that adds nothing to the state is left out."""
    if info.cause is None or info.cause.value in (info.state.value, EndReason.FAILURE.value):
        return info.state.value
    return f"{info.state.value} ({info.cause.value})"


def summary_text(info: JobInfo) -> str:
    """Return a line: ``pending: waits for 2 CPUs``, ``running on node-a: 3 of 10 files``, ``failed on node-a: …``."""
    where = machines_text(info) if info.state is not JobState.PENDING else ""
    about = about_text(info)
    return f"{state_text(info)}{where}{about and ': '}{about}"


def about_text(info: JobInfo) -> str:
    """Return in one short line the reason of a pending job, the progress of a running one, or the error of its end."""
    why = {JobState.PENDING: info.reason, JobState.RUNNING: progress_text(info.progress)}
    line = why.get(info.state, info.error_message or "").partition("\n")[0]
    return line if len(line) <= SHORT else line[: SHORT - 1] + "…"


def end_text(info: JobInfo) -> str:
    """Return the sentence of its error: where, what happened, after how many attempts, who requested it."""
    text = info.error_message or (info.cause or "ended")
    if info.signal is not None and "SIG" not in text:
        text += f" ({signal_name(info.signal)})"
    if info.state is not JobState.STOPPED:
        times = f" at its {_ordinal(run_count(info))} attempt" if run_count(info) > 1 else ""
        return f"failed{machines_text(info)}{times}: {text}"
    by = f" by {info.ended_by}" if info.ended_by and info.ended_by not in text else ""
    return f"was stopped{machines_text(info)}{by}: {text}"


def machines_text(info: JobInfo) -> str:
    """Return `` on node-a, node-b``, with the blank before it; empty before the job was placed."""
    nodes = last_machines(info)
    return f" on {list_text(nodes, 3)}" if nodes else ""


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def calls_text(calls: ActorMetrics) -> str:
    """Return ``2 running, 0 queued, 120 ended, 1 with errors, 99 % within 4 ms``."""
    parts = [f"{calls.running} running", f"{calls.queued} queued", f"{calls.calls} ended"]
    if calls.errors:
        parts.append(f"{calls.errors} with errors")
    if calls.latency_buckets:
        within_s = calls.latency_s(0.99)
        parts.append(f"99 % within {within_s:.3g} s" if within_s >= 1 else f"99 % within {1000 * within_s:.3g} ms")
    return ", ".join(parts)
