"""``fray capacity``: the capacity by kind and zone, of this moment or over time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of, table
from fray.cli.output import clock, say, say_json, width
from fray.errors import InvalidRequest
from fray.model.messages.history import CapacitySample
from fray.model.text import byte_size_text

LINES = 24
"""Periods that are shown without ``--every``."""
SHORTEST_S = 60.0
AMOUNTS = ("total", "used", "reserved", "idle", "quarantined", "closed")


async def capacity(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray capacity``.

    Raises:
        InvalidRequest: an invalid option.
    """
    since_s, every_s = span_of(options.since, "--since"), span_of(options.every, "--every")
    if since_s is None:
        if every_s is not None:
            raise InvalidRequest("--every is for means over time: pass --since, too")
        found = await cluster.capacity()
    else:
        period_s = max(SHORTEST_S, since_s / LINES) if every_s is None else every_s
        found = await cluster.capacity_history(since_s=since_s, period_s=period_s)
    found = [each for each in found if _is_chosen(each, options.kind, options.zone)]
    if options.json:
        say_json(found)
    else:
        say(capacity_table(found, width(), with_times=since_s is not None))
    return 0


def _is_chosen(sample: CapacitySample, kind: str, zone: str | None) -> bool:
    return kind in ("", sample.kind, sample.kind.partition(":")[0]) and zone in (None, sample.zone)


def capacity_table(found: Sequence[CapacitySample], max_width: int | None, *, with_times: bool) -> list[str]:
    """Return one line for each kind and zone, of each period if ``with_times``."""
    if not found:
        return ["no capacity was recorded in that time" if with_times else "no machine is connected"]
    heads = [*(["TIME"] if with_times else []), "KIND", "ZONE", *(name.upper() for name in AMOUNTS)]
    rows = [
        [
            *([clock(each.at)] if with_times else []),
            *(each.kind, each.zone),
            *(_text(each.kind, getattr(each, name)) for name in AMOUNTS),
        ]
        for each in found
    ]
    return table(heads, rows, max_width, optional=("CLOSED", "QUARANTINED", "ZONE"))


def _text(kind: str, value: float) -> str:
    return byte_size_text(round(value)) if kind == "memory" else f"{round(value, 2):g}"
