"""``fray logs``: what jobs have printed, also after their end."""

from __future__ import annotations

import argparse
import sys

from fray.cli.out import clock, note, plain
from fray.cli.place import find
from fray.cli.tables import parse_span
from fray.cluster import Cluster
from fray.errors import InvalidRequest
from fray.model.lines import LineKind, LogLine


async def logs(cluster: Cluster, options: argparse.Namespace) -> int:
    """``fray logs``"""
    info = await find(cluster, options.job, options)
    reader = cluster.logs(
        info.job_id,
        tail=options.tail,
        since_s=since_s(options.since),
        follow=options.follow,
        attempt=options.attempt,
        stream=options.stream or "",
        contains=options.grep,
        tree=options.tree,
    )
    async with reader as lines:
        async for line in lines:
            _say(line, options)
            if options.follow:
                sys.stdout.flush()
    return 0


def since_s(text: str | None) -> float | None:
    """Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError:
        raise InvalidRequest(f"--since {text!r} is no span of time: write 30s, 10m, 2h or 1d") from None


def _say(line: LogLine, options: argparse.Namespace) -> None:
    if options.json:
        import json

        sys.stdout.write(json.dumps(plain(line)) + "\n")
        return
    if line.kind is LineKind.GAP:
        note(gap(line))
        return
    time = f"{clock(line.time)}  " if options.times else ""
    name = f"({line.name}) " if options.tree else ""
    (sys.stdout if line.stream == "out" else sys.stderr).write(f"{time}{name}{line.text}\n")


def gap(line: LogLine) -> str:
    """What is missing there, and why."""
    many = "lines" if line.lost is None else f"{line.lost} lines"
    return f"{many} of {line.attempt_id} are missing here: {line.text}"
