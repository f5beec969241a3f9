"""Hypothetical changes of a pool.

They answer questions such as whether something would fit if certain jobs had ended. Changes are undone on leaving,
unless `HypotheticalPool.commit` was called. Only public methods of `MachinePool` are used, in pairs: what was released
is taken again, what was placed is given back. The order of port numbers and the pool's counters are restored, too, so
that asking has no effect. The cost is twice that of the changes; the rest of the pool is never walked over.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from types import TracebackType
from typing import Any

from fray.model.ids import JobId, NodeName
from fray.model.resources import Demand
from fray.scheduler.pool.machine import fit
from fray.scheduler.pool.requests import MemberShare, Placement, PlacementRequest
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables


class HypotheticalPool:
    """Context manager for hypothetical changes.

    Args:
        reservation: whose machines are changed; empty for the cluster's.
    """

    def __init__(self, state: Tables, reservation: str = "") -> None:
        self.state, self.reservation = state, reservation
        self.pool = state.pool_for(reservation)
        self._undo_log: list[tuple[Any, ...]] = []
        """Functions with their arguments."""
        self._port_marks: dict[NodeName, int] = {}
        self._stamps: dict[NodeName, int] = {}
        """Stamps of machines before their first change, of those that were changed before anything was placed."""
        self._has_placed = False
        self.ended_jobs: dict[str, None] = {}
        """Jobs whose machines have been freed."""

    def __enter__(self) -> HypotheticalPool:
        pool = self.pool
        # Counters that placement passes compare: a question must not look like a change to them.
        self._before, self._freed = (pool.now, pool.version, pool.changes), dict(pool.freed)
        pool.now = self.state.now
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Last change first: each undo finds the pool as its change has left it.
        self.undo_to(0)
        # What was calculated of these machines before holds again.
        for name, stamp in self._stamps.items():
            self.pool.machines[name].stamp = stamp
        for name, mark in self._port_marks.items():
            self.pool.machines[name].ports.reset(mark)
        self.pool.now, self.pool.version, self.pool.changes = self._before
        self.pool.freed.clear()
        self.pool.freed.update(self._freed)

    @property
    def mark(self) -> int:
        """Position in the undo log for `undo_to`."""
        return len(self._undo_log)

    def undo_to(self, mark: int) -> None:
        while len(self._undo_log) > mark:
            function, *args = self._undo_log.pop()
            function(*args)

    # As if

    def end(self, jobs: Iterable[JobRow]) -> None:
        """Free the machines of these jobs in this pool."""
        state, machines, ended = self.state, self.pool.machines, list[JobId]()
        shares: dict[NodeName, list[MemberShare]] = {}
        for job in jobs:
            job_id = job.job_id
            if job_id in self.ended_jobs:
                continue
            # Marked as ended in any case, so that it is not counted twice; machines of another pool are not freed here.
            self.ended_jobs[job_id] = None
            ended.append(job_id)
            for node, share in state.machine_shares(job) if job.spec.reservation_id == self.reservation else ():
                if node in shares:
                    shares[node].append(share)
                elif node in machines:
                    shares[node] = [share]
        self._undo_log.append((self._restore_jobs, ended))
        # One change for each machine: hundreds of jobs end on a few dozens of them.
        for node, gone in shares.items():
            if any(ports for _, _, ports in gone):
                self._mark_ports((node,))
            self._note_stamp(node)
            self.pool.release_all(node, gone)
            self._undo_log.append((self.pool.take_all, node, gone))

    def _restore_jobs(self, job_ids: Iterable[JobId]) -> None:
        for job_id in job_ids:
            del self.ended_jobs[job_id]

    def free(self, node: NodeName, demand: Demand, devices: tuple[str, ...], ports: tuple[int, ...] = ()) -> None:
        """Free so much of a machine."""
        if ports:
            self._mark_ports((node,))
        self._note_stamp(node)
        self.pool.release(node, demand, devices, ports)
        self._undo_log.append((self.pool.take, node, demand, devices, ports))

    def take(self, node: NodeName, demand: Demand, devices: tuple[str, ...], ports: tuple[int, ...] = ()) -> None:
        """Take so much of a machine."""
        if ports:
            self._mark_ports((node,))
        self._note_stamp(node)
        self.pool.take(node, demand, devices, ports)
        self._undo_log.append((self.pool.release, node, demand, devices, ports))

    def take_claims(self, but: str = "") -> None:
        """Take what applicants have claimed in this pool, all but one."""
        for claim in self.state.claims.values():
            is_others = claim.applicant != but and claim.reservation == self.reservation
            for share in claim.shares if is_others else ():
                machine = self.pool.machines.get(share.node)
                for _ in range(share.members):
                    # As far as it fits: the machine may have lost devices since the claim was made.
                    grant = fit(share.demand, machine) if machine is not None else None
                    if grant is not None:
                        self.take(grant.node, share.demand, grant.devices, grant.ports)

    def place(
        self, request: PlacementRequest, closed: Container[NodeName] = (), preferred: Sequence[Sequence[NodeName]] = ()
    ) -> tuple[Placement, ...] | None:
        """Place a request as `MachinePool.place`, until `undo_to`."""
        # Which machines get the request is not known before, so the port order of all of them is recorded.
        if any(demand.ports for demand in request.demands):
            self._mark_ports(self.pool.machines)
        placed = self.pool.place(request, closed, preferred)
        if placed is not None:
            self._has_placed = True
            self._undo_log.append((self.pool.give_back, request, placed))
        return placed

    def fits(self, request: PlacementRequest, closed: Container[NodeName] = ()) -> bool:
        """Return whether the request could be placed."""
        mark = self.mark
        found = self.place(request, closed) is not None
        self.undo_to(mark)
        return found

    def commit(self) -> None:
        """Keep all changes made so far."""
        self._undo_log.clear()
        self._port_marks.clear()
        self._stamps.clear()
        # From here on these changes are real, and the exit must not take their counters back.
        self._before = self._before[0], self.pool.version, self.pool.changes
        self._freed = dict(self.pool.freed)

    def _note_stamp(self, name: NodeName) -> None:
        # After a placement the stamp may be one of a machine as it is with that.
        if not self._has_placed and name not in self._stamps:
            self._stamps[name] = self.pool.machines[name].stamp

    def _mark_ports(self, names: Iterable[NodeName]) -> None:
        """Record the order of the next port numbers, which releasing does not restore."""
        for name in names:
            if name not in self._port_marks:
                self._port_marks[name] = self.pool.machines[name].ports.mark()
