"""``fray history`` and ``fray cost``: hours that attempts held of the cluster, and what they cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of, table
from fray.cli.jobs import namespace_text
from fray.cli.output import note, say, say_json, width
from fray.cli.target import namespace_of
from fray.model.monitoring.accounting import Cost, Hours, UsageSum

LEAST_H = 0.0001
"""Hours from which on they are shown."""
OPTIONAL = ("NAME", "ATTEMPTS", "WAIT H", "JOBS", "GIB-H", "IDLE", "PREEMPTED", "RETRIED")


async def history(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray history``."""
    found = await cluster.history(options.by, **_chosen(options))
    if options.json:
        say_json(found)
    else:
        say(sum_table(found, options.by, width()))
    return 0


async def costs(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray cost``."""
    found = await cluster.cost(options.by, **_chosen(options))
    if options.json:
        say_json(found)
        return 0
    say(cost_table(found, options.by, width()))
    if unpriced := sorted({what for each in found for what in each.unpriced}):
        note(f"without a price in the policy: {', '.join(unpriced)}")
    return 0


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Cluster.history` that the options give."""
    namespace = namespace_of(options)
    return {
        "user": options.user,
        "namespace": "" if namespace == "*" else namespace,
        "job": options.job,
        "node": options.node,
        "since_s": span_of(options.since, "--since"),
        "until_s": span_of(options.until, "--until"),
    }


def sum_table(found: Sequence[UsageSum], by: str, max_width: int | None) -> list[str]:
    """Return one line per key."""
    if not found:
        return ["nothing ran in that time"]
    heads = [*_key_heads(by), "JOBS", "ATTEMPTS", "CPU-H", "GIB-H", "CHIP-H", "RETRIED", "PREEMPTED", "IDLE", "WAIT H"]
    rows = [
        [
            *_keys(by, each.key, each.name, max_width),
            str(each.jobs),
            str(each.attempts),
            _amount(each.held.cpu),
            _amount(each.held.memory_gib),
            _amount(each.held.all_chips) if each.held.all_chips else "",
            _part(each.retried, each.held),
            _part(each.preempted, each.held),
            f"{each.cpu_idle / each.cpu_known:.0%}" if each.cpu_known else "",
            _amount(each.wait_h),
        ]
        for each in found
    ]
    return table(heads, rows, max_width, optional=OPTIONAL)


def cost_table(found: Sequence[Cost], by: str, max_width: int | None) -> list[str]:
    """Return one line per key, and the total."""
    if not found:
        return ["nothing ran in that time"]
    rows = [[*_keys(by, each.key, each.name, max_width), *_amounts(each)] for each in found]
    if len(found) > 1:
        all_of_them = Cost(
            key="",
            cpu=sum(each.cpu for each in found),
            memory=sum(each.memory for each in found),
            chips=sum(each.chips for each in found),
            total=sum(each.total for each in found),
            wasted=sum(each.wasted for each in found),
        )
        rows.append(["total", *([""] if by == "job" else []), *_amounts(all_of_them)])
    heads = [*_key_heads(by), "COST", "CPU", "MEMORY", "CHIPS", "WASTED"]
    return table(heads, rows, max_width, optional=("NAME", "MEMORY", "CPU", "CHIPS", "WASTED"))


def _amounts(each: Cost) -> list[str]:
    texts = [f"{value:,.2f}" for value in (each.total, each.cpu, each.memory, each.chips, each.wasted)]
    texts[3] = texts[3] if each.chips else ""
    return texts


def _key_heads(by: str) -> list[str]:
    return ["ID", "NAME"] if by == "job" else ["KIND"] if by == "machine" else [by.upper()]


def _keys(by: str, key: str, name: str, max_width: int | None) -> list[str]:
    if by == "job":
        return [key, name]
    return [namespace_text(key, max_width) if by == "namespace" else key or "(none)"]


def _amount(hours: float) -> str:
    """Return hours with two digits, or so many that something of them shows."""
    if 0 < hours < LEAST_H:
        return f"<{LEAST_H}"
    return f"{hours:,.2f}" if hours >= 1 or not hours else f"{hours:.2g}"


def _part(some: Hours, whole: Hours) -> str:
    """Return a part of chip-hours, or of CPU-hours where there are no chips, in percent; empty: none."""
    part, of = (some.all_chips, whole.all_chips) if whole.all_chips else (some.cpu, whole.cpu)
    return f"{part / of:.0%}" if part and of else ""
