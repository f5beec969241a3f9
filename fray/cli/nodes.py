"""Verbs that look at machines and actors."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import attrs

from fray.cli.out import clock, say, say_json, width
from fray.cli.place import namespace_of
from fray.cli.tables import amount, fields, size, span, table
from fray.cluster import Cluster
from fray.errors import InvalidRequest
from fray.model.actors import ActorInfo
from fray.model.messages.client import NodeInfo
from fray.model.specs import JobInfo, JobState

KNOWN = {
    *("name", "alive", "cpu_milli", "cpu_milli_free", "memory_bytes", "memory_bytes_free", "devices", "attributes"),
    *("attempts", "pid"),
}
"""Fields of a `NodeInfo` that have a place of their own below; others are shown as they are."""


async def nodes(cluster: Cluster, options: argparse.Namespace) -> int:
    """``fray nodes``"""
    found = await cluster.nodes()
    if options.json:
        say_json(found)
    else:
        say(node_table(found, width()))
    return 0


def node_table(found: Sequence[NodeInfo], room: int | None) -> list[str]:
    """One line a machine."""
    heads = ["NAME", "STATE", "CPU FREE", "MEMORY FREE", "DEVICES", "ATTEMPTS", "ATTRIBUTES"]
    rows = [
        [
            node.name,
            "alive" if node.alive else "silent",
            free(node.cpu_milli_free / 1000, node.cpu_milli / 1000),
            f"{size(node.memory_bytes_free)} of {size(node.memory_bytes)}",
            str(len(node.devices) or ""),
            str(node.attempts),
            attributes(node),
        ]
        for node in found
    ]
    return table(heads, rows, room)


def free(left: float, whole: float) -> str:
    return f"{amount(left)} of {amount(whole)}"


def attributes(node: NodeInfo) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(node.attributes.items()))


async def show(cluster: Cluster, options: argparse.Namespace) -> int:
    """``fray node show``"""
    found = {node.name: node for node in await cluster.nodes()}
    node = found.get(options.node)
    if node is None:
        known = ", ".join(sorted(found)) or "none"
        raise InvalidRequest(f"no machine is called {options.node!r}; there are: {known}")
    running = await cluster.list_jobs("*", states=[JobState.RUNNING])
    here = [info for info in running if any(one.node == node.name for one in info.members)]
    if options.json:
        say_json({"node": node, "jobs": here})
    else:
        say(described(node, here, time.time(), width()))
    return 0


def described(node: NodeInfo, here: Sequence[JobInfo], now: float, room: int | None) -> list[str]:
    """All of it, for people."""
    lines = fields(
        [
            ("node", node.name),
            ("state", "alive" if node.alive else "silent"),
            ("pid", str(node.pid or "")),
            ("CPUs free", free(node.cpu_milli_free / 1000, node.cpu_milli / 1000)),
            ("memory free", f"{size(node.memory_bytes_free)} of {size(node.memory_bytes)}"),
            ("devices", ", ".join(node.devices)),
            *([("not to be given", ", ".join(f"{id_} {why}" for id_, why in node.busy.items()))] if node.busy else []),
            ("attributes", attributes(node)),
            ("attempts", str(node.attempts)),
            *_others(node),
        ]
    )
    if here:
        rows = [
            [
                info.name,
                one.attempt_id,
                str(one.pid or ""),
                span(None if one.start_time is None else now - one.start_time),
            ]
            for info in here
            for one in info.members
            if one.node == node.name
        ]
        lines += ["", *table(["RUNS", "ATTEMPT", "PID", "FOR"], rows, room)]
    return lines


def _others(node: NodeInfo) -> list[tuple[str, str]]:
    """What else machines tell of themselves: isolation in force, quarantine, and what a later version adds."""
    told = []
    for field in attrs.fields(type(node)):
        value = getattr(node, field.name)
        if field.name not in KNOWN and value not in (None, "", (), {}):
            told.append((field.name.replace("_", " "), _text(value)))
    return told


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {each}" for key, each in sorted(value.items()))
    if isinstance(value, tuple | list):
        return "\n".join(map(str, value))
    return str(value)


async def actors(cluster: Cluster, options: argparse.Namespace) -> int:
    """``fray actors``"""
    namespace = namespace_of(options)
    found = await cluster.list_actors(options.prefix, namespace)
    if options.json:
        say_json(found)
    else:
        say(actor_table(found, namespace == "*", width()))
    return 0


def actor_table(found: Sequence[ActorInfo], with_namespace: bool, room: int | None) -> list[str]:
    """One line an actor."""
    heads = [
        "NAME",
        "STATUS",
        "ON",
        "PID",
        "RESTARTS",
        "SINCE",
        *(["NAMESPACE"] if with_namespace else []),
        "ID",
        "WHY",
    ]
    rows = [
        [
            info.name,
            info.status.value,
            info.node,
            str(info.pid or ""),
            str(info.restarts),
            clock(info.started),
            *([info.namespace] if with_namespace else []),
            info.actor_id,
            info.why,
        ]
        for info in found
    ]
    return table(heads, rows, room)
