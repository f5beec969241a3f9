"""Metrics of a cluster at one moment, in the text format of Prometheus.

The one module that imports prometheus_client. Names and labels are part of the interface (docs/monitoring.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from fray.model.messages.client import NodeInfo
from fray.model.messages.machine_groups import GroupInfo
from fray.model.messages.usage import ClusterCounts, LoopDelay, TenantUsage, UsageInfo
from fray.model.reservations import ReservationState
from fray.model.specs import EndReason

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
USERS_LIMIT = 50
"""Users with a line of their own: the number of time series must have a bound. The others are at ``user=""``."""
NAMESPACES_LIMIT = 50
"""The same for namespaces."""
JOB_STATES = ("pending", "running")
RESERVATION_STATES = tuple(state.value for state in ReservationState if state is not ReservationState.ENDED)
MACHINE_STATES = ("ready", "cordoned", "draining", "drained", "leaving", "quarantined", "lost")
GROUP_STATES = ("wanted", "requested", "seen", "joined", "leaving")


@frozen
class ClusterNumbers:
    """State of a cluster at one moment, as clients get it."""

    usage: UsageInfo
    nodes: Sequence[NodeInfo]
    groups: Sequence[GroupInfo]
    counts: ClusterCounts | None = None
    """None: the controller is of an earlier release."""


def exposition(found: ClusterNumbers | None) -> bytes:
    """Return the metrics; None: the controller does not answer, and only ``fray_up`` is there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(found))
    return generate_latest(registry)


@frozen(eq=False)  # the registry hashes it
class _Collector:
    found: ClusterNumbers | None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("fray_up", "1 if the controller answers, else 0.", value=float(self.found is not None))
        if self.found is None:
            return
        yield from _resources(self.found.usage)
        yield from _users(self.found.usage.users)
        yield from _machines(self.found.nodes)
        yield from _groups(self.found.groups)
        yield from _loop_delay(self.found.usage.loop_delay)
        if self.found.counts is not None:
            yield from _counts(self.found.counts)


def _resources(usage: UsageInfo) -> Iterator[Metric]:
    units = "of the machines that are connected: CPUs, bytes of memory, or accelerators."
    for name, text, values in (
        ("fray_resource_capacity", f"Resources {units}", usage.capacity),
        ("fray_resource_used", f"Allocated resources {units}", usage.used),
    ):
        family = GaugeMetricFamily(name, text, labels=("resource",))
        # What is not in use is left out of the message; a series that disappears looks like a lost scrape.
        for resource in usage.capacity:
            family.add_metric((resource,), values.get(resource, 0.0))
        yield family


def _users(users: Sequence[TenantUsage]) -> Iterator[Metric]:
    ordered = sorted(users, key=lambda user: (-user.share, -user.waiting, user.user))
    named, others = ordered[:USERS_LIMIT], ordered[USERS_LIMIT:]
    share = GaugeMetricFamily(
        "fray_user_share",
        "Dominant share of the user: the largest of its fractions of the resources.",
        labels=("user",),
    )
    waiting = GaugeMetricFamily("fray_user_waiting", "Entries of the user in the queue.", labels=("user",))
    for user in named:
        share.add_metric((user.user,), user.share)
        waiting.add_metric((user.user,), user.waiting)
    if others:
        share.add_metric(("",), sum(user.share for user in others))
        waiting.add_metric(("",), sum(user.waiting for user in others))
    queued = sum(user.waiting for user in users)
    yield GaugeMetricFamily("fray_queue_entries", "Jobs, groups and reservations that wait for machines.", value=queued)
    yield share
    yield waiting


def _machines(nodes: Sequence[NodeInfo]) -> Iterator[Metric]:
    states = Counter("lost" if not node.alive else node.standing or "ready" for node in nodes)
    machines = GaugeMetricFamily("fray_machines", "Machines by state.", labels=("state",))
    for state in (*MACHINE_STATES, *sorted(states.keys() - set(MACHINE_STATES))):
        machines.add_metric((state,), states[state])
    yield machines
    living = [node for node in nodes if node.alive]
    held, busy = sum(len(node.granted) for node in living), sum(len(node.busy) for node in living)
    accelerators = GaugeMetricFamily(
        "fray_accelerators",
        "Accelerators of connected machines: allocated to a job, busy with a process that is not of Fray, or free.",
        labels=("state",),
    )
    accelerators.add_metric(("allocated",), held)
    accelerators.add_metric(("busy",), busy)
    accelerators.add_metric(("free",), sum(len(node.devices) for node in living) - held - busy)
    yield accelerators
    attempts = sum(node.attempts for node in living)
    yield GaugeMetricFamily("fray_attempts", "Members of jobs that are placed on machines.", value=attempts)


def _groups(groups: Sequence[GroupInfo]) -> Iterator[Metric]:
    units = GaugeMetricFamily(
        "fray_machine_group_units", "Units of a machine group by phase.", labels=("group", "state")
    )
    cost = GaugeMetricFamily(
        "fray_machine_group_cost_per_hour",
        "Cost of all units that may exist, by the policy's prices.",
        labels=("group",),
    )
    backoff = GaugeMetricFamily(
        "fray_machine_group_backoffs", "Zones in which nothing is requested for now.", labels=("group",)
    )
    for group in groups:
        counts = (group.wanted, group.asked, group.seen, group.joined, group.leaving)
        for state, count in zip(GROUP_STATES, counts, strict=True):
            units.add_metric((group.name, state), count)
        cost.add_metric((group.name,), group.cost_per_hour)
        backoff.add_metric((group.name,), len(group.backoffs))
    yield from (units, cost, backoff)


def _loop_delay(delay: LoopDelay) -> Iterator[Metric]:
    if not delay.counts:
        return
    buckets = _buckets(delay.bounds_s, delay.counts)
    text = "Passes of the controller's event loop by length; a message waits at most for the end of one."
    # Without a sum, which the controller does not measure.
    yield HistogramMetricFamily("fray_controller_loop_pass_seconds", text, buckets=buckets)
    yield GaugeMetricFamily(
        "fray_controller_loop_pass_longest_seconds", "Longest pass since the controller's start.", value=delay.longest_s
    )


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return buckets as Prometheus has them: each with all that are below it."""
    return list(zip((*map(str, bounds), "+Inf"), map(float, accumulate(counts)), strict=True))


def _counts(counts: ClusterCounts) -> Iterator[Metric]:
    text = "Living jobs by state and"
    yield _jobs("fray_jobs", f"{text} user.", "user", counts.users, USERS_LIMIT)
    yield _jobs("fray_namespace_jobs", f"{text} namespace.", "namespace", counts.namespaces, NAMESPACES_LIMIT)
    for name, what, ended in (
        ("fray_jobs_ended", "Jobs", counts.ended_jobs),
        ("fray_attempts_ended", "Attempts", counts.ended_attempts),
    ):
        text = f"{what} that have ended since the controller's start, by cause."
        family = CounterMetricFamily(name, text, labels=("cause",))
        # All causes from the start: a series that appears with its first failure has no rate.
        for cause in sorted({*EndReason, *ended}):
            family.add_metric((cause,), ended.get(cause, 0))
        yield family
    yield HistogramMetricFamily(
        "fray_job_wait_seconds",
        "Placements of jobs since the controller's start, by the time for which the job had waited for machines.",
        buckets=_buckets(counts.wait_bounds_s, counts.wait_counts),
        sum_value=counts.waited_s,
    )
    yield GaugeMetricFamily(
        "fray_queue_longest_wait_seconds",
        "Time for which the oldest entry of the queue has waited.",
        value=counts.longest_wait_s,
    )
    reservations = GaugeMetricFamily("fray_reservations", "Reservations that have not ended.", labels=("state",))
    for state in RESERVATION_STATES:
        reservations.add_metric((state,), counts.reservations.get(state, 0))
    yield reservations
    units = GaugeMetricFamily(
        "fray_reservation_units", "Units of reservations: their minimum, and what they hold.", labels=("state",)
    )
    for state, number in counts.reserved_units.items():
        units.add_metric((state,), number)
    yield units


def _jobs(name: str, text: str, label: str, found: Mapping[str, Mapping[str, int]], limit: int) -> Metric:
    """Return the numbers of the ``limit`` keys with the most jobs, and those of all others under an empty one."""
    family = GaugeMetricFamily(name, text, labels=(label, "state"))
    ordered = sorted(found, key=lambda key: (key == "", -sum(found[key].values()), key))
    others: Counter[str] = Counter()
    for key in ordered[limit:]:
        others.update(found[key])
    shown = [(key, found[key]) for key in ordered[:limit]]
    for key, numbers in [*shown, *([("", others)] if others else [])]:
        for state in JOB_STATES:
            family.add_metric((key, state), numbers.get(state, 0))
    return family
