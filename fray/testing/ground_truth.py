"""Ground truth of a simulation, written by the fakes and workloads and compared by the checks with what Fray reports.

The launchers of the simulated machines record every process, where and how long it lived; the workloads (the user code
of the simulation) record every execution. Fray itself writes nothing here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from attrs import Factory, define, frozen

from fray.model.gangs import is_gang, port_names, slice_hosts
from fray.model.ids import AttemptId, JobId, SessionId, split_attempt
from fray.model.resources import Capacity, Demand
from fray.model.restart_policy import JITTER
from fray.model.specs import AttemptSpec, GangMember, JobSpec
from fray.scheduler.jobs.retries import restarts_with

CONTINUES_S = 0.1
"""Seconds within which a node that was stopped for longer than its lease, and continues, ends its processes."""


def secret_value(name: str) -> str:
    """Return the value of the secret of this name, as sent by every simulated driver."""
    return f"the-value-of-{name}"


@frozen
class Violation:
    """One broken promise."""

    promise: str
    """``P1`` to ``P7``, ``invariant`` (of the scheduler's state), or ``error`` (an unexpected one)."""
    time: float
    text: str
    causes: tuple[str, ...] = ()
    """Chain of causes, of a violation that is a wait: each line has the cause of the one before."""

    def __str__(self) -> str:
        first = f"{self.promise} at {self.time:.3f}: {self.text}"
        return "\n".join((first, *(f"    because {cause}" for cause in self.causes)))


@define
class ProcessRun:
    """One process of a job."""

    attempt_id: AttemptId
    machine: str
    spec: JobSpec
    devices: tuple[str, ...]
    began: float
    ended: float | None = None
    progressed_at: float | None = None
    """Time of its last progress report."""
    ports: tuple[int, ...] = ()
    how: str = ""
    """Kind of its end: ``by itself``, ``asked``, ``crashed`` (the process alone) or ``with its machine``."""

    @property
    def job_id(self) -> JobId:
        return split_attempt(self.attempt_id)[0]

    @property
    def generation(self) -> int:
        return split_attempt(self.attempt_id)[1]

    @property
    def member(self) -> int:
        return split_attempt(self.attempt_id)[2]


def _stage(spec: JobSpec) -> int:
    return spec.role.stage if spec.role else 0


@define
class DriverRun:
    """One process of a driver."""

    session: SessionId
    machine: str
    grace_s: float
    began: float
    ended: float | None = None
    vanished: bool = False
    """Killed without goodbye: its jobs have its grace period."""


@define
class Execution:
    """One execution of a token: of a call or a job's callable."""

    token: str
    incarnation: str
    began: float
    ended: float | None = None


@define
class GroundTruth:
    """Record of all processes and executions. ``clock`` is the virtual clock."""

    clock: Callable[[], float]
    processes: dict[AttemptId, ProcessRun] = Factory(dict)
    living: dict[AttemptId, ProcessRun] = Factory(dict)
    of_job: dict[JobId, list[ProcessRun]] = Factory(dict)
    drivers: dict[SessionId, DriverRun] = Factory(dict)
    runs: dict[str, list[Execution]] = Factory(dict)
    open_runs: dict[int, Execution] = Factory(dict)
    breaches: list[Violation] = Factory(list)
    gangs: dict[tuple[JobId, int], tuple[GangMember, ...]] = Factory(dict)
    """Peers as reported to the first member of each generation."""
    repeatable: set[str] = Factory(set)
    """Tokens that one incarnation may execute several times, by the word of their author."""
    unhealthy: set[AttemptId] = Factory(set)
    """Attempts whose health checks fail."""
    printed: Counter[AttemptId] = Factory(Counter)
    """Number of lines printed by each attempt."""
    slices: dict[str, str] = Factory(dict)
    """TPU slice by machine, for its hosts."""
    held_devices: set[tuple[str, str]] = Factory(set)
    """Machine and id of devices that an unauthorized process still holds."""
    stopped: set[str] = Factory(set)
    """Machines (and drivers, and the controller) whose processes are stopped now."""
    continued_at: dict[str, float] = Factory(dict)
    """Time at which each of them was continued last: what it does late by then, it could not do sooner."""
    offered: dict[str, Capacity] = Factory(dict)
    """Capacity of each machine, by name."""
    uses: Counter[str] = Factory(Counter)
    """Number of times that something happened which no event of the controller shows."""
    _not_begun: list[JobSpec] = Factory(list)
    """Members of job groups that were killed at their start."""
    owners: dict[JobId, str] = Factory(dict)
    """Session, attempt or job that owns each job which is not detached; filled by the scenario."""
    ghosts: int = 0
    """Number of executions in killed processes, which do not count."""

    def breach(self, promise: str, text: str, causes: Sequence[str] = ()) -> None:
        """Record a broken promise, once."""
        if not any(known.promise == promise and known.text == text for known in self.breaches):
            self.breaches.append(Violation(promise, self.clock(), text, tuple(causes)))

    # Processes of jobs

    def not_begun(self, spec: JobSpec) -> None:
        """Record that an attempt was killed before its process had begun."""
        if spec.job_group:
            self._not_begun.append(spec)

    def began(self, attempt_id: AttemptId, machine: str, spec: JobSpec, devices: tuple[str, ...]) -> None:
        """Record that a machine has started the process of an attempt."""
        process_run = ProcessRun(attempt_id, machine, spec, devices, self.clock())
        if attempt_id in self.processes:
            self.breach("P4", f"{attempt_id} was started again on {machine}")
        if process_run.spec.actor is None or not process_run.spec.actor.may_overlap:
            self._check_successor(process_run)
        self._check_back_off(process_run)
        self._check_siblings(process_run)
        self._check_stage(process_run)
        self._check_devices(process_run)
        self._check_slices(process_run)
        self._check_room(process_run)
        self.processes[attempt_id] = self.living[attempt_id] = process_run
        self.of_job.setdefault(process_run.job_id, []).append(process_run)

    def check_attempt_spec(self, attempt: AttemptSpec) -> None:
        """Check the ports, gang and secrets that a new process gets."""
        self._check_ports(attempt)
        self._check_peers(attempt)
        for name in attempt.spec.secrets.values():
            if attempt.secrets.get(name) != secret_value(name):
                self.breach("P7", f"{attempt.attempt_id} began without its secret {name}")

    def _check_ports(self, attempt: AttemptSpec) -> None:
        process_run = self.living[attempt.attempt_id]
        process_run.ports = tuple(attempt.ports.values())
        if sorted(attempt.ports) != sorted(port_names(attempt.spec)):
            self.breach("P6", f"{attempt.attempt_id} asked for ports {port_names(attempt.spec)}, got {attempt.ports}")
        for other in self.on(process_run.machine):
            shared = sorted(set(other.ports) & set(process_run.ports)) if other is not process_run else []
            if shared:
                self.breach(
                    "P6", f"ports {shared} of {process_run.machine} given to {other.attempt_id}, {attempt.attempt_id}"
                )

    def _check_peers(self, attempt: AttemptSpec) -> None:
        """Check that all members of a gang get the same peers, each with its own ports."""
        if not is_gang(attempt.spec):
            return
        job_id, generation, member = split_attempt(attempt.attempt_id)
        first = self.gangs.setdefault((job_id, generation), attempt.members)
        mine = attempt.members[member].ports if member < len(attempt.members) else None
        if attempt.members != first or mine != attempt.ports or len(attempt.members) != attempt.spec.members:
            self.breach("P6", f"{attempt.attempt_id} got other peers than its gang: {attempt.members}, not {first}")

    def ended(self, attempt_id: AttemptId, how: str) -> None:
        """Record that a process has ended."""
        process_run = self.living.pop(attempt_id, None)
        if process_run is not None:
            process_run.ended, process_run.how = self.clock(), how

    def _check_successor(self, new: ProcessRun) -> None:
        """Check that no two generations live at once, and none starts after its successor.

        A process that is stopped for longer than the lease cannot end in time, but does nothing either;
        `_check_not_replaced` checks that it does nothing when it continues, until its node ends it.
        """
        for old in self.of_job.get(new.job_id, ()):
            is_stopped = old.machine in self.stopped
            is_stopped |= self.clock() < self.continued_at.get(old.machine, -math.inf) + CONTINUES_S
            if old.ended is None and old.generation != new.generation and not is_stopped:
                beside = f"{old.attempt_id} processes on {old.machine}"
                self.breach("P5", f"{new.attempt_id} begins on {new.machine}, and {beside}")
            if old.generation > new.generation:
                self.breach("P5", f"{new.attempt_id} begins on {new.machine} after {old.attempt_id} began")

    def _check_back_off(self, new: ProcessRun) -> None:
        """Check that an individual restart respects its back-off."""
        wait_s = new.spec.actor.backoff_s if new.spec.actor is not None and new.spec.siblings is None else 0.0
        wait_s *= 1 - JITTER
        old = self._before(new)
        # What was ended on request, as for a preemption, has not failed.
        if old is None or old.ended is None or old.how == "asked":
            return
        if new.began < old.ended + wait_s:
            self.breach("P2", f"{new.attempt_id} begins {new.began - old.ended:.3f} s after {old.attempt_id} ended")

    def _check_siblings(self, new: ProcessRun) -> None:
        """Check that all siblings that restart together have ended before the first of them starts."""
        mine, old = new.spec.siblings, self._before(new)
        if mine is None or old is None or old.ended is None:
            return
        for other in self.living.values():
            theirs = other.spec.siblings
            concerned = theirs is not None and theirs.group_id == mine.group_id and restarts_with(mine, theirs)
            if concerned and other.began < old.ended:
                self.breach("P2", f"{new.attempt_id} restarts, and its sibling {other.attempt_id} has not ended")

    def _check_stage(self, new: ProcessRun) -> None:
        """Check that members of a later stage of a job group start after a member of an earlier one."""
        group, stage = new.spec.job_group, _stage(new.spec)
        if not group or not stage:
            return
        begun = (other.spec for other in self.processes.values())
        # A member that was killed at its start has no process; its group may absorb that, and go on to the next stage.
        if not any(each.job_group == group and _stage(each) < stage for each in (*begun, *self._not_begun)):
            self.breach("P6", f"{new.attempt_id} of stage {stage} begins before anything of an earlier one")

    def _before(self, new: ProcessRun) -> ProcessRun | None:
        """Return the process of the last generation before this one."""
        return max(
            (old for old in self.of_job.get(new.job_id, ()) if old.generation < new.generation),
            key=lambda old: old.generation,
            default=None,
        )

    def _check_devices(self, new: ProcessRun) -> None:
        held = [device for device in new.devices if (new.machine, device) in self.held_devices]
        if held:
            self.breach("P6", f"{held} of {new.machine} given to {new.attempt_id} while another process holds them")
        for other in self.on(new.machine):
            shared = sorted(set(other.devices) & set(new.devices))
            if shared:
                self.breach("P6", f"{shared} of {new.machine} given to {other.attempt_id} and {new.attempt_id}")

    def _check_slices(self, new: ProcessRun) -> None:
        """Check that members of one slice are on hosts of the same slice, and no other members of their job are."""
        hosts = slice_hosts(new.spec)
        for other in self.of_job.get(new.job_id, ()) if hosts > 1 else ():
            if other.generation == new.generation and other.ended is None:
                is_mate = other.member // hosts == new.member // hosts
                if (self.slices.get(other.machine) == self.slices.get(new.machine)) is not is_mate:
                    self.breach("P6", f"{new.attempt_id} and {other.attempt_id}: slices are mixed, or shared")

    def _check_room(self, new: ProcessRun) -> None:
        """Check that the processes of a machine do not exceed its capacity, beside CPUs that are lent."""
        capacity, used, mine = self.offered.get(new.machine), self.load(new.machine), new.spec.demand
        if capacity is None:
            return
        asked_milli = used.cpu_milli + mine.cpu_milli
        cpu_milli = asked_milli - self._lent_at_most(new)
        self.uses["lent CPUs"] += asked_milli > capacity.cpu_milli >= cpu_milli
        memory_bytes = used.memory_bytes + mine.memory_bytes
        if cpu_milli > capacity.cpu_milli or memory_bytes > capacity.memory_bytes:
            self.breach("P6", f"{new.machine} is overcommitted by {new.attempt_id}")

    def _lent_at_most(self, new: ProcessRun) -> int:
        """Return the thousandths of CPUs of the machine's processes that have others below them there."""
        here = {process_run.attempt_id: process_run for process_run in (*self.on(new.machine), new)}
        lenders = set[str]()
        for process_run in here.values():
            owner = self.owners.get(process_run.job_id)
            while owner in self.processes:
                lenders.add(owner)
                owner = self.owners.get(self.processes[owner].job_id)
        return sum(process_run.spec.demand.cpu_milli for id_, process_run in here.items() if id_ in lenders)

    def on(self, machine: str) -> Iterator[ProcessRun]:
        """Return the living processes of a machine."""
        return (process_run for process_run in self.living.values() if process_run.machine == machine)

    def load(self, machine: str) -> Demand:
        """Return the sum of resources granted to these processes."""
        demands = [process_run.spec.demand for process_run in self.on(machine)]
        return Demand(
            cpu_milli=sum(demand.cpu_milli for demand in demands),
            memory_bytes=sum(demand.memory_bytes for demand in demands),
        )

    # Drivers

    def driver_began(self, session: SessionId, machine: str, grace_s: float) -> None:
        self.drivers[session] = DriverRun(session, machine, grace_s, self.clock())

    def driver_ended(self, session: SessionId, vanished: bool) -> None:
        process_run = self.drivers.get(session)
        if process_run is not None and process_run.ended is None:
            process_run.ended, process_run.vanished = self.clock(), vanished

    # Executions

    def is_alive(self, incarnation: str) -> bool:
        """Return whether the process of this attempt or driver session is alive."""
        if incarnation in self.living:
            return True
        driver = self.drivers.get(incarnation)
        return driver is not None and driver.ended is None

    def run_begins(self, token: str, incarnation: str) -> Execution:
        """Record that user code starts to execute ``token``."""
        run = Execution(token, incarnation, self.clock())
        if not self.is_alive(incarnation):
            self.ghosts += 1
            return run
        self._check_not_replaced(run)
        earlier = self.runs.setdefault(token, [])
        if token not in self.repeatable and any(other.incarnation == incarnation for other in earlier):
            self.breach("P4", f"{token} was executed twice by {incarnation}")
        earlier.append(run)
        self.open_runs[id(run)] = run
        return run

    def run_ends(self, run: Execution) -> None:
        """Record that an execution returned, raised or was cancelled."""
        if self.open_runs.pop(id(run), None) is not None:
            run.ended = self.clock()

    def _check_not_replaced(self, run: Execution) -> None:
        mine = self.processes.get(run.incarnation)
        if mine is None:
            return
        newest = max(process_run.generation for process_run in self.of_job[mine.job_id])
        if mine.spec.actor is not None and mine.spec.actor.may_overlap:
            return
        if newest > mine.generation:
            self.breach("P5", f"{run.token} was executed by {run.incarnation} after generation {newest} began")

    def times_run(self, token: str) -> int:
        return len(self.runs.get(token, ()))
