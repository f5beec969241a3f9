"""Choice of victims: the cheapest whole jobs whose end makes room.

Jobs of later bands are chosen first, whatever is lost with them; then the least work (time since the last checkpoint,
times size); then the fewest jobs. A job ends whole, wherever its members are, and all it owns ends with it. The search
is by site: a machine, or all hosts of a TPU slice. For each candidate site the cheapest jobs are found whose end makes
room for one member (one slice) more; the cheapest sites are taken until there is room for all; then every victim that
is not necessary is dropped, the dearest first.

The cost is never in an earlier band than necessary. Within a band it may exceed the least possible cost, by a factor of
at most the number of victims times the number of members; `tests/scheduler/test_victims.py` compares it with an
exhaustive search.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import TypeAlias

from attrs import Factory, define, frozen

from fray.model.ids import JobId, NodeName, attempt_id
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import MemberGroup, Placement, PlacementRequest
from fray.scheduler.preemption.candidates import CandidateMachines, SearchMemory, SearchPaused, SearchProgress
from fray.scheduler.preemption.cost import (
    NO_COST,
    Cost,
    PreemptionUnit,
    ancestors,
    descendants,
    total_cost,
    unit_of,
)
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

MIN_SITES, SITES_FACTOR = 24, 2
"""Sites examined first (or twice as many as necessary), of the cheapest jobs; and the factor of later rounds."""
JOBS_BEFORE_MACHINES, FEW_MACHINES = 200, 64
"""Number of jobs after which, if there are few candidate machines, jobs are sought on these."""
CHOICE_WORK = 20
"""Jobs that can be examined in the time in which one member's victims are chosen among the sites."""
MAX_SPARED = 64
"""Maximum number of victims that are tentatively dropped for a request of several parts."""
Eligible: TypeAlias = Callable[[JobRow], bool]


@frozen
class PreemptionChoice:
    """Jobs whose end makes room.

    Attributes:
        placed: places of the applicant after that.
    """

    units: tuple[PreemptionUnit, ...]
    placed: tuple[Placement, ...]

    @property
    def victims(self) -> tuple[JobId, ...]:
        """Jobs that are ended, without what they own."""
        return tuple(job.job_id for unit in self.units for job in unit.roots)

    @property
    def cost(self) -> Cost:
        return total_cost(self.units)


def choose_victims(
    trial: HypotheticalPool,
    request: PlacementRequest,
    eligible: Eligible,
    bands: Sequence[Band],
    since: float,
    closed: Container[NodeName] = (),
    memory: SearchMemory | None = None,
) -> PreemptionChoice | None:
    """Return the cheapest whole jobs whose end makes the request fit; None if there are none.

    Args:
        trial: pool with all that ends anyway ended; it is left so.
        eligible: test for jobs that may be ended.
        bands: bands to search, the latest first.
        since: exempts jobs that were placed later.
        closed: machines that may not be used.
        memory: what was found in earlier steps, and the budget of this one; None for a search without a limit.

    Raises:
        SearchPaused: the budget is spent.
    """
    memory = memory or SearchMemory()
    search = _VictimSearch(trial, eligible, bands, since, memory)
    found = [
        units
        # Room in two regions does not add up where the request has to be in one: each of them is searched by itself.
        for number, shut in enumerate(_closed_by_locality(trial.pool, request, closed))
        if (units := search.search_request(request, shut, number)) is not None
    ]
    # The search compares plain numbers, machine by machine. The cheapest choice that the pool itself confirms is taken.
    for units in sorted(found, key=total_cost):
        fresh = search.renew(units)
        if fresh is None:
            memory.forget()
            raise SearchPaused
        choice = search.verify_choice(request, fresh, closed)
        if choice is not None:
            return choice
    if len(request.parts) > 1:  # parts compete for machines
        return search.verify_choice(request, search.one_by_one(request, closed), closed)
    return None


def _closed_by_locality(
    pool: MachinePool, request: PlacementRequest, closed: Container[NodeName]
) -> Iterator[Container[NodeName]]:
    """Yield the closed machines, once for each region or zone in which the whole request may fit."""
    if not request.same:
        yield closed
        return
    for realm in filter(None, pool.localities(request.same)):
        elsewhere = (name for name, one in pool.machines.items() if one.capacity.attributes.get(request.same) != realm)
        yield {*elsewhere, *(name for name in pool.machines if name in closed)}


@define(eq=False)
class _VictimSearch:
    """One search in one trial."""

    trial: HypotheticalPool
    eligible: Eligible
    bands: Sequence[Band]
    since: float
    memory: SearchMemory
    _units: dict[str, PreemptionUnit | None] = Factory(dict)
    """Jobs that end together, by key."""

    @property
    def state(self) -> Tables:
        return self.trial.state

    @property
    def pool(self) -> MachinePool:
        return self.trial.pool

    # The whole request

    def search_request(
        self, request: PlacementRequest, closed: Container[NodeName], number: int
    ) -> tuple[PreemptionUnit, ...] | None:
        """Search part by part, with the parts before it placed; with a number for each set of closed machines."""
        mark = self.trial.mark
        found: dict[str, PreemptionUnit] = {}
        try:
            for place, part in enumerate(request.parts):
                units = self._search_part(part, closed, (number, place))
                if units is None:
                    return None
                # Parts compete for the same machines: each is placed before the next one is searched.
                found |= {unit.key: unit for unit in units}
                if len(request.parts) == 1:
                    continue
                self.trial.end(job for unit in units for job in unit.jobs)
                if self.trial.place(PlacementRequest((part,)), closed) is None:
                    return None
        finally:
            # The trial belongs to the caller, who may search again in it.
            self.trial.undo_to(mark)
        return tuple(found.values())

    def one_by_one(self, request: PlacementRequest, closed: Container[NodeName]) -> list[PreemptionUnit]:
        """Return the cheapest jobs, until the whole request fits or there are too many."""
        mark, found = self.trial.mark, dict[str, PreemptionUnit]()
        for job in self._jobs_in_order():
            unit = self._unit_of(job)
            if unit is not None and unit.key not in found:
                found[unit.key] = unit
                self.trial.end(unit.jobs)
                # Each of them is tried for being dropped later, at the cost of a placement.
                if len(found) >= MAX_SPARED or self.trial.fits(request, closed):
                    break
        self.trial.undo_to(mark)
        return list(found.values())

    def verify_choice(
        self, request: PlacementRequest, units: Sequence[PreemptionUnit], closed: Container[NodeName]
    ) -> PreemptionChoice | None:
        """Check the choice with the pool itself, and drop victims that are not necessary."""
        mark = self.trial.mark
        chosen = list(units)
        # Of a single part `_cheapest` has dropped the unnecessary victims already.
        if len(request.parts) > 1 or request.same:
            for unit in sorted(units, key=lambda unit: unit.order, reverse=True)[:MAX_SPARED]:
                self.trial.end(job for other in chosen if other is not unit for job in other.jobs)
                if self.trial.fits(request, closed):
                    chosen.remove(unit)
                self.trial.undo_to(mark)
        self.trial.end(job for unit in chosen for job in unit.jobs)
        placed = self.trial.place(request, closed)
        self.trial.undo_to(mark)
        return PreemptionChoice(tuple(chosen), placed) if placed is not None else None

    def renew(self, units: Sequence[PreemptionUnit]) -> list[PreemptionUnit] | None:
        """Return these jobs as they are now, some of which were found in an earlier step; None if one may not be ended
        any more."""
        fresh = [self._unit_of(unit.roots[0]) for unit in units]
        return None if None in fresh else [unit for unit in fresh if unit is not None]

    def _search_part(
        self, part: MemberGroup, closed: Container[NodeName], place: tuple[int, int]
    ) -> list[PreemptionUnit] | None:
        found = [
            self._search_demand(demand, part, closed, self.memory.progress(*place, demand)) for demand in part.choices
        ]
        return min((units for units in found if units is not None), key=total_cost, default=None)

    # One demand

    def _search_demand(
        self, demand: Demand, part: MemberGroup, closed: Container[NodeName], progress: SearchProgress
    ) -> list[PreemptionUnit] | None:
        hosts = part.slice_hosts or 1
        # Only the members that do not fit yet need victims.
        missing = part.members // hosts - self._runs_that_fit(demand, part, closed)
        if missing <= 0:
            return []
        names = self._candidate_sites(demand, closed, hosts, progress)
        sites = progress.sites = self._current_sites(progress.sites, demand, closed)
        # The cheapest jobs are likely to suffice, and sites are made as they are needed. Only if they do not suffice is
        # the search widened: a bound on its cost where thousands of jobs run.
        limit, before = max(progress.limit, MIN_SITES, 2 * missing), progress.count
        while True:
            try:
                while progress.count < limit and (nodes := next(names, None)) is not None:
                    # At least one in each step, so that the search ends.
                    if self.memory.budget <= 0 and progress.count > before:
                        raise SearchPaused
                    sites.append(self._make_site(nodes, demand))
                    progress.count += 1
                    progress.examined |= dict.fromkeys(nodes)
                if progress.count > before and self.memory.budget < CHOICE_WORK * missing:
                    raise SearchPaused
            except SearchPaused:
                # What does not help by itself may do so beside other ends, but is too much to keep.
                progress.sites = [site for site in sites if not site.has_offer or site.cheapest_units is not None]
                raise
            units = self._cheapest(sites, demand, missing)
            if units is not None or progress.count < limit:
                return units
            limit = progress.limit = limit * SITES_FACTOR

    def _current_sites(
        self, sites: Iterable[CandidateMachines], demand: Demand, closed: Container[NodeName]
    ) -> list[CandidateMachines]:
        """Return sites of an earlier step as they are now, without those that are closed."""
        usable = self.pool.usable(demand)
        return [
            site if self._is_current(site) else self._make_site(site.nodes, demand)
            for site in sites
            if all(node in usable and node not in closed for node in site.nodes)
        ]

    def _is_current(self, site: CandidateMachines) -> bool:
        return all(
            list(self.state.on_node[node]) == site.attempts[node]
            and FreeCapacity.of(self.pool.machines[node]) == site.free[node]
            for node in site.nodes
        )

    def _runs_that_fit(self, demand: Demand, part: MemberGroup, closed: Container[NodeName]) -> int:
        """Return how many members (or slices) fit without ending anything."""
        # Counted by placing, so that slices and localities follow the rules of the pool.
        mark, hosts = self.trial.mark, part.slice_hosts or 1
        one, count = PlacementRequest((MemberGroup((demand,), hosts, part.slice_hosts),)), 0
        while count < part.members // hosts and self.trial.place(one, closed) is not None:
            count += 1
        self.trial.undo_to(mark)
        return count

    def _candidate_sites(
        self, demand: Demand, closed: Container[NodeName], hosts: int, progress: SearchProgress
    ) -> Iterator[tuple[NodeName, ...]]:
        """Return sites with jobs that may be ended, those of the cheapest jobs first."""
        if all(name in closed for name in self.pool.machines):
            return
        known = dict.fromkeys(progress.examined, False)
        """Machines looked at, and whether each could hold a member if it were empty."""
        jobs = self._jobs_in_order(progress)
        soon = islice(jobs, max(0, JOBS_BEFORE_MACHINES - progress.visited))
        yield from self._sites_of_jobs(soon, known, demand, closed, hosts)
        more = next(jobs, None)
        if more is None:
            return
        # Where few machines could hold the demand at all (a rare device), the jobs on these are fewer than all jobs of
        # the bands.
        serving = (name for name in self.pool.machines if self._could_hold(known, demand, name, closed))
        left = list(islice(serving, FEW_MACHINES + 1))
        others = self._jobs_on(left) if len(left) <= FEW_MACHINES else chain((more,), jobs)
        yield from self._sites_of_jobs(others, known, demand, closed, hosts)

    def _sites_of_jobs(
        self,
        jobs: Iterable[JobRow],
        known: dict[NodeName, bool],
        demand: Demand,
        closed: Container[NodeName],
        hosts: int,
    ) -> Iterator[tuple[NodeName, ...]]:
        for job in jobs:
            for attempt in self.state.living_members(job):
                name = attempt.node
                if not self._could_hold(known, demand, name, closed):
                    continue
                nodes = self._nodes_of(name, hosts)
                # A slice that lacks a host, or has a closed one, cannot be given: ends on it would be in vain.
                if len(nodes) != hosts or not all(self._could_hold(known, demand, host, closed) for host in nodes):
                    known[name] = False
                elif self._unit_of(job) is not None:
                    # Each site comes once, with its cheapest job.
                    known |= dict.fromkeys(nodes, False)
                    yield nodes

    def _nodes_of(self, name: NodeName, hosts: int) -> tuple[NodeName, ...]:
        """Return the machine, or all open hosts of its slice."""
        if hosts == 1:
            return (name,)
        machine = self.pool.machines.get(name)
        members = self.pool.slices.members.get(machine.slice, ()) if machine and machine.slice else ()
        return tuple(host for host in members if self.pool.machines[host].is_open)

    def _could_hold(
        self, known: dict[NodeName, bool], demand: Demand, name: NodeName, closed: Container[NodeName]
    ) -> bool:
        """Return whether it could hold a member if it were empty."""
        if name not in known:
            known[name] = name in self.pool.usable(demand) and name not in closed
        return known[name]

    def _jobs_in_order(self, progress: SearchProgress | None = None) -> Iterator[JobRow]:
        """Yield jobs of the latest band first, within a band the last placed first, each with what it owns.

        With the progress of a search they begin where it stopped, and it is noted how far they got. Raises SearchPaused
        if its budget is spent.
        """
        start = progress.position if progress is not None else None
        if start is not None and start[0] not in self.bands:
            start = None
        for band in self.bands:
            line = self.state.running_by_band[band]
            # Sorted by placement: shielded jobs, placed after ``since``, are cut off. The last placed has the least to
            # lose, unless there are checkpoints.
            count = bisect_right(line, self.since, key=lambda entry: entry[0])
            if start is not None:
                if band is not start[0]:
                    continue
                # With that job: it may have members on other machines.
                count, start = min(count, bisect_right(line, start[1])), None
            for at in range(count - 1, -1, -1):
                if progress is not None:
                    if self.memory.budget <= 0:
                        raise SearchPaused
                    progress.position = band, line[at]
                    progress.visited += 1
                job = self.state.jobs[line[at][2]]
                self.memory.count_examined(1)
                yield job
                # Children end with it, and may free machines elsewhere.
                if self._has_children(job):
                    yield from descendants(self.state, job)

    def _jobs_on(self, names: Iterable[NodeName]) -> list[JobRow]:
        """Return those of them on these machines, in the same order."""
        found: dict[JobId, tuple[tuple[int, float, int], JobRow]] = {}
        ranks = {band: rank for rank, band in enumerate(self.bands)}
        for attempt in (self.state.attempts[id_] for name in names for id_ in self.state.on_node[name]):
            job = self.state.jobs[attempt.job_id]
            self.memory.work += 1  # listed again in each step, so it is not limited
            keys = [
                (ranks[one.band], -(one.placed_at or 0.0), -one.order)
                for one in (job, *ancestors(self.state, job))
                if one.is_active and one.band in ranks and (one.placed_at or 0.0) <= self.since
            ]
            if keys:
                # A child comes where the first of its ancestors would: the end of that one ends it.
                found[job.job_id] = min(keys), job
        return [job for _, job in sorted(found.values(), key=lambda pair: (pair[0], pair[1].order))]

    def _has_children(self, job: JobRow) -> bool:
        if not self.state.children:
            return False
        members = (attempt_id(job.job_id, job.generation, member) for member in range(job.spec.members))
        return job.job_id in self.state.children or any(member in self.state.children for member in members)

    def _unit_of(self, job: JobRow) -> PreemptionUnit | None:
        """Return what ends with this job; None if it may not be ended, or has ended already."""
        key = job.spec.job_group or job.job_id
        if key not in self._units:
            # Cached, also if it may not be ended: the test goes up to all owners and down to all children.
            may = job.is_active and job.job_id not in self.trial.ended_jobs and self.eligible(job)
            self._units[key] = unit_of(self.state, job) if may else None
        return self._units[key]

    def _make_site(self, nodes: tuple[NodeName, ...], demand: Demand) -> CandidateMachines:
        found: dict[str, PreemptionUnit] = {}
        here: dict[JobId, list[tuple[NodeName, Demand, tuple[str, ...]]]] = {}
        state, ended_jobs = self.state, self.trial.ended_jobs
        attempts = {node: list(state.on_node[node]) for node in nodes}
        for node, on_node in attempts.items():
            self.memory.count_examined(len(on_node))
            for attempt in map(state.attempts.__getitem__, on_node):
                job_id = attempt.job_id
                job = state.jobs[job_id]
                # What ends anyway is free in the trial's pool already, and must not be counted twice.
                if job_id not in ended_jobs:
                    share = node, state.share_of(attempt), attempt.devices
                    if job_id in here:
                        here[job_id].append(share)
                    else:
                        here[job_id] = [share]
                # What runs here may also end with an owner that runs elsewhere.
                for one in (job, *ancestors(state, job)) if job.owner in state.attempts else (job,):
                    # Shields first: a look at the job's whole family is more work.
                    if (one.placed_at or 0.0) <= self.since and (unit := self._unit_of(one)) is not None:
                        found[unit.key] = unit
        rooms = {node: FreeCapacity.of(self.pool.machines[node]) for node in nodes}
        site = CandidateMachines(nodes, rooms, attempts, sorted(found.values(), key=attrgetter("order")), here)
        site.runs_held = _members_held(rooms, demand)
        self._cheapest_on_site(site, demand, {})
        return site

    def _runs(self, site: CandidateMachines, demand: Demand, ended: Iterable[PreemptionUnit]) -> int:
        """Return how many members (or slices) the site holds after these have ended."""
        rooms, _ = self._free_after(site, ended)
        return _members_held(rooms, demand)

    def _free_after(
        self, site: CandidateMachines, ended: Iterable[PreemptionUnit]
    ) -> tuple[dict[NodeName, FreeCapacity], dict[JobId, None]]:
        """Return what is free there after that, and which jobs have ended."""
        rooms = {node: room.copy() for node, room in site.free.items()}
        gone: dict[JobId, None] = {}
        for unit in ended:
            self._add_freed(site, rooms, gone, unit)
        return rooms, gone

    def _add_freed(
        self,
        site: CandidateMachines,
        rooms: dict[NodeName, FreeCapacity],
        gone: dict[JobId, None],
        unit: PreemptionUnit,
    ) -> None:
        machines = self.pool.machines
        for job in unit.jobs:
            shares = site.shares_by_job.get(job.spec.job_id)
            # Units overlap where a job and its child are both candidates: the child's share is freed once.
            if shares is not None and job.spec.job_id not in gone:
                gone[job.spec.job_id] = None
                for node, demand, devices in shares:
                    rooms[node].add(machines[node], demand, devices)

    def _on_site(self, site: CandidateMachines, ended: dict[str, PreemptionUnit]) -> dict[str, PreemptionUnit]:
        return {unit.key: unit for unit in site.units if unit.key in ended} if ended else {}

    def _cheapest_on_site(
        self, site: CandidateMachines, demand: Demand, chosen: dict[str, PreemptionUnit]
    ) -> list[PreemptionUnit] | None:
        """Return the cheapest jobs whose end makes room for one more there; None if there are none."""
        # A flag of its own, as None is a valid offer: no jobs of the site help.
        if not site.has_offer:
            site.cheapest_units, site.has_offer = (
                self._find_cheapest_on_site(site, demand, self._on_site(site, chosen)),
                True,
            )
        return site.cheapest_units

    def _find_cheapest_on_site(
        self, site: CandidateMachines, demand: Demand, ended: dict[str, PreemptionUnit]
    ) -> list[PreemptionUnit] | None:
        rooms, gone = self._free_after(site, ended.values())
        want = _members_held(rooms, demand) + 1
        picked: dict[str, PreemptionUnit] = {}
        # Greedy: the cheapest first until one more fits, then the dearest that were not necessary are dropped. The
        # optimum would need a search of all sets.
        for unit in site.units:
            if unit.key not in ended:
                picked[unit.key] = unit
                self._add_freed(site, rooms, gone, unit)
                if _members_held(rooms, demand) >= want:
                    break
        else:
            return None
        # They were picked in their order. The last one is necessary: there was no room before it.
        for unit in list(picked.values())[-2::-1]:
            fewer = {key: other for key, other in picked.items() if other is not unit}
            if self._runs(site, demand, (*ended.values(), *fewer.values())) >= want:
                picked = fewer
        return list(picked.values())

    def _cheapest(
        self, sites: Sequence[CandidateMachines], demand: Demand, missing: int
    ) -> list[PreemptionUnit] | None:
        """Take the cheapest offers until there is enough room, and drop victims that are not necessary."""
        chosen: dict[str, PreemptionUnit] = {}
        sites_of: dict[str, list[int]] = {}
        for index, site in enumerate(sites):
            for unit in site.units:
                sites_of.setdefault(unit.key, []).append(index)
        gains = [0] * len(sites)
        changed: dict[int, None] = {}
        """Sites whose offers were made beside what is chosen."""
        line: list[tuple[Cost, int]] = []
        for index, site in enumerate(sites):
            offer = self._cheapest_on_site(site, demand, chosen)
            if offer is not None:
                line.append((total_cost(offer), index))
        heapq.heapify(line)
        while line and sum(gains) < missing:
            cost, index = heapq.heappop(line)
            offer = self._cheapest_on_site(sites[index], demand, chosen)
            if offer is None:
                continue
            # The heap is lazy: a site whose offer may have changed is in it without cost, and gets its price when it
            # comes up.
            if total_cost(offer) > cost:
                heapq.heappush(line, (total_cost(offer), index))
                continue
            chosen |= {unit.key: unit for unit in offer}
            # The end of a job frees room on all sites where it has members, whose offers change with it.
            for touched in dict.fromkeys([index, *(i for unit in offer for i in sites_of[unit.key])]):
                sites[touched].has_offer = False
                changed[touched] = None
                gains[touched] = self._gain(sites[touched], demand, chosen)
                heapq.heappush(line, (NO_COST, touched))
        # Another choice, with more sites or in the next step, begins from nothing, and so do their offers.
        for index in changed:
            sites[index].has_offer = False
        if sum(gains) < missing:
            return None
        # A later choice may have made an earlier one unnecessary.
        return self._drop_spare_victims(sites, sites_of, demand, chosen, sum(gains) - missing, gains)

    def _gain(self, site: CandidateMachines, demand: Demand, ended: dict[str, PreemptionUnit]) -> int:
        return self._runs(site, demand, self._on_site(site, ended).values()) - site.runs_held

    def _drop_spare_victims(
        self,
        sites: Sequence[CandidateMachines],
        sites_of: dict[str, list[int]],
        demand: Demand,
        chosen: dict[str, PreemptionUnit],
        surplus: int,
        gains: list[int],
    ) -> list[PreemptionUnit]:
        """Return the victims without unnecessary ones, the dearest being dropped first."""
        for unit in sorted(chosen.values(), key=lambda unit: unit.order, reverse=True):
            fewer = {job_id: other for job_id, other in chosen.items() if other is not unit}
            after = {index: self._gain(sites[index], demand, fewer) for index in sites_of[unit.key]}
            # Only the sites of this job can lose anything: the others need not be counted again.
            loss = sum(gains[index] - gain for index, gain in after.items())
            if loss <= surplus:
                chosen, surplus = fewer, surplus - loss
                for index, gain in after.items():
                    gains[index] = gain
        return list(chosen.values())


def _members_held(rooms: Mapping[NodeName, FreeCapacity], demand: Demand) -> int:
    """Return how many members a machine with this room holds, or how many slices its hosts."""
    # A slice holds as many as its fullest host does.
    return min([room.count(demand) for room in rooms.values()])
