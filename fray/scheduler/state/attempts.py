"""Attempts in the tables: what they take of their machines, and who is charged for it."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define

from fray.model.ids import JobId, attempt_id
from fray.model.resources import Demand
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.state.nodes import MachineTables
from fray.scheduler.state.rows import AttemptRow, JobRow, TakenPort


@define
class GenerationCount:
    """Members of a job's generation."""

    living: int = 0
    ran: int = 0


class AttemptTables(MachineTables):
    """What `Tables` knows of attempts."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.generation_counts: dict[JobId, GenerationCount] = {}

    def attempt_records(self, job: JobRow) -> Iterator[AttemptRow]:
        """All attempts on record, oldest first."""
        for generation in range(job.oldest, job.generation + 1):
            for member in range(job.spec.members):
                attempt = self.attempts.get(attempt_id(job.job_id, generation, member))
                if attempt is not None:
                    yield attempt

    def members(self, job: JobRow) -> list[AttemptRow]:
        """Attempts of the generation that is there, empty while the job is queued."""
        ids = (attempt_id(job.job_id, job.generation, member) for member in range(job.spec.members))
        return [self.attempts[id_] for id_ in ids if id_ in self.attempts]

    def living_members(self, job: JobRow) -> list[AttemptRow]:
        return [attempt for attempt in self.members(job) if attempt.living]

    def add_attempt(self, attempt: AttemptRow) -> None:
        """Its share of the machine is taken already (`Pool.place`)."""
        self.attempts[attempt.attempt_id] = attempt
        self.generation_counts[attempt.job_id].living += 1
        self.on_node[attempt.node][attempt.attempt_id] = None
        self.fleet.on_node_used(attempt.node, self.now)
        self._charge_attempt(attempt, 1)
        self.touch("attempt", attempt.attempt_id)

    def _charge_attempt(self, attempt: AttemptRow, times: int) -> None:
        job = self.jobs[attempt.job_id]
        if not job.spec.reservation_id:  # that is charged as a whole
            self.charge(*self.attempt_charge(job, attempt), times)

    def attempt_charge(self, job: JobRow, attempt: AttemptRow) -> tuple[Tenant, Demand, str]:
        tenant = self.shares.tenant(job.spec.user, job.spec.namespace)
        return tenant, self.demand(job), self.variant_of(attempt.node, attempt.devices)

    def _index_attempt(self, attempt: AttemptRow) -> None:
        job = self.jobs[attempt.job_id]
        tally = self.generation_counts[attempt.job_id]
        tally.ran += attempt.ran and attempt.generation == job.generation
        if attempt.living:
            tally.living += 1
            self.ensure_machine_inside(job.spec.reservation_id, attempt.node)
            self.on_node[attempt.node][attempt.attempt_id] = None
            pool = self.pool_for(job.spec.reservation_id)
            pool.take(attempt.node, self.demand(job), attempt.devices, attempt.ports.values())
            if not job.spec.reservation_id:
                self.shares.count_members(*self.attempt_charge(job, attempt), 1, self.now)

    def release_attempt(self, attempt: AttemptRow) -> None:
        """It has ended: its share of the machine is free."""
        job = self.jobs[attempt.job_id]
        self.generation_counts[attempt.job_id].living -= 1
        del self.on_node[attempt.node][attempt.attempt_id]
        if not self.on_node[attempt.node]:
            self.newly_empty[attempt.node] = None
        self.fleet.on_node_used(attempt.node, self.now)
        pool = self.pool_for(job.spec.reservation_id)
        pool.release(attempt.node, self.demand(job), attempt.devices, attempt.ports.values())
        pool.freed_count += 1
        self._charge_attempt(attempt, -1)
        if job.spec.reservation_id:
            self.on_attempt_ended_inside(job.spec.reservation_id, attempt.node)
        if attempt.ports:
            self.on_ports_released(attempt.node)
        self.touch("attempt", attempt.attempt_id)

    def drop_attempt(self, attempt: AttemptRow) -> None:
        del self.attempts[attempt.attempt_id]
        self.touch("attempt", attempt.attempt_id)

    # Ports

    def _index_ports(self) -> None:
        """Go on after the numbers that were given last."""
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.placed_at):
            if attempt.node in self.pool.machines:
                self.pool.machines[attempt.node].ports.advance_past(attempt.ports.values())

    def avoid_ports(self, attempt: AttemptRow, until: float) -> None:
        """A stranger holds one of its ports: others are given before them until then."""
        node = self.nodes[attempt.node]
        kept = {taken.port: taken.until for taken in node.taken_ports if taken.until > self.now}
        kept |= dict.fromkeys(attempt.ports.values(), until)
        node.taken_ports = tuple(TakenPort(port, at) for port, at in kept.items())
        self.pool.machines[node.name].ports.avoided = kept
        self.touch("node", node.name)
