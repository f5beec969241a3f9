"""Records of attempts, machines and reservations for the history, made from their rows."""

from __future__ import annotations

from fray.model.messages.history import AttemptRecord, NodeRecord, RecordedReservation
from fray.model.resources import Capacity
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.rows import AttemptRow, Node
from fray.scheduler.state.state import State


def attempt_record(state: State, attempt: AttemptRow) -> AttemptRecord:
    """Return the record of an attempt, living or ended, whose share of its machine is not released yet."""
    job, outcome, ended_at = state.jobs[attempt.job_id], attempt.outcome, attempt.ended_at
    spec, share, node = job.spec, state.share_of(attempt), state.nodes.get(attempt.node)
    has_devices = bool(attempt.devices) and node is not None
    return AttemptRecord(
        attempt_id=attempt.attempt_id,
        job_id=attempt.job_id,
        name=spec.name,
        user=spec.user,
        namespace=spec.namespace,
        band=job.band.value,
        node=attempt.node,
        machine=machine_kind(node.capacity) if node is not None else "",
        cpu_milli=share.cpu_milli,
        memory_bytes=share.memory_bytes,
        device_kind=(share.device_kind or "") if has_devices else "",
        device_variant=state.variant_of(attempt.node, attempt.devices) if has_devices else "",
        devices=len(attempt.devices),
        queued_at=job.queued_at,
        placed_at=attempt.placed_at,
        started_at=attempt.started_at,
        ended_at=ended_at,
        cause=outcome.cause.value if outcome is not None else "",
        exit_code=outcome.exit_code if outcome is not None else None,
        cpu_s=outcome.cpu_s if outcome is not None else 0.0,
        peak_memory_bytes=outcome.peak_memory_bytes if outcome is not None else 0,
        recorded_at=0.0 if ended_at is None else state.now,
    )


def machine_kind(capacity: Capacity) -> str:
    """Return the variant of a machine's accelerators; ``cpu`` if it has none."""
    return capacity.devices[0].variant if capacity.devices else "cpu"


def node_record(node: Node, gone_at: float, reason: str) -> NodeRecord:
    """Return the record of a machine that is gone."""
    return NodeRecord(
        node=node.name,
        incarnation=node.incarnation,
        kind=machine_kind(node.capacity),
        cpu_milli=node.capacity.cpu_milli,
        memory_bytes=node.capacity.memory_bytes,
        devices=len(node.capacity.devices),
        attributes=dict(node.capacity.attributes),
        joined_at=node.joined_at,
        gone_at=gone_at,
        reason=reason,
    )


def reservation_record(row: ReservationRow) -> RecordedReservation:
    """Return the record of a reservation, living or ended."""
    spec, has_ended = row.spec, row.ended_at is not None
    demand = spec.demand
    return RecordedReservation(
        reservation_id=row.id,
        name=spec.name,
        namespace=spec.namespace,
        user=spec.user,
        owner=row.owner,
        created_by=row.created_by,
        band=row.band.value,
        priority=spec.priority,
        cpu_milli=demand.cpu_milli,
        memory_bytes=demand.memory_bytes,
        device_kind=demand.device_kind or "",
        device_variant=demand.device_variant if demand.device_count else "",
        devices=demand.device_count,
        hosts=spec.hosts,
        min_units=spec.min_units,
        max_units=spec.max_units,
        units_given=row.last_unit,
        nodes=row.held_nodes,
        created_at=row.created_at,
        held_at=row.held_at,
        ended_at=row.ended_at,
        reason=row.reason if has_ended else "",
        ended_by=row.ended_by if has_ended else "",
    )
