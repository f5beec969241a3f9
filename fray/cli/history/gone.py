"""Machines that are gone: ``fray nodes --all``, and ``fray node show`` of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import amount, fields, span, table
from fray.cli.output import clock
from fray.model.messages.client import NodeInfo
from fray.model.messages.history import AttemptRecord, NodeRecord
from fray.model.text import byte_size_text, plural

SHOWN = 50
"""Attempts of one machine that are shown; ``--json`` has all."""


async def gone_nodes(cluster: Cluster, present: Sequence[NodeInfo]) -> list[NodeRecord]:
    """Return machines that are gone and have not come back under their names, the oldest end first."""
    there = {node.name for node in present}
    latest = {record.node: record for record in await cluster.gone_nodes() if record.node not in there}
    return sorted(latest.values(), key=lambda record: (record.gone_at, record.node))


def gone_table(found: Sequence[NodeRecord], max_width: int | None) -> list[str]:
    """Return one line per machine."""
    heads = ["NAME", "GONE SINCE", "WAS THERE", "KIND", "CPUS", "MEMORY", "REASON"]
    rows = [
        [
            record.node,
            clock(record.gone_at),
            span(record.gone_at - record.joined_at) if record.joined_at else "",
            kind_text(record),
            amount(record.cpu_milli / 1000),
            byte_size_text(record.memory_bytes),
            record.reason,
        ]
        for record in found
    ]
    return table(heads, rows, max_width, optional=("MEMORY", "CPUS", "KIND", "WAS THERE", "REASON"))


def kind_text(record: NodeRecord) -> str:
    return f"{record.devices} × {record.kind}" if record.devices else record.kind


def described_gone(record: NodeRecord, ran: Sequence[AttemptRecord], max_width: int | None) -> list[str]:
    """Return all that is known of a machine that is gone, and what ran there."""
    lines = fields(
        [
            ("node", record.node),
            ("state", f"gone since {clock(record.gone_at)}"),
            ("reason", record.reason),
            ("joined", clock(record.joined_at or None)),
            ("CPUs", amount(record.cpu_milli / 1000)),
            ("memory", byte_size_text(record.memory_bytes)),
            ("devices", kind_text(record) if record.devices else ""),
            ("attributes", ", ".join(f"{key}={value}" for key, value in sorted(record.attributes.items()))),
        ],
        max_width,
    )
    if not ran:
        return [*lines, "", "nothing ran there"]
    more = f"; the last {SHOWN} of {plural(len(ran), 'attempt')}" if len(ran) > SHOWN else ""
    rows = [
        [one.name, one.attempt_id, one.user, clock(one.placed_at), _held_text(one), one.cause] for one in ran[-SHOWN:]
    ]
    heads = ["JOB", "ATTEMPT", "USER", "PLACED", "TIME", "CAUSE"]
    return [*lines, "", f"ran there{more}:", *table(heads, rows, max_width, optional=("USER", "JOB", "PLACED", "TIME"))]


def _held_text(one: AttemptRecord) -> str:
    return "" if one.ended_at is None else span(one.ended_at - one.placed_at)
