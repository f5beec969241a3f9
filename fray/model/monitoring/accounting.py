"""Hours that attempts held of the cluster, summed by user, namespace, machine kind or job, and their cost. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from attrs import Factory, define

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import JobId, split_attempt
from fray.model.messages.history import AttemptRecord, AttemptSum
from fray.model.specs import EndReason

GIB = 1024**3
HOUR_S = 3600.0
DAY_S = 86_400.0

KEYS: Mapping[str, Callable[[AttemptRecord], str]] = {
    "user": lambda one: one.user,
    "namespace": lambda one: one.namespace,
    "machine": lambda one: one.machine,
    "node": lambda one: one.node,
    "job": lambda one: one.job_id,
    "cause": lambda one: one.cause or "running",
}
"""Keys by which sums are made."""


@define(kw_only=True)
class Hours:
    """Amounts that were held, multiplied by the hours for which they were."""

    cpu: float = 0.0
    """CPU-hours."""
    memory_gib: float = 0.0
    """GiB-hours."""
    chips: dict[str, float] = Factory(dict)
    """Hours of accelerators, by ``gpu:h100``, ``tpu:v5litepod-16``."""

    @property
    def all_chips(self) -> float:
        return sum(self.chips.values())

    def add(self, one: AttemptRecord, hours: float) -> None:
        """Add what an attempt held for so many hours."""
        self.cpu += one.cpu_milli / 1000 * hours
        self.memory_gib += one.memory_bytes / GIB * hours
        if one.devices:
            kind = f"{one.device_kind}:{one.device_variant}"
            self.chips[kind] = self.chips.get(kind, 0.0) + one.devices * hours


@define(kw_only=True)
class UsageSum:
    """Sum over the attempts of one key."""

    key: str
    name: str = ""
    """Name of the job, in sums by job."""
    jobs: int = 0
    attempts: int = 0
    held: Hours = Factory(Hours)
    retried: Hours = Factory(Hours)
    """Part of ``held`` by attempts that were followed by another one of their job, but for preemption: what they did
    since their last checkpoint was done again."""
    preempted: Hours = Factory(Hours)
    """The same of attempts that were preempted."""
    cpu_idle: float = 0.0
    """CPU-hours that were held and not used, of ended attempts whose use is known (``cpu_known``)."""
    cpu_known: float = 0.0
    """CPU-hours that ended attempts held whose use is known."""
    wait_h: float = 0.0
    """Hours for which jobs waited before these attempts were placed; a gang counts once."""


@frozen(kw_only=True)
class Cost:
    """Cost of the attempts of one key, in the currency of the policy's prices."""

    key: str
    name: str = ""
    cpu: float = 0.0
    memory: float = 0.0
    chips: float = 0.0
    total: float = 0.0
    wasted: float = 0.0
    """Part of the total by attempts that were retried or preempted."""
    unpriced: tuple[str, ...] = ()
    """Resources without a price that were held: ``cpu``, ``memory`` or kinds of accelerators."""


def check_key(by: str, *more: str) -> None:
    """Raise InvalidRequest unless sums can be made by it: a key of `KEYS`, or one of ``more``."""
    if by not in (keys := (*KEYS, *more)):
        raise InvalidRequest(f"by={by!r} is not one of {', '.join(keys)}")


def sums(attempts: Sequence[AttemptRecord], by: str, since: float, until: float) -> list[UsageSum]:
    """Return the sums of what attempts held between two times, by key; the largest use first.

    Args:
        attempts: all attempts that lived since then, so that it is known which were retried.
        by: one of `KEYS`.
        since, until: seconds since the epoch; of attempts that lived longer the part between them counts.

    Raises:
        InvalidRequest: an unknown key.
    """
    check_key(by)
    places = [split_attempt(one.attempt_id) for one in attempts]
    latest: dict[JobId, int] = {}
    for one, (_, generation, _) in zip(attempts, places, strict=True):
        latest[one.job_id] = max(latest.get(one.job_id, 0), generation)
    found: dict[str, UsageSum] = {}
    jobs: dict[str, set[JobId]] = defaultdict(set)
    for one, (_, generation, member) in zip(attempts, places, strict=True):
        end = min(until, until if one.ended_at is None else one.ended_at)
        held_s = end - max(since, one.placed_at)
        if one.placed_at >= until or held_s < 0:
            continue
        key = KEYS[by](one)
        total = found.setdefault(key, UsageSum(key=key, name=one.name if by == "job" else ""))
        jobs[key].add(one.job_id)
        _add(total, one, held_s / HOUR_S, generation < latest[one.job_id])
        if member == 0 and one.placed_at >= since:
            total.wait_h += max(0.0, one.placed_at - one.queued_at) / HOUR_S
    for key, total in found.items():
        total.jobs = len(jobs[key])
    return _largest_first(found)


def join_sums(rows: Sequence[AttemptSum]) -> list[UsageSum]:
    """Return the sums that the controller has made, as those of `sums`."""
    found: dict[str, UsageSum] = {}
    for row in rows:
        total = found.setdefault(row.key, UsageSum(key=row.key, name=row.name, jobs=row.jobs))
        total.attempts += row.attempts
        parts = (
            (total.held, row.cpu, row.memory_gib, row.chips),
            (total.retried, row.retried_cpu, row.retried_memory_gib, row.retried_chips),
            (total.preempted, row.preempted_cpu, row.preempted_memory_gib, row.preempted_chips),
        )
        for hours, cpu, memory_gib, chips in parts:
            hours.cpu += cpu
            hours.memory_gib += memory_gib
            if row.device and (chips or hours is total.held):
                hours.chips[row.device] = chips
        total.cpu_idle += row.cpu_idle
        total.cpu_known += row.cpu_known
        total.wait_h += row.wait_h
    return _largest_first(found)


def _largest_first(found: Mapping[str, UsageSum]) -> list[UsageSum]:
    return sorted(found.values(), key=lambda each: (-each.held.all_chips, -each.held.cpu, each.key))


def _add(total: UsageSum, one: AttemptRecord, hours: float, was_followed: bool) -> None:
    total.attempts += 1
    total.held.add(one, hours)
    if was_followed:
        (total.preempted if one.cause == EndReason.PREEMPTED.value else total.retried).add(one, hours)
    whole_s = 0.0 if one.ended_at is None else one.ended_at - one.placed_at
    if one.cpu_s and whole_s > 0:
        # Of an attempt that lived longer than the time in question, its average use.
        used_h = one.cpu_s / HOUR_S * (hours * HOUR_S / whole_s)
        total.cpu_known += one.cpu_milli / 1000 * hours
        total.cpu_idle += max(0.0, one.cpu_milli / 1000 * hours - used_h)


def cost(total: UsageSum, prices: Mapping[str, float]) -> Cost:
    """Return the cost of a sum.

    Args:
        prices: for an hour of ``cpu`` (a CPU), ``memory`` (a GiB), ``gpu``, ``tpu`` (a chip) or one variant of it,
            ``gpu:h100``, which precedes that of its kind.
    """
    parts = {"cpu": total.held.cpu, "memory": total.held.memory_gib, **total.held.chips}
    cpu, memory, chips = _costs(total.held, prices)
    return Cost(
        key=total.key,
        name=total.name,
        cpu=cpu,
        memory=memory,
        chips=chips,
        total=cpu + memory + chips,
        wasted=sum(_costs(total.retried, prices)) + sum(_costs(total.preempted, prices)),
        unpriced=tuple(sorted(what for what, hours in parts.items() if hours and price_of(what, prices) is None)),
    )


def price_of(what: str, prices: Mapping[str, float]) -> float | None:
    """Return the price of an hour of ``cpu``, ``memory`` or a kind of accelerators; None: it has none."""
    return prices.get(what, prices.get(what.partition(":")[0]))


def _costs(hours: Hours, prices: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the costs of CPUs, memory and chips."""
    chips = sum(amount * (price_of(kind, prices) or 0.0) for kind, amount in hours.chips.items())
    return hours.cpu * prices.get("cpu", 0.0), hours.memory_gib * prices.get("memory", 0.0), chips
