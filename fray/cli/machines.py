"""Verbs about machine groups of the autoscaler: their units and limits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import span, table
from fray.cli.output import say, say_json, width
from fray.model.messages.machine_groups import GroupInfo, MachineInfo, Machines


async def machines(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray machines``."""
    found = await cluster.list_machines(options.group or "")
    if options.json:
        say_json(found)
    else:
        say(described(found, width()))
    return 0


async def scale(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray scale``."""
    await cluster.scale_group(options.group, min=options.min, max=options.max)
    found = await cluster.list_machines(options.group)
    if options.json:
        say_json(found.groups)
    else:
        say(group_table(found.groups, width()))
    return 0


def described(found: Machines, max_width: int | None) -> list[str]:
    """Return the groups, their problems, their units, and the total cost."""
    if not found.groups:
        return ["no machine groups in the policy (see docs/autoscaling.md)"]
    lines = group_table(found.groups, max_width)
    problems = [line for group in found.groups for line in problem_lines(group)]
    lines += ["", *problems] if problems else []
    if found.machines:
        lines += ["", *machine_table(found.machines, max_width)]
    limit = found.spend_limit_per_hour
    bound = "" if limit is None else f", limit {limit:g}"
    return (
        [*lines, "", f"total cost {found.cost_per_hour:g} per hour{bound}"] if found.cost_per_hour or bound else lines
    )


def group_table(groups: Sequence[GroupInfo], max_width: int | None) -> list[str]:
    """Return one line per group; counts are of units."""
    heads = ["GROUP", "PROVIDER", "MIN", "MAX", "WANTED", "REQUESTED", "SEEN", "JOINED", "LEAVING", "PER HOUR", "UNIT"]
    rows = [
        [
            group.name,
            group.provider,
            f"{group.min}" + (f"+{group.buffer}" if group.buffer else ""),
            *map(str, (group.max, group.wanted, group.asked, group.seen, group.joined, group.leaving)),
            f"{group.cost_per_hour:g}",
            group.kind,
        ]
        for group in groups
    ]
    return table(heads, rows, max_width, optional=("UNIT", "PROVIDER", "PER HOUR", "LEAVING", "REQUESTED", "SEEN"))


def problem_lines(group: GroupInfo) -> list[str]:
    """Return why a group requests no machines, or not in all zones."""
    lines = [f"{group.name} is stopped until the policy is reloaded: {group.stopped}"] if group.stopped else []
    if group.trouble:
        lines.append(f"{group.name}: provider {group.provider} cannot list its machines: {group.trouble}")
    for rest in group.backoffs:
        where = f"{group.name} in {rest.zone}" if rest.zone else group.name
        why = f"{rest.kind}, {rest.failures} in a row: {rest.message}"
        lines.append(f"{where} is in back-off for {span(rest.remaining_s)} after {why}")
    return lines


def machine_table(machines: Sequence[MachineInfo], max_width: int | None) -> list[str]:
    """Return one line per unit."""
    heads = ["MACHINE", "ZONE", "PHASE", "TIME", "NODES", "ATTEMPTS", "PER HOUR", "REASON", "PROVIDER STATE"]
    rows = [
        [
            machine.name,
            machine.zone,
            machine.phase,
            span(machine.age_s),
            f"{len(machine.nodes)} of {machine.hosts}",
            str(machine.attempts),
            f"{machine.price_per_hour:g}",
            machine.reason,
            ": ".join(text for text in (machine.state, machine.provider_message) if text),
        ]
        for machine in machines
    ]
    optional = ("PROVIDER STATE", "PER HOUR", "ATTEMPTS", "NODES", "ZONE", "REASON", "TIME")
    return table(heads, rows, max_width, optional=optional)
