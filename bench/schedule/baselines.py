"""Baselines for the scheduler: a naive first-fit, and an upper bound.

`first_fit` keeps one queue in the order of arrival and tries all of it on all machines, in their order, whenever
something changes; a gang starts when all its members fit. `fluid` forgets machines, gangs, memory and devices: work
flows as fast as the CPUs of the whole fleet allow, so its utilisation by a given time is an upper bound.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from attrs import define, field

from bench.schedule.loads import CPUS, Work, machine


@define
class Ran:
    """Result of a load."""

    used: list[tuple[float, int]] = field(factory=list)
    waited_s: dict[str, float] = field(factory=dict)

    def utilisation(self, machines: int, until: float) -> float:
        """Return the part of all CPU time in use from 0 to ``until``."""
        pairs = itertools.pairwise([*self.used, (until, 0)])
        area = sum(milli * (min(end, until) - min(since, until)) for (since, milli), (end, _) in pairs)
        return area / (machines * CPUS * 1000 * until)


def first_fit(works: Sequence[Work], machines: int) -> Ran:
    """Run a load with the naive scheduler."""
    fleet = [machine(index) for index in range(machines)]
    free = [[one.cpu_milli, one.memory_bytes, len(one.devices)] for one in fleet]
    zones = [one.attributes["zone"] for one in fleet]
    ran, queue, ends, busy = Ran(), [], [], 0
    numbers = itertools.count()
    arrivals = iter([*works, None])
    coming = next(arrivals)
    refused: dict[object, None] = {}
    while coming is not None or ends:
        now = min(coming.arrives_s if coming else float("inf"), ends[0][0] if ends else float("inf"))
        while coming is not None and coming.arrives_s <= now:
            queue.append(coming)
            coming = next(arrivals)
        while ends and ends[0][0] <= now:
            _, _, work, places = heapq.heappop(ends)
            busy -= len(places) * work.spec.demand.cpu_milli
            _shift(free, places, work, +1)
        refused.clear()
        left = []
        for work in queue:
            kind = (work.spec.demand, work.spec.members)
            places = None if kind in refused else _first(free, zones, work)
            if places is None:
                refused[kind] = None
                left.append(work)
                continue
            busy += len(places) * work.spec.demand.cpu_milli
            ran.waited_s[work.spec.job_id] = now - work.arrives_s
            heapq.heappush(ends, (now + work.runs_s, next(numbers), work, places))
        queue = left
        ran.used.append((now, busy))
        assert ends or coming is not None or not queue, "work that never fits"
    return ran


def _first(free: list[list[int]], zones: list[str], work: Work) -> list[int] | None:
    places: list[int] = []
    demand = work.spec.demand
    for index, (cpu, memory, gpus) in enumerate(free):
        if demand.zones and zones[index] not in demand.zones:
            continue
        room = cpu // demand.cpu_milli
        if demand.memory_bytes:
            room = min(room, memory // demand.memory_bytes)
        if demand.device_count:
            room = min(room, gpus // demand.device_count)
        places += [index] * min(room, work.spec.members - len(places))
        if len(places) == work.spec.members:
            _shift(free, places, work, -1)
            return places
    return None


def _shift(free: list[list[int]], places: list[int], work: Work, sign: int) -> None:
    demand = work.spec.demand
    for index in places:
        free[index][0] += sign * demand.cpu_milli
        free[index][1] += sign * demand.memory_bytes
        free[index][2] += sign * demand.device_count


def fluid(works: Sequence[Work], machines: int, until: float) -> float:
    """Return an upper bound of the utilisation: work starts no earlier than it arrives, on all CPUs at once."""
    capacity = machines * CPUS
    done = backlog = 0.0
    now = 0.0
    for work in [*works, None]:
        at = until if work is None else min(work.arrives_s, until)
        flows = min(backlog, (at - now) * capacity)
        done, backlog, now = done + flows, backlog - flows, at
        if work is not None and work.arrives_s < until:
            backlog += work.cpu_s
    return done / (capacity * until) if until else 0.0
