"""``fray events``: of one job or reservation, or of the whole cluster by user, machine and time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of
from fray.cli.jobs import find_id
from fray.cli.output import clock, say, say_json
from fray.errors import InvalidRequest
from fray.model.messages.client import Event
from fray.model.text import name_pattern


async def events(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray events``."""
    if options.limit < 0:
        raise InvalidRequest(f"--limit {options.limit} must be 0 (all) or more")
    since_s, job = span_of(options.since, "--since"), options.job or options.of_job
    if job is None:
        found = await cluster.find_events(user=options.user, node=options.node, since_s=since_s, limit=options.limit)
    elif options.user:
        raise InvalidRequest("--user: the job is named already; leave one of them out")
    else:
        found = await cluster.events(await find_id(cluster, options, job))
        began = 0.0 if since_s is None else time.time() - since_s
        name = name_pattern(options.node)
        found = [one for one in found if one.time >= began and (not options.node or name.search(one.text))]
        found = found[-options.limit :]
    if options.json:
        say_json(found)
    else:
        say(event_lines(found, with_jobs=job is None))
    return 0


def event_lines(found: Sequence[Event], *, with_jobs: bool) -> list[str]:
    """Return one line per event, and more for texts of several lines."""
    what_width = max((len(event.what) for event in found), default=0)
    job_width = max((len(event.job) for event in found), default=0) if with_jobs else 0
    lines = []
    for event in found:
        job = f"{event.job.ljust(job_width)}  " if with_jobs else ""
        head = f"{clock(event.time)}  {job}{event.what.ljust(what_width)}  "
        first, *more = event.text.splitlines() or [""]
        lines += [f"{head}{first}".rstrip(), *(f"{' ' * len(head)}{line}" for line in more)]
    return lines
