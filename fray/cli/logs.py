"""``fray logs``: what jobs have printed, also after their end."""

from __future__ import annotations

import argparse
import sys

from fray.api.cluster import Cluster
from fray.cli.formatting import parse_span
from fray.cli.output import clock, note, plain
from fray.cli.target import find
from fray.errors import InvalidRequest
from fray.model.ids import split_attempt
from fray.model.log_records import LogLine, LogLineKind
from fray.model.specs import JobInfo


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
    anything = False
    async with reader as lines:
        async for line in lines:
            anything = True
            _say(line, options)
            if options.follow:
                sys.stdout.flush()
    if not anything:
        note(silence(info, options))
    return 0


def silence(info: JobInfo, options: argparse.Namespace) -> str:
    """Why there is nothing to read."""
    if not info.attempts and not options.tree:
        return f"{info.job_id} has not been started yet; `fray explain {info.job_id}` says why"
    chosen = (options.attempt, options.stream, options.since, options.grep, options.tail)
    if any(given not in (None, "") for given in chosen):
        return f"nothing of what {info.job_id} has printed is meant by these options; it has {_attempts(info)}"
    return f"{info.job_id} has printed nothing"


def _attempts(info: JobInfo) -> str:
    many = 1 + max((split_attempt(one.attempt_id)[1] for one in info.attempts), default=-1)
    return f"{many} attempt{'' if many == 1 else 's'}"


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
    if line.kind is LogLineKind.GAP:
        note(gap(line))
        return
    time = f"{clock(line.time)}  " if options.times else ""
    name = f"({line.name}) " if options.tree else ""
    (sys.stdout if line.stream == "out" else sys.stderr).write(f"{time}{name}{line.text}\n")


def gap(line: LogLine) -> str:
    """What is missing there, and why."""
    many = "lines" if line.lost is None else f"{line.lost} lines"
    return f"{many} of {line.attempt_id} are missing here: {line.text}"
