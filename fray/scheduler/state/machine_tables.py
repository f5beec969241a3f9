"""Rows of the state, how they are saved, and the indexes over machines, reservations and the usage of tenants.

A unit of a reservation takes its share out of the cluster's pool as an attempt does. The units of a reservation on one
node are one machine of the reservation's own pool, so that every rule of placement also holds inside a reservation.
Ports belong to the node: the machine in the reservation's pool and the one in the cluster's share one `Ports`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from fray.model.ids import ActorId, AttemptId, JobId, NodeName, SessionId
from fray.model.policy.policy import Policy
from fray.model.reservations import ReservationId, ReservationState
from fray.model.resources import Capacity, Demand
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.queue.applicant import NEVER, Applicant, ApplicantKind, PlacementShape
from fray.scheduler.queue.fair_share import (
    FORGOTTEN_MEAN,
    Amount,
    FairShareAccounts,
    Tenant,
    TenantAccount,
    Usage,
    capacity_of,
)
from fray.scheduler.queue.queue import Queue
from fray.scheduler.queue.quotas import excess_over, hard_limit, limits_of
from fray.scheduler.state.indexes import OneToMany, OrderedSet, Timers
from fray.scheduler.state.machine_groups import MachineGroupIndex
from fray.scheduler.state.reservation_rows import HELD_NODES_LIMIT, Host, ReservationRow, ReservedUnit
from fray.scheduler.state.rows import (
    ActorRegistration,
    ActorTombstone,
    AttemptRow,
    CapacityClaim,
    JobGroupRow,
    JobRow,
    JobTombstone,
    Node,
    NodeFault,
    SchedulerConfig,
    SchedulerMeta,
    Session,
)

GROWTH_ORDER = 1 << 60
"""Added to the order of applicants for growth, which come last in their band, higher priority first."""
RESERVATION = "reservation"
"""Kind of the timers of reservations."""


class MachineTables:
    """All rows, and the indexes over nodes, reservations and usage.

    Args:
        now: first value of the scheduler's clock, seconds since the epoch.
    """

    def __init__(self, now: float = 0.0, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.meta = SchedulerMeta(now=now)
        self.jobs: dict[JobId, JobRow] = {}
        self.attempts: dict[AttemptId, AttemptRow] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.registrations: dict[ActorId, ActorRegistration] = {}
        self.actor_tombstones: dict[ActorId, ActorTombstone] = {}
        self.job_tombstones: dict[JobId, JobTombstone] = {}
        """Summaries of jobs whose rows were dropped, oldest end first."""
        self.reservations: dict[ReservationId, ReservationRow] = {}
        self.job_groups: dict[str, JobGroupRow] = {}
        self.claims: dict[str, CapacityClaim] = {}
        """Claims by applicant."""
        self.claim_changes = 0
        """Count of the claims that were made and dropped."""
        self.claim_holds: tuple[int, list[Any], dict[str, Any]] = (-1, [], {})
        """Holds of `backfill` for the claims, and that count when they were made."""
        self.usage: dict[str, Usage] = {}
        """Past use of tenants, by key of the account (see `fair_share`)."""
        # Keys and not rows: a row that changes ten times in a batch is written once, as it is at the end.
        self._dirty: dict[tuple[str, str], None] = {}
        self.fleet = MachineGroupIndex(self.touch)
        """Machines requested from providers."""

        self.pool = MachinePool()
        self.timers = Timers()
        """Timers of nodes (``drain``: end of a drain's waiting time; ``probe``: next probe), of jobs (``wait``: end
        of its limit on waiting) and of reservations (``reservation``: its next deadline)."""
        self.on_node: dict[NodeName, dict[AttemptId, None]] = {}
        """Living attempts by node."""

        self.lenders: OrderedSet[AttemptId] = OrderedSet()
        """Living attempts that wait for jobs below them (`AttemptRow.lends`)."""
        self.lent_to: OneToMany[AttemptId, AttemptId] = OneToMany()
        """Living attempts with a loan, by lender."""
        self.loan_changes = 0
        """Count of the changes of ``lenders``."""

        self.policy = Policy()
        self.shares = FairShareAccounts()
        self.queue = Queue(self.shares)
        self.excess_at_policy_change: dict[tuple[str, str], int] = {}
        """Amounts by which users and namespaces exceeded their hard limits when the policy was set."""

        self.not_alive: OrderedSet[NodeName] = OrderedSet()
        self.nodes_by_fault: OneToMany[str, NodeName] = OneToMany()
        """Nodes by kind of fault, equal for jobs that are alike (see `quarantine`)."""
        self.quarantined: OrderedSet[NodeName] = OrderedSet()
        self.newly_empty: OrderedSet[NodeName] = OrderedSet()
        """Cordoned nodes whose last attempt has ended since `drain` cleared this."""

        self.reservation_pools: dict[ReservationId, MachinePool] = {}
        """Machines of the reservations that have not ended."""
        self.jobs_inside: OneToMany[ReservationId, JobId] = OneToMany()
        """Living jobs by reservation."""
        self.reservations_on: OneToMany[NodeName, ReservationId] = OneToMany()
        """Reservations with units on a node."""
        self.reservations_by_owner: OneToMany[str, ReservationId] = OneToMany()
        """Reservations that have not ended."""
        self.with_surplus: OrderedSet[ReservationId] = OrderedSet()
        """Reservations that hold more than their minimum."""
        self.releasing: OrderedSet[ReservationId] = OrderedSet()
        """Reservations that are giving units back."""
        self.ended_reservations: OrderedSet[ReservationId] = OrderedSet()
        """Ended reservations, oldest end first."""
        self.changed_pools: OrderedSet[ReservationId] = OrderedSet()
        """Reservations in whose pool something became free since `place_waiting` cleared this."""

    @property
    def has_machine_groups(self) -> bool:
        """Return whether there are machine groups, or machines left of former ones."""
        fleet = self.fleet
        return bool(self.policy.groups or fleet.units or fleet.touched_units or fleet.plan_at is not None)

    # Time and order

    @property
    def now(self) -> float:
        """The scheduler's clock, seconds since the epoch; never decreases."""
        return self.meta.now

    def next_order(self) -> int:
        self.meta.last_order += 1
        return self.meta.last_order

    # Saving

    def touch(self, table: str, key: str) -> None:
        """Mark a row as changed or removed."""
        self._dirty[(table, key)] = None

    def touched(self) -> Iterator[tuple[str, str]]:
        """Yield table and key of each row that was changed or removed since the last `take_dirty`."""
        yield from self._dirty

    def rows(self, table: str) -> dict[str, Any]:
        return self.tables()[table]

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the rows of all tables; made at each call, since loading replaces some of the dictionaries."""
        return {
            "job": self.jobs,
            "job_group": self.job_groups,
            "attempt": self.attempts,
            "node": self.nodes,
            "session": self.sessions,
            "registration": self.registrations,
            "actor_tombstone": self.actor_tombstones,
            "job_tombstone": self.job_tombstones,
            "usage": self.usage,
            "unit": self.fleet.units,
            "machine_group": self.fleet.groups,
            "reservation": self.reservations,
            "claim": self.claims,
            "meta": {"meta": self.meta},
        }

    def take_dirty(self) -> tuple[list[tuple[str, str, object]], list[tuple[str, str]]]:
        """Return the rows to write ``(table, key, row)`` and to delete ``(table, key)`` since the last call.

        The rows are the live objects: serialize them before the next step.
        """
        upserts: list[tuple[str, str, object]] = []
        deletes: list[tuple[str, str]] = []
        # The clock and the counter of orders move with every change; alone they are not worth a transaction.
        if self._dirty:
            self.touch("meta", "meta")
        tables = self.tables()
        for table, key in self._dirty:
            row = tables[table].get(key)
            # A row that was made and removed within the batch is deleted, too, which does no harm.
            if row is None:
                deletes.append((table, key))
            else:
                upserts.append((table, key, row))
        self._dirty = {}
        return upserts, deletes

    def _sort_tables(self) -> None:
        """Bring loaded rows into the order in which they would have been added."""
        for table in ("job", "job_group", "registration", "actor_tombstone", "reservation"):
            _sort(self.rows(table), lambda row: row.order)
        _sort(self.attempts, self._attempt_order)
        _sort(self.job_tombstones, lambda row: (row.ended_at, row.order))
        _sort(self.claims, lambda row: (row.made_at, row.applicant))
        # Nodes and sessions have no order of acceptance; any fixed order will do.
        _sort(self.nodes, lambda row: row.name)
        _sort(self.sessions, lambda row: row.session)
        self.usage = dict(sorted(self.usage.items()))

    def _attempt_order(self, attempt: AttemptRow) -> tuple[int, int, int]:
        job = self.jobs.get(attempt.job_id)
        return (job.order if job else 0), attempt.generation, attempt.member

    # Usage and fair shares

    def charge(self, tenant: Tenant, demand: Demand, variant: str, times: int) -> None:
        """Count members that start (or, if ``times`` is negative, end) as the tenant's usage from now on.

        Args:
            variant: of the devices they hold (`variant_of`).
        """
        shares, now = self.shares, self.now
        for account in shares.count_members(tenant, demand, variant, times, now):
            # The past is settled at the old rate before the rate changes.
            if now > account.row.at:
                shares.accrue(account, now)
            shares.update_share(account, now)
            self.usage[account.key] = account.row
            self.touch("usage", account.key)
        # Only what ends can bring a tenant below its quota, and only tenants that are above one wait for that.
        if times < 0 and self.queue.over_quota:
            self.queue.retry_after_quota_change(f"user:{tenant.user}")
            self.queue.retry_after_quota_change(f"space:{tenant.namespace}")

    def demand(self, job: JobRow) -> Demand:
        """Return what each member takes of a machine; of alternative devices, those it was given last."""
        # What was taken, and so what is to be given back: the choice is in the row, also over a restart.
        return job.spec.alternatives[job.choice - 1] if job.choice else job.spec.demand

    def share_of(self, attempt: AttemptRow) -> Demand:
        """Return what an attempt takes of its machine: its demand, without the CPUs that its ancestors lend it."""
        demand = self.demand(self.jobs[attempt.job_id])
        if not attempt.loans:
            return demand
        return evolve(demand, cpu_milli=demand.cpu_milli - sum(attempt.loans.values()))

    def variant_of(self, node: NodeName, devices: tuple[str, ...]) -> str:
        """Return the variant of devices of one machine; empty for no devices."""
        return self.pool.machines[node].device_places[devices[0]][0][1] if devices else ""

    def _set_node_capacity(self, name: NodeName, size: Amount | None) -> None:
        """Set a node's part of the cluster; usage until now is accrued by the old size of the cluster."""
        # Shares are parts of the cluster, so every tenant's share changes with its size: this walks over all accounts,
        # and most changes of nodes leave the size alone.
        if self.shares.node_capacity(name) != size:
            self._accrue_all()
            self.shares.set_node_capacity(name, size)
            self.shares.rank_all(self.now)

    def _accrue_all(self) -> None:
        self.shares.accrue_all(self.now)
        for key in self.usage:
            self.touch("usage", key)

    def set_policy(self, policy: Policy, *, is_initial: bool = False) -> None:
        """Set the policy; usage until now is accrued by the old one.

        Args:
            is_initial: the controller has just started and does not have the old policy.
        """
        if not is_initial:
            self._accrue_all()
        self.policy = policy
        self.shares.set_policy(policy)
        self.shares.rank_all(self.now)
        # What was accepted under the old policy keeps running: a smaller quota takes nothing away.
        self.excess_at_policy_change = dict(self._excess_over_ceilings())
        self.pool.version += 1  # applicants that were over their quota may start now

    def _excess_over_ceilings(self) -> Iterator[tuple[tuple[str, str], int]]:
        for tenant in self.shares.tenants if self.shares.has_quotas else ():
            for whose, terms, account in limits_of(self.shares, tenant):
                most = hard_limit(terms)
                if most is not None and account is not None:
                    yield from (((whose, what), more) for what, more in excess_over(account, most).items())

    def rank_by_time(self) -> None:
        """Refresh the scores if they are old, and drop accounts whose past usage has decayed."""
        # With the ranking, which walks over all accounts anyway.
        if self.shares.rank_by_time(self.now):
            for account in self._forgettable_accounts():
                self.shares.forget_account(account)
                if self.usage.pop(account.key, None) is not None:
                    self.touch("usage", account.key)

    def _forgettable_accounts(self) -> list[TenantAccount]:
        half_life_s = self.policy.half_life_s
        # A tenant that runs or waits is never dropped, whatever the limit: its place in the order would be that of a
        # new one.
        unused = [account for account in self.shares.accounts.values() if not self._is_busy(account)]
        unused.sort(key=lambda account: account.mean(self.now, half_life_s))
        surplus = len(self.shares.accounts) - self.config.tenants_limit
        small = sum(account.mean(self.now, half_life_s) < FORGOTTEN_MEAN for account in unused)
        return unused[: max(small, surplus)]

    def _is_busy(self, account: TenantAccount) -> bool:
        """Return whether anything of the tenant runs or waits."""
        row = account.row
        users = [users[row.user] for users in self.queue.tenants.values() if row.user in users]
        if row.namespace is None:
            return bool(users) or any(account.used)
        tenant = self.shares.tenant(row.user, row.namespace)
        return any(tenant in spaces for spaces in users) or any(account.used)

    # Nodes

    def put_node(self, node: Node) -> None:
        """Add a new node or another incarnation of a known one."""
        # The index knows the old row's faults; they are carried over in the new one, which is indexed below.
        if node.name in self.nodes:
            self.set_faults(self.nodes[node.name], ())
        self.nodes[node.name] = node
        # Its unit may have been given up before its last host has joined.
        node.is_leaving = self.fleet.is_leaving(node)
        self._index_node(node)
        self._set_node_capacity(node.name, counted_capacity(node))
        self.touch("node", node.name)

    def _index_node(self, node: Node) -> None:
        self.pool.add(node.name, node.capacity, node.is_schedulable)
        self.pool.machines[node.name].ports.avoided = {taken.port: taken.until for taken in node.taken_ports}
        self.pool.withhold(node.name, node.busy)
        # A new incarnation keeps the entry of the one before, whose attempts have been given up.
        self.on_node.setdefault(node.name, {})
        self.fleet.on_node_joined(node)
        self._index_node_phase(node)
        self._index_faults(node)

    def _index_node_phase(self, node: Node) -> None:
        self.not_alive.set(node.name, node.phase is not NodePhase.ALIVE)
        self.timers.set(("drain", node.name), node.cordon.until if node.cordon is not None else None)
        found, probe_at = node.quarantine, None
        self.quarantined.set(node.name, found is not None)
        if found is not None:
            sent_at = found.probe_sent_at
            # One timer for each node: the next probe, or the end of the wait for an answer.
            probe_at = found.probe_at if sent_at is None else sent_at + self.config.probe_limit_s
        self.timers.set(("probe", node.name), probe_at)

    def set_faults(self, node: Node, faults: tuple[NodeFault, ...]) -> None:
        for fault in node.faults:
            self.nodes_by_fault.remove(fault.kind, node.name)
        node.faults = faults
        self._index_faults(node)
        self.touch("node", node.name)

    def _index_faults(self, node: Node) -> None:
        for fault in node.faults:
            self.nodes_by_fault.add(fault.kind, node.name)

    def node_changed(self, node: Node) -> None:
        """Index a node whose phase, stray attempts, first report, busy devices or cordon may have changed."""
        self._index_node_phase(node)
        self._set_node_capacity(node.name, counted_capacity(node))
        self.pool.set_open(node.name, node.is_schedulable)
        self.pool.withhold(node.name, node.busy)
        # Machines inside reservations are copies of this one and open and close with it.
        for reservation_id in self.reservations_on.get(node.name, ()):
            self._refresh_reserved_machine(self.reservations[reservation_id], node.name)
        self.touch("node", node.name)

    def drop_node(self, node: Node) -> None:
        # So that the indexing below clears the timers and the quarantine of the row that goes.
        node.quarantine = node.cordon = None
        self.set_faults(node, ())
        self._index_node_phase(node)
        del self.nodes[node.name], self.on_node[node.name]
        self.fleet.on_node_dropped(node)
        # The indexing above has entered it, unless its phase is ALIVE.
        self.not_alive.remove(node.name)
        self.pool.remove(node.name)
        self._set_node_capacity(node.name, None)
        self.touch("node", node.name)

    # Reservations

    def pool_for(self, reservation_id: ReservationId) -> MachinePool:
        """Return the pool of a reservation, or the cluster's if the id is empty."""
        return self.reservation_pools[reservation_id] if reservation_id else self.pool

    def put_claim(self, claim: CapacityClaim) -> None:
        self.claims[claim.applicant] = claim
        self.claim_changes += 1
        self.touch("claim", claim.applicant)

    def drop_claim(self, applicant_id: str) -> None:
        """Drop a claim and mark its machines as freed, since others may use them now."""
        claim = self.claims.pop(applicant_id)
        self.claim_changes += 1
        self.queue.claim_blockers.pop(applicant_id, None)
        if not claim.reservation or claim.reservation in self.reservation_pools:
            self.pool_for(claim.reservation).mark_freed(share.node for share in claim.shares)
        # Its applicant may fit elsewhere, or find other victims.
        if applicant_id in self.queue:
            self.queue.retry(applicant_id)
        self.touch("claim", applicant_id)

    def add_reservation(self, reservation: ReservationRow) -> None:
        self.reservations[reservation.id] = reservation
        self._index_reservation(reservation)
        self.touch("reservation", reservation.id)

    def reservation_changed(self, reservation: ReservationRow) -> None:
        """Index a reservation whose phase, units or times may have changed."""
        self._reindex_reservation(reservation)
        self.touch("reservation", reservation.id)

    def drop_reservation(self, reservation: ReservationRow) -> None:
        """Drop the row of an ended reservation."""
        del self.reservations[reservation.id], self.ended_reservations[reservation.id]
        self.touch("reservation", reservation.id)

    def _index_reservation(self, reservation: ReservationRow) -> None:
        if reservation.phase is not ReservationState.ENDED:
            # A pool of its own, and not a filter over the cluster's: placement needs no second set of rules.
            self.reservation_pools[reservation.id] = MachinePool()
            if reservation.owner:
                self.reservations_by_owner.add(reservation.owner, reservation.id)
        for unit in reservation.units:
            for host in unit.hosts:
                # Ports are not taken: they stay the machine's, and both pools share one `Ports`.
                self.pool.take(host.node, reservation.demand_of(unit), host.devices)
                self.shares.count_members(*self.unit_charge(reservation, unit, host), 1, self.now)
                self.reservations_on.add(host.node, reservation.id)
        for node in {node: None for unit in reservation.units for node in unit.nodes}:
            self._rebuild_reserved_machine(reservation, node)
        self._reindex_reservation(reservation)

    def _reindex_reservation(self, reservation: ReservationRow) -> None:
        name = reservation.id
        is_closing = reservation.phase is ReservationState.CLOSING
        self.with_surplus.set(name, reservation.surplus_units > 0)
        self.releasing.set(name, is_closing or any(unit.leaving for unit in reservation.units))
        self.timers.set((RESERVATION, name), reservation.next_deadline)
        self._queue_reservation(reservation)
        # Once, although this is called for every change of the row.
        if reservation.phase is ReservationState.ENDED and name not in self.ended_reservations:
            self.reservations_by_owner.remove(reservation.owner, name)
            self.reservation_pools.pop(name, None)
            self.changed_pools.remove(name)
            self.ended_reservations.add(name)

    def _queue_reservation(self, reservation: ReservationRow) -> None:
        wanted = self.reservation_applicant(reservation)
        for applicant_id in (f"reservation:{reservation.id}", f"growth:{reservation.id}"):
            known = self.queue.applicants.get(applicant_id)
            # Replaced only if it has changed: this is called for every change of the row.
            if known is not None and known != wanted:
                self.queue.remove(applicant_id)
        if wanted is not None and wanted.id not in self.queue:
            self.queue.add(wanted)

    def reservation_applicant(self, reservation: ReservationRow) -> Applicant | None:
        """Return what the reservation waits for: its whole minimum, a lost unit of that, or one unit more."""
        spec, phase = reservation.spec, reservation.phase
        tenant = self.shares.tenant(spec.user, spec.namespace)
        if phase in (ReservationState.WAITING, ReservationState.DEGRADED):
            # Waiting is all or none; a degraded one asks for its lost units one by one, as each is of use at once.
            units = spec.min_units if phase is ReservationState.WAITING else 1
            is_child = bool(reservation.owner) and reservation.owner != reservation.root
            return Applicant(
                f"reservation:{reservation.id}",
                PlacementShape(reservation.request_for(units), is_child),
                reservation.order,
                reservation.queued_at,
                ApplicantKind.RESERVATION,
                reservation.band,
                tenant,
                priority=spec.priority,
            )
        # After a unit in use was given back there is a pause, so that a job that comes and goes costs at most one
        # restart in that time.
        grows = len(reservation.units) < spec.max_units and not reservation.grow_not_before
        if phase is not ReservationState.HELD or not grows:
            return None
        return Applicant(
            f"growth:{reservation.id}",
            PlacementShape(reservation.request_for(1), is_growth=True),
            GROWTH_ORDER + reservation.order,
            NEVER,  # units beyond the minimum are optional: a wait for one never makes it starve
            ApplicantKind.GROWTH,
            reservation.band,
            tenant,
            priority=spec.priority,
        )

    # Units of reservations

    def add_unit(self, reservation: ReservationRow, unit: ReservedUnit) -> None:
        """Add a unit whose share the cluster's pool has already placed; call `reservation_changed` after it."""
        reservation.units.append(unit)
        reservation.held_nodes = tuple(dict.fromkeys((*reservation.held_nodes, *unit.nodes)))[:HELD_NODES_LIMIT]
        # Charged as a whole and not by what runs inside: no job outside can use it.
        for host in unit.hosts:
            self.charge(*self.unit_charge(reservation, unit, host), 1)
        for node in unit.nodes:
            self.reservations_on.add(node, reservation.id)
            self._rebuild_reserved_machine(reservation, node)

    def unit_charge(self, reservation: ReservationRow, unit: ReservedUnit, host: Host) -> tuple[Tenant, Demand, str]:
        """Return what `charge` takes: its tenant is charged for the whole reservation."""
        tenant = self.shares.tenant(reservation.spec.user, reservation.spec.namespace)
        return tenant, reservation.demand_of(unit), self.variant_of(host.node, host.devices)

    def close_unit_machines(self, reservation: ReservationRow, unit: ReservedUnit) -> None:
        """Place nothing new on the unit's machines."""
        for node in unit.nodes:
            self._refresh_reserved_machine(reservation, node)

    def drop_unit(self, reservation: ReservationRow, unit: ReservedUnit, only: NodeName | None = None) -> None:
        """Return a unit's share to the cluster's pool.

        Args:
            only: return the hosts on this node only.
        """
        going = [host for host in unit.hosts if only in (None, host.node)]
        unit.hosts = tuple(host for host in unit.hosts if host not in going)
        # A unit that has lost one host of its slice stays until the others are given back, too.
        if not unit.hosts:
            reservation.units.remove(unit)
        for host in going:
            self.pool.release(host.node, reservation.demand_of(unit), host.devices)
            self.charge(*self.unit_charge(reservation, unit, host), -1)
        for node in dict.fromkeys(host.node for host in going):
            # Several units can be on one node.
            if not any(node in other.nodes for other in reservation.units):
                self.reservations_on.remove(node, reservation.id)
            if self.has_machine_groups and node in self.nodes:
                self.fleet.on_node_used(node, self.now)
            self._rebuild_reserved_machine(reservation, node)

    # Machines of reservations

    def _ensure_reserved_machine(self, reservation_id: ReservationId, node: NodeName) -> None:
        """Make the machine of a living attempt, which has no unit on the node if it takes nothing."""
        if reservation_id and node not in self.reservation_pools[reservation_id].machines:
            self._rebuild_reserved_machine(self.reservations[reservation_id], node, is_used=True)

    def _rebuild_reserved_machine(self, reservation: ReservationRow, node: NodeName, is_used: bool = False) -> None:
        """Make the reservation's machine of this node again, from its units and attempts there."""
        pool = self.reservation_pools[reservation.id]
        # Built again rather than changed, since units come and go rarely.
        inside = self.attempts_inside(reservation.id, node)
        units = [unit for unit in reservation.units if node in unit.nodes]
        if not (units or inside or is_used):
            pool.remove(node)
            return
        # Closed first; `_refresh_reserved_machine` opens it once what runs there is taken.
        pool.add(node, self._reserved_capacity(reservation, units, node), False)
        # The same object: a number that is given inside is taken outside.
        pool.machines[node].ports = self.pool.machines[node].ports
        for attempt in inside:
            pool.take(node, self.share_of(attempt), attempt.devices)
        self._refresh_reserved_machine(reservation, node)

    def attempts_inside(self, reservation_id: ReservationId, node: NodeName) -> list[AttemptRow]:
        """Return the living attempts of a reservation on this node."""
        here = (self.attempts[attempt_id] for attempt_id in self.on_node[node])
        return [attempt for attempt in here if self.jobs[attempt.job_id].spec.reservation_id == reservation_id]

    def _reserved_capacity(self, reservation: ReservationRow, units: list[ReservedUnit], node: NodeName) -> Capacity:
        """Return the sum of the units' shares of this node."""
        whole = self.nodes[node].capacity
        shares = [(reservation.demand_of(unit), host) for unit in units for host in unit.hosts if host.node == node]
        mine = {device for _, host in shares for device in host.devices}
        return Capacity(
            cpu_milli=sum(demand.cpu_milli for demand, _ in shares),
            memory_bytes=sum(demand.memory_bytes for demand, _ in shares),
            disk_bytes=sum(demand.disk_bytes for demand, _ in shares),
            devices=tuple(device for device in whole.devices if device.id in mine),
            attributes=whole.attributes,
            ports=whole.ports,
        )

    def _refresh_reserved_machine(self, reservation: ReservationRow, name: NodeName) -> None:
        """Open or close the reservation's machine of this node, and withhold the node's busy devices."""
        pool, node = self.reservation_pools[reservation.id], self.nodes[name]
        if name in pool.machines:
            units = [unit for unit in reservation.units if name in unit.nodes]
            # A machine of which a unit leaves takes nothing new: which of its units a job inside occupies is not known.
            pool.set_open(name, bool(units) and node.is_schedulable and not any(unit.leaving for unit in units))
            pool.withhold(name, node.busy)
            self.changed_pools.add(reservation.id)

    def _on_attempt_ended_inside(self, reservation_id: ReservationId, name: NodeName) -> None:
        self.changed_pools.add(reservation_id)
        if reservation_id not in self.reservations_on.get(name, ()):  # the attempt took nothing and had no unit here
            self._rebuild_reserved_machine(self.reservations[reservation_id], name)

    def _on_ports_released(self, name: NodeName) -> None:
        """Mark all machines of this node as freed: they share its ports."""
        # A pool in which nothing was released does not notice it by itself.
        self.pool.on_ports_released(name)
        for reservation_id in self.reservations_on.get(name, ()):
            if name in self.reservation_pools[reservation_id].machines:
                self.reservation_pools[reservation_id].on_ports_released(name)
                self.changed_pools.add(reservation_id)


def counted_capacity(node: Node) -> Amount | None:
    """Return what a node adds to the capacity of the cluster; None for a lost node."""
    return capacity_of(node.capacity) if node.phase is not NodePhase.LOST else None


def _sort(rows: dict[Any, Any], key: Callable[[Any], Any]) -> None:
    ordered = sorted(rows.items(), key=lambda item: key(item[1]))
    rows.clear()
    rows.update(ordered)
