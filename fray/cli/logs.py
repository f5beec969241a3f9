"""``fray logs``: output of jobs, also after their end."""

from __future__ import annotations

import argparse
import sys

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of
from fray.cli.output import clock, has_colors, note
from fray.cli.target import find
from fray.model.log_records import LogLine, LogLineKind
from fray.model.specs import JobInfo
from fray.model.text import plural, visible_text, without_colors
from fray.monitoring.json_form import plain


async def logs(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray logs``."""
    info = await find(cluster, options.job, options)
    reader = cluster.logs(
        info.job_id,
        tail=options.tail,
        since_s=span_of(options.since, "--since"),
        follow=options.follow,
        attempt=options.attempt,
        stream=options.stream or "",
        contains=options.grep,
        tree=options.tree,
    )
    has_lines = False
    async with reader as lines:
        async for line in lines:
            has_lines = True
            print_log_line(line, options)
            if options.follow:
                sys.stdout.flush()
    if not has_lines:
        note(no_output_text(info, options))
    return 0


def no_output_text(info: JobInfo, options: argparse.Namespace) -> str:
    """Return the message for empty output: why there is none."""
    if not info.attempts and not options.tree:
        return f"{info.job_id} has not been started yet; `fray explain {info.job_id}` says why"
    chosen = (options.attempt, options.stream, options.since, options.grep, options.tail)
    if any(option not in (None, "") for option in chosen):
        return f"no output of {info.job_id} matches these options; it has {_attempts(info)}"
    return f"{info.job_id} has no output"


def _attempts(info: JobInfo) -> str:
    return plural(1 + sum(info.retries.values()) if info.attempts else 0, "attempt")


def print_log_line(line: LogLine, options: argparse.Namespace) -> None:
    """Print a line on its stream, or as JSON."""
    if options.json:
        import json

        sys.stdout.write(json.dumps(plain(line)) + "\n")
        return
    if line.kind is LogLineKind.GAP:
        note(gap_text(line))
        return
    time = f"{clock(line.time)}  " if options.times else ""
    name = f"({line.name}) " if options.tree else ""
    out = sys.stdout if line.stream == "out" else sys.stderr
    # As pagers do: programs and files get what was printed, a terminal only its colors.
    text = line.text
    if out.isatty() and not options.raw:
        text = visible_text(text, colors=True) if has_colors(out) else visible_text(without_colors(text))
    out.write(f"{time}{name}{text}\n")


def gap_text(line: LogLine) -> str:
    """Return the message for missing lines."""
    count = "lines" if line.lost is None else f"{line.lost} lines"
    return f"{count} of {line.attempt_id} are missing: {line.text}"
