"""Verbs that show machines and actors, and ``fray token``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import (
    amount,
    fields,
    span,
    table,
)
from fray.cli.history.gone import described_gone, gone_nodes, gone_table
from fray.cli.jobs import namespace_text
from fray.cli.output import (
    clock,
    say,
    say_json,
    width,
)
from fray.cli.target import namespace_of
from fray.errors import InvalidRequest
from fray.model import job_text
from fray.model.actors import ActorInfo
from fray.model.messages.client import NodeInfo
from fray.model.monitoring.served_calls import ActorMetrics
from fray.model.specs import AttemptInfo, JobInfo, JobState
from fray.model.text import byte_size_text


async def nodes(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray nodes``."""
    found = await cluster.nodes()
    gone = await gone_nodes(cluster, found) if options.all else []
    if options.json:
        say_json({"nodes": found, "gone": gone} if options.all else found)
        return 0
    say(node_table(found, width()))
    if gone:
        say(["", *gone_table(gone, width())])
    return 0


def node_table(found: Sequence[NodeInfo], max_width: int | None) -> list[str]:
    """Return one line per machine."""
    heads = ["NAME", "STATE", "CPU FREE", "MEMORY FREE", "DEVICES", "ATTEMPTS", "ATTRIBUTES"]
    rows = [
        [
            node.name,
            state_of(node),
            free(node.cpu_milli_free / 1000, node.cpu_milli / 1000),
            f"{byte_size_text(node.memory_bytes_free)} of {byte_size_text(node.memory_bytes)}",
            _devices_free(node).removesuffix(", see below"),
            str(node.attempts),
            attributes(node),
        ]
        for node in found
    ]
    return table(heads, rows, max_width, optional=("ATTEMPTS", "ATTRIBUTES", "DEVICES", "MEMORY FREE", "CPU FREE"))


def state_of(node: NodeInfo) -> str:
    """Return ``alive`` or ``silent``, and the reason why it is not in service."""
    alive = "alive" if node.alive else "silent"
    return f"{alive}, {node.standing}" if node.standing else alive


def free(free_count: float, total: float) -> str:
    return f"{amount(free_count)} of {amount(total)}"


def attributes(node: NodeInfo) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(node.attributes.items()))


async def token(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray token``."""
    join_token = await cluster.join_token(options.for_machine, hosts=options.hosts, life_s=options.life_s)
    if options.json:
        say_json({"machine": options.for_machine, "token": join_token})
    else:
        say([join_token])
    return 0


async def show(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray node show``."""
    found = {node.name: node for node in await cluster.nodes()}
    node = found.get(options.node)
    if node is None:
        return await _show_gone(cluster, options, found)
    running = await cluster.list_jobs("*", states=[JobState.RUNNING])
    jobs = [info for info in running if any(run.node == node.name for run in info.members)]
    if options.json:
        say_json({"node": node, "jobs": jobs})
    else:
        say(described(node, jobs, time.time(), width()))
    return 0


async def _show_gone(cluster: Cluster, options: argparse.Namespace, present: Iterable[str]) -> int:
    """Show the last machine of this name that is gone, with all that ran there.

    Raises:
        InvalidRequest: there is none on record.
    """
    gone = await cluster.gone_nodes(node=options.node)
    if not gone:
        known = ", ".join(sorted(present)) or "none"
        raise InvalidRequest(f"no machine named {options.node!r}; known machines: {known}")
    ran = await cluster.attempts(node=options.node)
    if options.json:
        say_json({"gone": gone, "attempts": ran})
    else:
        say(described_gone(gone[-1], ran, width()))
    return 0


def described(node: NodeInfo, jobs: Sequence[JobInfo], now: float, max_width: int | None) -> list[str]:
    """Return all details of a machine."""
    lines = fields(
        [
            ("node", node.name),
            ("state", "alive" if node.alive else "silent: no message for a while, see docs/supervision.md"),
            ("in service", f"no: it {node.standing_reason}" if node.standing_reason else ""),
            ("host", node.host),
            ("pid", str(node.pid or "")),
            ("CPUs free", free(node.cpu_milli_free / 1000, node.cpu_milli / 1000)),
            ("memory free", f"{byte_size_text(node.memory_bytes_free)} of {byte_size_text(node.memory_bytes)}"),
            ("devices free", _devices_free(node)),
            ("ports", f"{node.ports}, {node.ports_free} free" if node.ports else "none offered"),
            ("attributes", attributes(node)),
        ],
        max_width,
    )
    lines += ["", *_isolation_lines(node, max_width)]
    if node.devices:
        lines += [
            "",
            *table(["DEVICE", "STATE", "USED BY"], [device_row(node, each) for each in node.devices], max_width),
        ]
    rows = [run_row(info, run, now) for info in jobs for run in info.members if run.node == node.name]
    if rows:
        lines += ["", *table(RUN_HEADS, rows, max_width, optional=("PROGRESS", "MEMORY", "JOB", "TIME"))]
    return lines if rows else [*lines, "", "nothing runs here"]


def _devices_free(node: NodeInfo) -> str:
    if not node.devices:
        return ""
    free_count = sum(device not in node.granted and device not in node.busy for device in node.devices)
    withheld = f"; {len(node.busy)} withheld, see below" if node.busy else ""
    return f"{free_count} of {len(node.devices)}{withheld}"


def _isolation_lines(node: NodeInfo, max_width: int | None) -> list[str]:
    """Return its isolation and limits: as it reports them, or as far as its attributes show them."""
    details = node.details or {
        key.replace("_", " "): node.attributes[key] for key in ("isolation", "memory_limit") if key in node.attributes
    }
    containers = ("containers", node.attributes.get("containers", "none: no docker, no podman"))
    return fields([*details.items(), containers], max_width)


def device_row(node: NodeInfo, device: str) -> list[str]:
    """Return state and user of a device. A withheld device may still belong to an attempt that is ending."""
    if device in node.busy:
        return [device, "withheld", node.busy[device]]
    holder = node.granted.get(device, "")
    return [device, "used" if holder else "free", holder]


RUN_HEADS = ("JOB", "ATTEMPT", "PID", "TIME", "MEMORY", "PROGRESS")


def run_row(info: JobInfo, attempt: AttemptInfo, now: float) -> list[str]:
    """Return the row of an attempt that runs there."""
    return [
        info.name,
        attempt.attempt_id,
        str(attempt.pid or ""),
        span(None if attempt.start_time is None else now - attempt.start_time),
        byte_size_text(attempt.memory_bytes) if attempt.memory_bytes else "",
        job_text.progress_text(attempt.progress),
    ]


async def actors(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray actors``."""
    namespace = namespace_of(options)
    found = await cluster.list_actors(options.prefix, namespace)
    if options.json:
        say_json(found)
    else:
        say(actor_table(found, namespace == "*", width()))
    return 0


CALL_HEADS = ("RUNNING", "QUEUED", "CALLS", "ERRORS")
"""Columns of the calls of actors."""


def _call_columns(calls: ActorMetrics | None) -> list[str]:
    if calls is None:
        return [""] * len(CALL_HEADS)
    return [str(value) for value in (calls.running, calls.queued, calls.calls, calls.errors)]


def actor_table(found: Sequence[ActorInfo], with_namespace: bool, max_width: int | None) -> list[str]:
    """Return one line per actor, with its calls if any of them reports some."""
    has_calls = any(info.calls is not None for info in found)
    heads = [
        "NAME",
        "STATUS",
        "NODE",
        "PID",
        "RESTARTS",
        "SINCE",
        *(CALL_HEADS if has_calls else ()),
        *(["NAMESPACE"] if with_namespace else []),
        "JOB",
        "ID",
        "REASON",
    ]
    rows = [
        [
            info.name,
            info.status.value,
            info.node,
            str(info.pid or ""),
            str(info.restarts),
            clock(info.started),
            *(_call_columns(info.calls) if has_calls else ()),
            *([namespace_text(info.namespace, max_width)] if with_namespace else []),
            info.parent,
            info.actor_id,
            info.reason,
        ]
        for info in found
    ]
    # The id begins with the name.
    optional = (
        *("NAMESPACE", "RESTARTS", "PID", "SINCE", "NAME", "RUNNING", "CALLS", "NODE"),
        *("QUEUED", "ERRORS", "JOB", "REASON", "STATUS"),
    )
    return table(heads, rows, max_width, optional=optional)
