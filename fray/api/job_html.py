"""A job's state as HTML, for notebooks: state, machines, reason or progress. All text of users is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from fray.model import job_text
from fray.model.specs import JobInfo, JobState

ROWS_LIMIT = 10
"""Jobs in a table; the rest is counted."""
_COLOURS = {
    JobState.PENDING: "#9a6700",
    JobState.RUNNING: "#0969da",
    JobState.SUCCEEDED: "#1a7f37",
    JobState.FAILED: "#cf222e",
    JobState.STOPPED: "#6e7781",
}


def job_html(info: JobInfo) -> str:
    """Return one line about a job, with a bar for its progress."""
    return f"<div><b>{escape(info.job_id)}</b> {_state_html(info)} {_about_html(info)}</div>"


def jobs_html(title: str, infos: Sequence[JobInfo]) -> str:
    """Return a title (plain text) with the number of jobs in each state, and a table of living and failed jobs."""
    counts = Counter(info.state for info in infos)
    numbers = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts[state]) or "no jobs"
    shown = [info for info in infos if not info.state.finished or info.state is JobState.FAILED]
    rows = "".join(
        f"<tr><td>{escape(info.job_id)}</td><td>{_state_html(info)}</td><td>{_about_html(info)}</td></tr>"
        for info in shown[:ROWS_LIMIT]
    )
    more = f"<div>and {len(shown) - ROWS_LIMIT} more</div>" if len(shown) > ROWS_LIMIT else ""
    table = f"<table>{rows}</table>{more}" if rows else ""
    return f"<div><b>{escape(title)}</b>: {numbers}{table}</div>"


def _state_html(info: JobInfo) -> str:
    where = job_text.machines_text(info) if info.state is not JobState.PENDING else ""
    return f'<span style="color: {_COLOURS[info.state]}">{escape(job_text.state_text(info))}</span>{escape(where)}'


def _about_html(info: JobInfo) -> str:
    progress = info.progress if info.state is JobState.RUNNING else None
    total = progress.total if progress is not None else None
    bar = f'<progress value="{progress.done:g}" max="{total:g}"></progress> ' if progress is not None and total else ""
    return f"{bar}{escape(job_text.about_text(info))}"
