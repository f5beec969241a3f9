"""Rows of the dashboard's tables, made of what the controller answers. Pure.

A row is a list whose first value is its key; its columns are in `COLUMNS`. Documents (usage, one job, …) are tables of
one row with an object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from fray.model import job_text
from fray.model.messages.client import NodeInfo
from fray.model.messages.usage import QueueInfo
from fray.model.specs import JobInfo, JobState
from fray.monitoring.json_form import plain

Row: TypeAlias = list[Any]

TEXT_LIMIT = 300
"""Characters of a reason or error in a row; the view of the job has all of it."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "jobs": (
        *("id", "name", "state", "cause", "parent", "user", "namespace", "group", "nodes"),
        *("launched", "started", "ended", "progress", "seen", "health", "retries", "text", "owner"),
    ),
    "nodes": (
        *("name", "alive", "standing", "reason", "cpu", "cpu_free", "memory", "memory_free"),
        *("devices", "granted", "busy", "attributes", "attempts", "host"),
    ),
    "held": ("id", "cpu_h", "chip_h", "cost"),
}
"""Names of the columns, by table; a job's times are seconds since the epoch, CPUs of a node are thousandths."""


def job_row(info: JobInfo) -> Row:
    """Return the row of a job."""
    return [
        info.job_id,
        info.name,
        info.state.value,
        info.cause.value if info.cause is not None else "",
        info.parent,
        info.user,
        info.namespace,
        f"{info.job_group}/{info.role}" if info.job_group else "",
        job_text.last_machines(info),
        info.launch_time,
        info.start_time,
        info.end_time,
        job_text.progress_text(info.progress),
        info.progress.time if info.progress is not None else None,
        ", ".join(sorted({attempt.health for attempt in info.members} - {"", "well"})),
        sum(info.retries.values()),
        _shortened(info.reason if info.state is JobState.PENDING else info.error_message or ""),
        info.owner,
    ]


def node_row(node: NodeInfo) -> Row:
    """Return the row of a machine."""
    return [
        node.name,
        node.alive,
        node.standing,
        node.standing_reason,
        node.cpu_milli,
        node.cpu_milli_free,
        node.memory_bytes,
        node.memory_bytes_free,
        node.devices,
        node.granted,
        node.busy,
        node.attributes,
        node.attempts,
        node.host,
    ]


def queue_row(queue: QueueInfo, now: float) -> Row:
    """Return the queue as a document; entries have the time ``since`` which they wait instead of how long."""
    entries = []
    for entry in queue.entries:
        values = plain(entry)
        # Whole seconds: a row that changed with each look would be sent with each look.
        values["since"] = round(now - values.pop("waiting_s"))
        entries.append(values)
    return ["queue", {"total": queue.total, "by_user": queue.by_user, "entries": entries}]


def keyed(name: str, found: Iterable[Any]) -> list[Row]:
    """Return one row for each object: the value of its field ``name``, and its JSON form."""
    return [[getattr(each, name), plain(each)] for each in found]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else f"{line[:TEXT_LIMIT]}…"
