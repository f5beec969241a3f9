"""Queue of applicants by tenant, band and shape.

Applicants of one shape fit or do not fit together, so a pass tries each shape once more than it succeeds, and a shape
that did not fit is not tried again before something has changed for it. The order (`order`) depends on present usage,
so no list of it is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from operator import attrgetter
from typing import Any, TypeVar

from attrs import fields

from fray.model.ids import AttemptId, NodeName
from fray.model.resources import Demand
from fray.model.specs import JobSpec
from fray.scheduler.pool.requests import request_of
from fray.scheduler.queue.applicant import NEVER, Applicant, Entry, HeldMachines, PlacementShape
from fray.scheduler.queue.fair_share import FairShareAccounts, amount_of, zero_amount
from fray.scheduler.queue.fair_share import Tenant as Tenant
from fray.scheduler.queue.indexes import ShapeIndex, SortedBlocks, TenantQueue, TenantShapeQueue, WaitingShape

WORK_PER_STEP = 300
"""Work after which no further plan or search begins in this step: the controller answers no request meanwhile. Counted,
and not measured, so that the same events give the same decisions."""
T = TypeVar("T")
_demand_fields = attrgetter(*(field.name for field in fields(Demand)))


class Queue:
    """Waiting applicants, and the indexes over them."""

    def __init__(self, shares: FairShareAccounts | None = None) -> None:
        self.shares = shares or FairShareAccounts()
        self.applicants: dict[str, Applicant] = {}
        self.waiting: dict[PlacementShape, WaitingShape] = {}
        # No sorted list of all applicants: the order depends on scores, and so changes with each placement.
        self.tenants: dict[int, dict[str, dict[Tenant, TenantQueue]]] = {}
        """Queues by rank of the band, user, and tenant."""
        self.shape_indexes: dict[str, ShapeIndex] = {}
        """Shape indexes by kind of device, empty for shapes that need none."""
        self.children: dict[str, dict[PlacementShape, SortedBlocks[Entry]]] = {}
        """Jobs that wait and were launched by running attempts, by attempt and shape."""
        self.new_owners: dict[str, None] = {}
        """Keys of ``children`` that came since `lending` cleared this."""
        self.exempt: dict[TenantShapeQueue, None] = {}
        self.untried: dict[TenantShapeQueue, None] = {}
        """Shape queues with applicants that were not tried yet."""
        self.over_quota: dict[str, dict[TenantShapeQueue, None]] = {}
        """Shape queues that were refused for a quota, by its owner: ``user:NAME`` or ``space:NAME``."""
        self.refused: dict[PlacementShape, None] = {}
        """Shapes that came, or did not fit, since `reclaim_surplus` cleared this."""
        self.in_reservations: dict[TenantShapeQueue, None] = {}
        """Shape queues that take machines of a reservation."""
        self.skipped_machines: dict[NodeName, None] = {}
        """Machines that were freed in earlier steps while all were held for the first applicants: others were not
        tried there."""
        self.was_cut_short = False
        """True if the last pass ended early, as all machines were held."""
        self.last_holder = ""
        """Applicant with whose hold all machines were held in it."""
        self.held_machines: dict[str, HeldMachines] = {}
        """Machines the last pass held, by applicant, in order."""
        self.last_inputs: object = None
        """Inputs of the last pass (`placement`)."""
        self.seen_version = -1
        """Version of the pool at the last pass."""
        self.pass_number = 0
        """Number of the last pass."""
        self.claim_blockers: dict[str, tuple[NodeName, AttemptId]] = {}
        """Ending attempts for which claims were found to wait, by the applicant of the claim (`preemption`)."""
        self.preemption_candidates: dict[TenantShapeQueue, None] = {}
        """Shape queues with new applicants that may preempt others, until `preemption` clears it."""
        self.work = 0
        """Work on plans and searches for victims in this step, in units of about 10 µs."""
        self.is_unfinished = False
        """True if a plan, or another pass, was left to the next step."""
        self.changes = 0
        """Count of all changes."""
        self._arrivals: deque[Applicant] = deque()
        self._sorted = True
        self._shapes_by_spec: dict[object, PlacementShape] = {}
        self._shape_count = 0
        self._cache: tuple[object, Any] | None = None

    def __len__(self) -> int:
        return len(self.applicants)

    def __contains__(self, applicant_id: str) -> bool:
        return applicant_id in self.applicants

    def __iter__(self) -> Iterator[Applicant]:
        """Iterate by band and acceptance."""
        return iter(sorted(self.applicants.values(), key=lambda applicant: applicant.entry))

    def shape_of(self, spec: JobSpec, child: bool) -> PlacementShape:
        """Return what a job requests; equal requests are one object."""
        key = (_demand_fields(spec.demand), spec.alternatives, spec.members, child, spec.reservation_id)
        # Equal requests share one shape object, and each dictionary lookup of it is a comparison of identities.
        shape = self._shapes_by_spec.get(key)
        if shape is None:
            shape = PlacementShape(request_of(spec), child, spec.reservation_id)
            want = self.waiting.get(shape)
            shape = self._shapes_by_spec[key] = want.shape if want is not None else shape
            # Shapes with which nothing waits any more are dropped now and then, at a constant cost for each request.
            if len(self._shapes_by_spec) > 2 * len(self.waiting) + 1000:
                self._shapes_by_spec = {
                    key: shape for key, shape in self._shapes_by_spec.items() if shape in self.waiting
                }
        return shape

    # Adding and removing

    def add(self, applicant: Applicant) -> None:
        lane = self._lane_for(applicant)
        entry, line = applicant.entry, lane.entries
        if not len(line):
            lane.tenant_queue.add_head(entry, lane)
        elif entry < line.first:
            lane.tenant_queue.remove_head(line.first)
            lane.tenant_queue.add_head(entry, lane)
        line.add(entry)
        lane.tenant_queue.entries.add(entry)
        if applicant.owner:
            self._add_child(applicant)
        self.applicants[applicant.id] = applicant
        self.untried[lane] = None
        # If the pass does not place it, surplus of reservations may be reclaimed for it in the same step.
        self.refused[applicant.shape] = None
        self.preemption_candidates[lane] = None
        # Growth of reservations never starves. It would be sorted behind all arrivals, and the list sorted with each of
        # them.
        if applicant.waiting_since != NEVER:
            self._sorted = self._sorted and (
                not self._arrivals or self._arrivals[-1].waiting_since <= applicant.waiting_since
            )
            self._arrivals.append(applicant)
        # Removed applicants stay in the list until it is half stale: to search for each would cost its length.
        if len(self._arrivals) > 2 * len(self.applicants) + 64:
            self._arrivals = deque(self._arrivals_waiting())
        self.changes += 1

    def remove(self, applicant_id: str) -> None:
        applicant = self.applicants.pop(applicant_id)
        entry = applicant.entry
        lane = self.lane_of(applicant)
        line, space = lane.entries, lane.tenant_queue
        # The order of its tenant has the heads of all queues: a pass looks only at these.
        was_head = line.first == entry
        if was_head:
            space.remove_head(entry)
        line.remove(entry)
        space.entries.remove(entry)
        if applicant.owner:
            self._remove_child(applicant)
        if not len(line):
            self._drop_lane(lane)
        elif was_head:
            space.add_head(line.first, lane)
        self.changes += 1

    def _add_child(self, applicant: Applicant) -> None:
        shapes = self.children.get(applicant.owner)
        if shapes is None:
            shapes = self.children[applicant.owner] = {}
            self.new_owners[applicant.owner] = None
        if applicant.shape not in shapes:
            shapes[applicant.shape] = SortedBlocks()
        shapes[applicant.shape].add(applicant.entry)

    def _remove_child(self, applicant: Applicant) -> None:
        shapes = self.children[applicant.owner]
        shapes[applicant.shape].remove(applicant.entry)
        if not shapes[applicant.shape]:
            del shapes[applicant.shape]
            if not shapes:
                del self.children[applicant.owner]
                self.new_owners.pop(applicant.owner, None)

    def lane_of(self, applicant: Applicant) -> TenantShapeQueue:
        return self.waiting[applicant.shape].lanes[applicant.band.rank, applicant.tenant]

    def _lane_for(self, applicant: Applicant) -> TenantShapeQueue:
        want = self.waiting.get(applicant.shape) or self._add_shape(applicant.shape)
        key = applicant.band.rank, applicant.tenant
        lane = want.lanes.get(key)
        if lane is None:
            lane = want.lanes[key] = TenantShapeQueue(want, self._tenant_queue(*key))
            if want.is_exempt:
                self.exempt[lane] = None
            if want.shape.reservation:
                self.in_reservations[lane] = None
        return lane

    def _tenant_queue(self, rank: int, tenant: Tenant) -> TenantQueue:
        # By user first, as users of one band are compared before their namespaces are.
        users = self.tenants.setdefault(rank, {})
        spaces = users.get(tenant.user)
        if spaces is None:
            spaces = users[tenant.user] = {}
            self.shares.add_waiting(rank, tenant.user)
        return spaces.setdefault(tenant, TenantQueue(rank, tenant))

    def _drop_lane(self, lane: TenantShapeQueue) -> None:
        """Remove an empty queue."""
        space, want = lane.tenant_queue, lane.waiting
        del want.lanes[space.rank, space.tenant]
        self.untried.pop(lane, None)
        self.preemption_candidates.pop(lane, None)
        self.exempt.pop(lane, None)
        self.in_reservations.pop(lane, None)
        # A queue waits for a quota of its own user or namespace: no other list can have it.
        for whose in (f"user:{space.tenant.user}", f"space:{space.tenant.namespace}"):
            lanes = self.over_quota.get(whose)
            if lanes is not None and lanes.pop(lane, lane) is None and not lanes:
                del self.over_quota[whose]
        if not want.lanes:
            del self.waiting[want.shape]
            if not want.shape.reservation:
                self.shape_indexes[want.kind].remove(want)
        if not space.entries:
            spaces = self.tenants[space.rank][space.tenant.user]
            del spaces[space.tenant]
            if not spaces:
                del self.tenants[space.rank][space.tenant.user]
                self.shares.remove_waiting(space.rank, space.tenant.user)

    def _add_shape(self, shape: PlacementShape) -> WaitingShape:
        self._shape_count += 1
        want = self.waiting[shape] = make_waiting_shape(shape, self._shape_count)
        # Others are tried whenever something changes in their reservation, which has few machines (`in_reservations`).
        if not shape.reservation:
            self.shape_indexes.setdefault(want.kind, ShapeIndex()).add(want)
        return want

    def retry_after_quota_change(self, whose: str) -> None:
        """Retry what was over the quota of this user or namespace (see `over_quota`), which has less now."""
        self.untried.update(self.over_quota.pop(whose, {}))

    def retry(self, applicant_id: str) -> None:
        """Retry an applicant for which something has changed, even if no machine was freed."""
        lane = self.lane_of(self.applicants[applicant_id])
        # The pool's version has not changed: without this the pass would take the shape as refused.
        lane.waiting.failed_version = -1
        self.untried[lane] = None
        self.changes += 1

    def retry_inside(self, reservation_id: str) -> None:
        """Retry what waits for machines of this reservation, which has more now."""
        inside = (lane for lane in self.in_reservations if lane.waiting.shape.reservation == reservation_id)
        self.untried.update(dict.fromkeys(inside))

    # Queries

    @property
    def has_spent_work(self) -> bool:
        """Return whether further plans and searches are left to the next step."""
        return self.work >= WORK_PER_STEP

    def head(self, shape: PlacementShape) -> Applicant:
        """Return the applicant of this shape that was accepted first."""
        return self.applicants[min(lane.head for lane in self.waiting[shape].lanes.values())[-1]]

    def count_ahead(self, applicant_id: str) -> int:
        """Return how many applicants are tried before this one if nothing is placed, without regard to quotas."""
        return self.count_ahead_of(self.applicants[applicant_id])

    def count_ahead_of(self, applicant: Applicant) -> int:
        """Return the same for an applicant that may not be waiting."""
        rank, tenant = applicant.band.rank, applicant.tenant
        count = sum(_count(spaces) for other in range(rank) for spaces in self.tenants.get(other, {}).values())
        own = self.tenants.get(rank, {}).get(tenant.user, {}).get(tenant)
        first = own.first_order if own is not None else applicant.entry[2]
        mine = self.shares.score(tenant), first, tenant.namespace
        score = self.shares.user_score(tenant.user), tenant.user
        for user, spaces in self.tenants.get(rank, {}).items():
            if user != tenant.user:
                count += _count(spaces) if (self.shares.user_score(user), user) < score else 0
                continue
            for sibling, space in spaces.items():
                if sibling == tenant:
                    count += space.entries.count_before(applicant.entry)
                elif (self.shares.score(sibling), space.first_order, sibling.namespace) < mine:
                    count += len(space.entries)
        return count

    def first(self, lane: TenantShapeQueue) -> Applicant:
        return self.applicants[lane.head[-1]]

    def aged(self, before: float, limit: int) -> list[TenantShapeQueue] | None:
        """Return shape queues with an applicant that waits since ``before``; None if there are more than ``limit``."""
        if not self._sorted:
            self._arrivals = deque(sorted(self._arrivals_waiting(), key=lambda applicant: applicant.waiting_since))
            self._sorted = True
        arrivals = self._arrivals
        # By identity: the same id may wait again, as another applicant with a later start.
        while arrivals and self.applicants.get(arrivals[0].id) is not arrivals[0]:
            arrivals.popleft()
        # Too many to list: the caller walks the queue in its order, where it finds the first of them.
        if len(arrivals) > limit and arrivals[limit].waiting_since <= before:
            return None
        aged = takewhile(lambda applicant: applicant.waiting_since <= before, arrivals)
        return list(dict.fromkeys(self.lane_of(a) for a in aged if self.applicants.get(a.id) is a))

    def _arrivals_waiting(self) -> Iterator[Applicant]:
        return (applicant for applicant in self._arrivals if self.applicants.get(applicant.id) is applicant)

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, computed once for each ``key`` and state of the queue."""
        if self._cache is None or self._cache[0] != (self.changes, key):
            self._cache = (self.changes, key), make()
        value: T = self._cache[1]
        return value


def _count(spaces: dict[Tenant, TenantQueue]) -> int:
    return sum(len(space.entries) for space in spaces.values())


def make_waiting_shape(shape: PlacementShape, number: int = 0) -> WaitingShape:
    """Return the index entry of a shape."""
    demands = shape.request.demands
    kinds = {demand.device_kind if demand.device_count else None for demand in demands}
    # Choices with different devices have no bound on devices in common: the shape is found by CPU and memory only.
    kind = kinds.pop() if len(kinds) == 1 else None
    need, devices = zero_amount(), dict[str, int]()
    for part in shape.request.parts:
        choices = [amount_of(demand, part.members) for demand in part.choices]
        need = [one + max(choice[i] for choice in choices) for i, one in enumerate(need)]
        # Of the choices of one part the largest, of all parts the sum: parts are placed together, choices exclude each
        # other.
        mine: dict[str, int] = {}
        for demand in part.choices:
            if demand.device_count:
                key = f"{demand.device_kind}:{demand.device_variant.lower()}"
                mine[key] = max(mine.get(key, 0), demand.device_count * part.members)
        devices = {key: devices.get(key, 0) + mine.get(key, 0) for key in [*devices, *mine]}
    return WaitingShape(
        shape=shape,
        number=number,
        is_exempt=shape.is_child or shape.request.is_weightless,
        cpu_milli=min(demand.cpu_milli for demand in demands),
        memory_bytes=min(demand.memory_bytes for demand in demands),
        kind=kind or "",
        count=min(demand.device_count for demand in demands) if kind else 0,
        need=need,
        devices=devices,
    )
