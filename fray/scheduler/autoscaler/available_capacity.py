"""What can be had of each group, and where: the machines of the policy as the law of matching sees them."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.policy.machine_groups import GroupConfig
from fray.scheduler.autoscaler.bin_packing import UnitOffer
from fray.scheduler.state.known_capacity import host_capacity
from fray.scheduler.state.machine_groups import MachineGroupIndex


def unit_offers(books: MachineGroupIndex, config: GroupConfig, now: float) -> Iterator[UnitOffer]:
    """One a zone, in order; where none can be had now it says why."""
    for zone in config.zones_in_order():
        capacity = host_capacity(books, config, zone, "a unit", 0)
        yield UnitOffer(
            config.name, zone, capacity, config.hosts, config.price(zone), zone_closed_text(books, config, zone, now)
        )


def zone_closed_text(books: MachineGroupIndex, config: GroupConfig, zone: str, now: float) -> str:
    """Why nothing is asked of a zone now; empty: it may be."""
    row = books.groups.get(config.name)
    if row is not None and row.stop_reason:
        return f"group {config.name} is stopped until the policy is read again: {row.stop_reason}"
    if config.provider not in books.listed_providers:
        trouble = books.provider_errors.get(config.provider, "")
        return f"provider {config.provider} has not said yet what it has" + (f": {trouble}" if trouble else "")
    resting = row.backoffs.get(zone) if row is not None else None
    if resting is not None and resting.until > now:
        place = f"{config.name} in {zone}" if zone else config.name
        return f"group {place} rests for {resting.until - now:.0f} s after {resting.kind}: {resting.message}"
    return ""
