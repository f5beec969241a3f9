"""``fray groups``: job groups, and their members."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import span, table
from fray.cli.output import (
    note,
    say,
    say_json,
    width,
)
from fray.cli.target import namespace_of
from fray.model.job_groups import JobGroupInfo


async def groups(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray groups``."""
    found = await cluster.list_groups(namespace_of(options), name=options.group)
    if options.json:
        say_json(found)
        return 0
    say(group_table(found, time.time(), width()))
    if options.group:
        for info in found:
            say(["", *member_table(info, width())])
    if options.group and not found:
        note(f"no job group named {options.group!r}")
        return 1
    return 0


def group_table(found: Sequence[JobGroupInfo], now: float, max_width: int | None) -> list[str]:
    """Return one line per group."""
    cells = [
        [
            info.name,
            info.state,
            span((info.end_time or now) - (info.start_time or info.launch_time or now)),
            info.place,
            str(len(info.members)),
            info.group_id,
            info.error_message or info.reason,
        ]
        for info in found
    ]
    heads = ["NAME", "STATE", "TIME", "PLACE", "JOBS", "ID", "REASON"]
    return table(heads, cells, max_width, optional=("PLACE", "NAME", "JOBS", "TIME", "REASON"))


def member_table(info: JobGroupInfo, max_width: int | None) -> list[str]:
    """Return one line per job."""
    cells = [
        [
            each.name,
            each.role,
            str(each.stage),
            "auxiliary" if each.auxiliary else "primary",
            each.state + (" (absorbed)" if each.absorbed else ""),
            each.job_id,
        ]
        for each in info.members
    ]
    heads = ["JOB", "ROLE", "STAGE", "KIND", "STATE", "ID"]
    return table(heads, cells, max_width, optional=("KIND", "STAGE", "JOB", "ROLE"))
