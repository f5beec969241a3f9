"""Verbs that list, show, renew and release reservations."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fray.api.cluster import Cluster
from fray.cli.formatting import (
    fields,
    parse_span,
    span,
    table,
)
from fray.cli.output import (
    clock,
    note,
    say,
    say_json,
    width,
)
from fray.cli.target import namespace_of
from fray.errors import InvalidRequest, NoSuchReservation
from fray.model.messages.history import RecordedReservation
from fray.model.reservations import ReservationInfo, ReservationState
from fray.model.text import byte_size_text, list_text

NODES_SHOWN = 3


async def reservations(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray reservations``."""
    namespace = namespace_of(options)
    found = await cluster.list_reservations(namespace, ended=options.ended)
    if options.all:
        return await _with_gone(cluster, found, options)
    if options.json:
        say_json(found)
    else:
        say(reservation_table(found, time.time(), width()))
    return 0


async def _with_gone(cluster: Cluster, found: Sequence[ReservationInfo], options: argparse.Namespace) -> int:
    """Print those that live and, below them, all that are gone."""
    living = [info for info in found if info.state is not ReservationState.ENDED]
    namespace = namespace_of(options)
    gone = await _gone(cluster, namespace)
    if options.json:
        say_json({"reservations": living, "gone": gone})
        return 0
    lines = reservation_table(living, time.time(), width()) if living or not gone else []
    say([*lines, *([""] if lines and gone else []), *(gone_table(gone, width()) if gone else [])])
    return 0


async def _gone(cluster: Cluster, namespace: str | None) -> list[RecordedReservation]:
    """Return the reservations of a namespace that have ended; None or ``"*"``: of all."""
    return [
        one
        for one in await cluster.reservation_history()
        if one.ended_at is not None and namespace in (None, "*", one.namespace)
    ]


def gone_table(found: Sequence[RecordedReservation], max_width: int | None) -> list[str]:
    """Return one line for each reservation that is gone."""
    heads = ["GONE", "USER", "UNITS", "MACHINES", "REQUESTED", "HELD AFTER", "ENDED", "ENDED BY", "REASON"]
    rows = [
        [
            *(one.reservation_id, one.user),
            _range_text(one.min_units, one.max_units),
            list_text(one.nodes, NODES_SHOWN),
            clock(one.created_at),
            "never" if one.held_at is None else span(one.held_at - one.created_at),
            *(clock(one.ended_at), one.ended_by, one.reason),
        ]
        for one in found
    ]
    optional = ("ENDED BY", "MACHINES", "HELD AFTER", "REQUESTED", "USER", "REASON")
    return table(heads, rows, max_width, optional=optional)


async def find_reservation(cluster: Cluster, text: str, options: argparse.Namespace) -> ReservationInfo:
    """Return the reservation of this id, else the only living one of this name.

    Raises:
        NoSuchReservation: none.
        InvalidRequest: several have that name.
    """
    named = [info for info in await cluster.list_reservations(namespace_of(options)) if info.name == text]
    if len(named) > 1:
        ids = ", ".join(info.reservation_id for info in named)
        raise InvalidRequest(f"{text!r} is the name of {len(named)} reservations; use an id: {ids}")
    return named[0] if named else await cluster.get_reservation(text)


def reservation_table(found: Sequence[ReservationInfo], now: float, max_width: int | None) -> list[str]:
    """Return one line per reservation."""
    heads = ["ID", "STATE", "UNITS", "JOBS", "PRIORITY", "EXPIRES IN", "USER", "REASON"]
    rows = [
        [
            info.reservation_id,
            info.state.value,
            f"{info.held_units} of {units_text(info)}",
            str(len(info.jobs)),
            f"{info.band.value} {info.priority}",
            "" if info.state.finished else span(info.expires_at - now),
            info.user,
            info.reason,
        ]
        for info in found
    ]
    return table(heads, rows, max_width, optional=("PRIORITY", "USER", "JOBS", "EXPIRES IN", "REASON"))


def units_text(info: ReservationInfo) -> str:
    """Return its number of units: ``4``, or ``2..4``."""
    return _range_text(info.min_units, info.max_units)


def _range_text(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least}..{most}"


async def show(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray reservation show``."""
    info: ReservationInfo | RecordedReservation
    try:
        info = await find_reservation(cluster, options.reservation, options)
    except NoSuchReservation as error:
        info = await _find_gone(cluster, options, error)
    if options.json:
        say_json(info)
    elif isinstance(info, RecordedReservation):
        say(described_gone(info, width()))
    else:
        say(described(info, time.time(), width()))
    return 0


async def _find_gone(cluster: Cluster, options: argparse.Namespace, error: NoSuchReservation) -> RecordedReservation:
    """Return the reservation of this id that is gone, else the last one of this name.

    Raises:
        NoSuchReservation: none; it is ``error``.
    """
    text, gone = options.reservation, await _gone(cluster, namespace_of(options))
    found = [one for one in gone if one.reservation_id == text] or [one for one in gone if one.name == text]
    if not found:
        raise error
    return max(found, key=lambda one: one.ended_at or 0.0)


def described_gone(one: RecordedReservation, max_width: int | None) -> list[str]:
    """Return all details of a reservation that is gone."""
    devices = f", {one.devices} {one.device_variant or one.device_kind}" if one.devices else ""
    hosts = f", {one.hosts} hosts" if one.hosts > 1 else ""
    unit = f"each {one.cpu_milli / 1000:g} CPUs and {byte_size_text(one.memory_bytes)} of memory{devices}{hosts}"
    return fields(
        [
            ("reservation", one.reservation_id),
            ("state", "gone"),
            ("reason", one.reason),
            ("ended by", one.ended_by),
            ("units", f"{one.units_given} given in all of {_range_text(one.min_units, one.max_units)}, {unit}"),
            ("machines", ", ".join(one.nodes)),
            ("priority", f"{one.band}, {one.priority}"),
            ("requested", clock(one.created_at)),
            ("held", "never" if one.held_at is None else clock(one.held_at)),
            ("ended", clock(one.ended_at)),
            ("namespace", one.namespace),
            ("owner", one.owner or "the cluster (detached)"),
            ("user", one.user),
        ],
        max_width,
    )


def described(info: ReservationInfo, now: float, max_width: int | None) -> list[str]:
    """Return all details of a reservation."""
    unit = info.allocated_resources
    device = f"{unit.device.variant} " if unit.device.kind != "cpu" else ""
    hosts = f", {info.hosts} hosts" if info.hosts > 1 else ""
    lines = fields(
        [
            ("reservation", info.reservation_id),
            ("state", info.state.value),
            ("reason", info.reason),
            ("units", f"{info.held_units} of {units_text(info)}, each {device}{unit.cpu:g} CPUs{hosts}"),
            ("priority", f"{info.band.value}, {info.priority}; {'' if info.preemptible else 'not '}preemptible"),
            ("expires", "" if info.state.finished else f"in {span(info.expires_at - now)}, {clock(info.expires_at)}"),
            ("notice", f"{info.notice_s:g} s"),
            ("namespace", info.namespace),
            ("owner", info.owner or "the cluster (detached)"),
            ("user", info.user),
            ("jobs", "\n".join(info.jobs)),
        ],
        max_width,
    )
    if info.units:
        rows = [[str(u.number), ", ".join(u.nodes), ", ".join(u.devices), "leaving" * u.leaving] for u in info.units]
        lines += ["", *table(["UNIT", "NODE", "DEVICES", ""], rows, max_width, optional=("", "DEVICES"))]
    if info.events:
        rows = [[clock(c.time), c.kind.value, str(c.unit or ""), ", ".join(c.nodes), c.text] for c in info.events]
        heads = ["TIME", "EVENT", "UNIT", "NODE", "REASON"]
        lines += ["", *table(heads, rows, max_width, optional=("UNIT", "NODE"))]
    return lines


async def release(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray reservation release``."""
    chosen = [(await find_reservation(cluster, name, options)).reservation_id for name in options.reservations]
    for reservation_id in chosen:
        await cluster.release_reservation(reservation_id, options.reason)
    if options.json:
        say_json([await cluster.get_reservation(reservation_id) for reservation_id in chosen])
    else:
        note(f"released {', '.join(chosen)}: what runs there is being stopped")
    return 0


async def renew(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray reservation renew``."""
    try:
        ttl_s = None if options.ttl is None else parse_span(options.ttl)
    except ValueError:
        raise InvalidRequest(f"--ttl {options.ttl!r} is not a valid duration; examples: 3600, 90m, 12h") from None
    chosen = await find_reservation(cluster, options.reservation, options)
    info = await cluster.renew_reservation(chosen.reservation_id, ttl_s)
    if options.json:
        say_json(info)
    else:
        say([f"{info.reservation_id} expires in {span(info.expires_at - time.time())}"])
    return 0
