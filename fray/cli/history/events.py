"""``fray events``: of one job, of reservations, or of the whole cluster by user, machine and time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of, wrapped
from fray.cli.jobs import find_id
from fray.cli.output import clock, say, say_json, width
from fray.errors import InvalidRequest, NoSuchReservation
from fray.model.messages.client import Event
from fray.model.text import name_pattern

TEXT_WIDTH = 30
"""Room that the text of an event needs beside its head; with less, further lines are indented below the head."""


async def events(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray events``."""
    if options.limit < 0:
        raise InvalidRequest(f"--limit {options.limit} must be 0 (all) or more")
    since_s, job = span_of(options.since, "--since"), options.job or options.of_job
    if options.reservation is not None:
        if job is not None or options.user:
            raise InvalidRequest("--reservation: its events are those of one job or user already; leave the others out")
        ids = await reservations_named(cluster, options.reservation)
        found = sorted([one for each in ids for one in await cluster.events(each)], key=lambda one: one.time)
        found = _chosen(found, options.node, since_s)
    elif job is None:
        found = await cluster.find_events(user=options.user, node=options.node, since_s=since_s, limit=options.limit)
    elif options.user:
        raise InvalidRequest("--user: the job is named already; leave one of them out")
    else:
        found = _chosen(await cluster.events(await find_id(cluster, options, job)), options.node, since_s)
    if job is not None or options.reservation is not None:
        found = found[-options.limit :]
    if options.json:
        say_json(found)
    else:
        say(event_lines(found, width(), with_jobs=job is None))
    return 0


async def reservations_named(cluster: Cluster, text: str) -> list[str]:
    """Return the ids of the reservations of this id or name, also of those that are gone, oldest first.

    Raises:
        NoSuchReservation: there are none.
    """
    present = await cluster.list_reservations("*", ended=True)
    gone = await cluster.reservation_history()
    named = {one.reservation_id: one.name for one in gone} | {one.reservation_id: one.name for one in present}
    found = [text] if text in named else [each for each, name in named.items() if name == text]
    if not found:
        message = f"no reservation {text!r} on record; see `fray reservations --all`"
        raise NoSuchReservation(message, reservation_id=text)
    return found


def _chosen(events: Sequence[Event], node: str, since_s: float | None) -> list[Event]:
    began = 0.0 if since_s is None else time.time() - since_s
    name = name_pattern(node)
    return [one for one in events if one.time >= began and (not node or name.search(one.text))]


def event_lines(found: Sequence[Event], max_width: int | None, *, with_jobs: bool) -> list[str]:
    """Return one line per event, and more for texts of several lines or more than ``max_width`` (None: no limit)."""
    what_width = max((len(event.what) for event in found), default=0)
    job_width = max((len(event.job) for event in found), default=0) if with_jobs else 0
    lines = []
    for event in found:
        job = f"{event.job.ljust(job_width)}  " if with_jobs else ""
        at = f"{clock(event.time)}  "
        head = f"{at}{job}{event.what.ljust(what_width)}  "
        indent = len(head) if max_width is None or max_width - len(head) >= TEXT_WIDTH else len(at)
        first, *more = event.text.splitlines() or [""]
        for line in (f"{head}{first}".rstrip(), *(f"{' ' * indent}{line}" for line in more)):
            lines += wrapped(line, max_width, indent)
    return lines
