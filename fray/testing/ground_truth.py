"""What really happened, as against what Fray says: written by the fakes and the errands, read by the checks.

The launchers of the simulated machines write down every process that lived, where and how long; the errands (the user
code of the simulation) write down every execution. Fray itself writes nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from attrs import Factory, define, frozen

from fray.model.gangs import is_gang, port_names, slice_hosts
from fray.model.ids import AttemptId, JobId, SessionId, split_attempt
from fray.model.resources import Capacity, Demand
from fray.model.restart_policy import JITTER
from fray.model.specs import AttemptSpec, GangMember, JobSpec
from fray.scheduler.jobs.retries import restarts_with


def secret_value(name: str) -> str:
    """Of the secret of this name, as every driver of a simulation knows it."""
    return f"the-value-of-{name}"


@frozen
class Violation:
    """One broken promise."""

    promise: str
    """``P1`` to ``P7``, ``law`` (an invariant of the state), or ``house`` (an error nobody asked for)."""
    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.promise} at {self.time:.3f}: {self.text}"


@define
class ProcessRun:
    """One process of a job."""

    attempt_id: AttemptId
    machine: str
    spec: JobSpec
    devices: tuple[str, ...]
    began: float
    ended: float | None = None
    beaten: float | None = None
    """When it last said how far it is."""
    ports: tuple[int, ...] = ()
    how: str = ""
    """``by itself``, ``asked``, ``crashed`` (the process alone) or ``with its machine``."""

    @property
    def job_id(self) -> JobId:
        return split_attempt(self.attempt_id)[0]

    @property
    def generation(self) -> int:
        return split_attempt(self.attempt_id)[1]

    @property
    def member(self) -> int:
        return split_attempt(self.attempt_id)[2]


def _of(life: ProcessRun, group: str) -> bool:
    return life.spec.job_group == group


def _stage(life: ProcessRun) -> int:
    return life.spec.role.stage if life.spec.role else 0


@define
class DriverLife:
    """One process of a driver."""

    session: SessionId
    machine: str
    grace_s: float
    began: float
    ended: float | None = None
    vanished: bool = False
    """Killed without a word: what it owns has its grace."""


@define
class Execution:
    """One execution of a token: a call or a job's callable."""

    token: str
    incarnation: str
    began: float
    ended: float | None = None


@define
class GroundTruth:
    """The book. ``clock`` is the virtual one."""

    clock: Callable[[], float]
    lives: dict[AttemptId, ProcessRun] = Factory(dict)
    living: dict[AttemptId, ProcessRun] = Factory(dict)
    of_job: dict[JobId, list[ProcessRun]] = Factory(dict)
    drivers: dict[SessionId, DriverLife] = Factory(dict)
    runs: dict[str, list[Execution]] = Factory(dict)
    open_runs: dict[int, Execution] = Factory(dict)
    breaches: list[Violation] = Factory(list)
    gangs: dict[tuple[JobId, int], tuple[GangMember, ...]] = Factory(dict)
    """What the first member of each generation to begin was told of its peers."""
    sick: set[AttemptId] = Factory(set)
    """Attempts that answer badly when they are asked for their health."""
    printed: Counter[AttemptId] = Factory(Counter)
    """Lines."""
    slices: dict[str, str] = Factory(dict)
    """Machines that are hosts of a TPU slice, and of which."""
    gripped: set[tuple[str, str]] = Factory(set)
    """Machine and id of devices that somebody holds who has no right to."""
    stopped: set[str] = Factory(set)
    """Machines (and drivers, and the controller) of which no process gets a turn now."""
    offered: dict[str, Capacity] = Factory(dict)
    """What each machine has, by name."""
    ghosts: int = 0
    """Steps of code whose process had been killed; they count for nothing."""

    def breach(self, promise: str, text: str) -> None:
        """Write a broken promise down, once."""
        if not any(known.promise == promise and known.text == text for known in self.breaches):
            self.breaches.append(Violation(promise, self.clock(), text))

    # Processes of jobs

    def began(self, attempt_id: AttemptId, machine: str, spec: JobSpec, devices: tuple[str, ...]) -> None:
        """A machine has started the process of an attempt."""
        life = ProcessRun(attempt_id, machine, spec, devices, self.clock())
        if attempt_id in self.lives:
            self.breach("P4", f"{attempt_id} was started again on {machine}")
        if life.spec.actor is None or not life.spec.actor.may_overlap:
            self._check_successor(life)
        self._check_back_off(life)
        self._check_siblings(life)
        self._check_stage(life)
        self._check_devices(life)
        self._check_slices(life)
        self._check_room(life)
        self.lives[attempt_id] = self.living[attempt_id] = life
        self.of_job.setdefault(life.job_id, []).append(life)

    def told(self, ticket: AttemptSpec) -> None:
        """What a process that begins is told of its ports, its gang and its secrets."""
        self._check_ports(ticket)
        self._check_peers(ticket)
        for name in ticket.spec.secrets.values():
            if ticket.secrets.get(name) != secret_value(name):
                self.breach("P7", f"{ticket.attempt_id} began without its secret {name}")

    def _check_ports(self, ticket: AttemptSpec) -> None:
        life = self.living[ticket.attempt_id]
        life.ports = tuple(ticket.ports.values())
        if sorted(ticket.ports) != sorted(port_names(ticket.spec)):
            self.breach("P6", f"{ticket.attempt_id} asked for ports {port_names(ticket.spec)}, got {ticket.ports}")
        for other in self.on(life.machine):
            shared = sorted(set(other.ports) & set(life.ports)) if other is not life else []
            if shared:
                self.breach("P6", f"ports {shared} of {life.machine} given to {other.attempt_id}, {ticket.attempt_id}")

    def _check_peers(self, ticket: AttemptSpec) -> None:
        """All members of a gang are told the same; that of each one is what it has."""
        if not is_gang(ticket.spec):
            return
        job_id, generation, member = split_attempt(ticket.attempt_id)
        first = self.gangs.setdefault((job_id, generation), ticket.members)
        mine = ticket.members[member].ports if member < len(ticket.members) else None
        if ticket.members != first or mine != ticket.ports or len(ticket.members) != ticket.spec.members:
            self.breach("P6", f"{ticket.attempt_id} was told other peers than its gang: {ticket.members}, not {first}")

    def ended(self, attempt_id: AttemptId, how: str) -> None:
        """Nothing of it lives any more."""
        life = self.living.pop(attempt_id, None)
        if life is not None:
            life.ended, life.how = self.clock(), how

    def _check_successor(self, new: ProcessRun) -> None:
        """No generation lives beside another, and none comes after its successor.

        A process that is stopped for longer than the lease cannot end in time. It does nothing, either: whether it
        does when it goes on, `_check_not_replaced` sees.
        """
        for old in self.of_job.get(new.job_id, ()):
            if old.ended is None and old.generation != new.generation and old.machine not in self.stopped:
                beside = f"{old.attempt_id} lives on {old.machine}"
                self.breach("P5", f"{new.attempt_id} begins on {new.machine}, and {beside}")
            if old.generation > new.generation:
                self.breach("P5", f"{new.attempt_id} begins on {new.machine} after {old.attempt_id} began")

    def _check_back_off(self, new: ProcessRun) -> None:
        """A restart of its own comes no sooner than its back-off allows."""
        wait_s = new.spec.actor.backoff_s if new.spec.actor is not None and new.spec.siblings is None else 0.0
        wait_s *= 1 - JITTER
        old = self._before(new)
        if old is not None and old.ended is not None and new.began < old.ended + wait_s:
            self.breach("P2", f"{new.attempt_id} begins {new.began - old.ended:.3f} s after {old.attempt_id} ended")

    def _check_siblings(self, new: ProcessRun) -> None:
        """Those that begin anew with a sibling have all ended before the first of them begins."""
        mine, old = new.spec.siblings, self._before(new)
        if mine is None or old is None or old.ended is None:
            return
        for other in self.living.values():
            theirs = other.spec.siblings
            concerned = theirs is not None and theirs.group_id == mine.group_id and restarts_with(mine, theirs)
            if concerned and other.began < old.ended:
                self.breach("P2", f"{new.attempt_id} begins anew, and its sibling {other.attempt_id} has not ended")

    def _check_stage(self, new: ProcessRun) -> None:
        """Of a job group, what is of a later stage begins behind something of an earlier one."""
        group, stage = new.spec.job_group, new.spec.role.stage if new.spec.role else 0
        if group and stage and not any(_stage(other) < stage for other in self.lives.values() if _of(other, group)):
            self.breach("P6", f"{new.attempt_id} of stage {stage} begins before anything of an earlier one")

    def _before(self, new: ProcessRun) -> ProcessRun | None:
        """Its last incarnation."""
        return max(
            (old for old in self.of_job.get(new.job_id, ()) if old.generation < new.generation),
            key=lambda old: old.generation,
            default=None,
        )

    def _check_devices(self, new: ProcessRun) -> None:
        gripped = [device for device in new.devices if (new.machine, device) in self.gripped]
        if gripped:
            self.breach("P6", f"{gripped} of {new.machine} given to {new.attempt_id} while somebody still holds them")
        for other in self.on(new.machine):
            shared = sorted(set(other.devices) & set(new.devices))
            if shared:
                self.breach("P6", f"{shared} of {new.machine} given to {other.attempt_id} and {new.attempt_id}")

    def _check_slices(self, new: ProcessRun) -> None:
        """Those of one run of members are on hosts of one slice, and no others of their job are."""
        hosts = slice_hosts(new.spec)
        for other in self.of_job.get(new.job_id, ()) if hosts > 1 else ():
            if other.generation == new.generation and other.ended is None:
                is_mate = other.member // hosts == new.member // hosts
                if (self.slices.get(other.machine) == self.slices.get(new.machine)) is not is_mate:
                    self.breach("P6", f"{new.attempt_id} and {other.attempt_id}: slices are mixed, or shared")

    def _check_room(self, new: ProcessRun) -> None:
        """All that lives on a machine has room on it."""
        capacity, used, mine = self.offered.get(new.machine), self.load(new.machine), new.spec.demand
        if capacity is None:
            return
        cpu_milli, memory_bytes = used.cpu_milli + mine.cpu_milli, used.memory_bytes + mine.memory_bytes
        if cpu_milli > capacity.cpu_milli or memory_bytes > capacity.memory_bytes:
            self.breach("P6", f"{new.machine} is given away more than once: {new.attempt_id} is one too many")

    def on(self, machine: str) -> Iterator[ProcessRun]:
        """Processes that live on a machine."""
        return (life for life in self.living.values() if life.machine == machine)

    def load(self, machine: str) -> Demand:
        """What those processes have been granted together."""
        demands = [life.spec.demand for life in self.on(machine)]
        return Demand(
            cpu_milli=sum(demand.cpu_milli for demand in demands),
            memory_bytes=sum(demand.memory_bytes for demand in demands),
        )

    # Drivers

    def driver_began(self, session: SessionId, machine: str, grace_s: float) -> None:
        self.drivers[session] = DriverLife(session, machine, grace_s, self.clock())

    def driver_ended(self, session: SessionId, vanished: bool) -> None:
        life = self.drivers.get(session)
        if life is not None and life.ended is None:
            life.ended, life.vanished = self.clock(), vanished

    # Executions

    def lives_now(self, incarnation: str) -> bool:
        """Whether the process of this name (attempt or driver session) has not been killed."""
        if incarnation in self.living:
            return True
        driver = self.drivers.get(incarnation)
        return driver is not None and driver.ended is None

    def run_begins(self, token: str, incarnation: str) -> Execution:
        """User code begins to execute ``token``."""
        run = Execution(token, incarnation, self.clock())
        if not self.lives_now(incarnation):
            self.ghosts += 1
            return run
        self._check_not_replaced(run)
        earlier = self.runs.setdefault(token, [])
        if any(other.incarnation == incarnation for other in earlier):
            self.breach("P4", f"{token} was executed twice by {incarnation}")
        earlier.append(run)
        self.open_runs[id(run)] = run
        return run

    def run_ends(self, run: Execution) -> None:
        """It returned, raised or was cancelled."""
        if self.open_runs.pop(id(run), None) is not None:
            run.ended = self.clock()

    def _check_not_replaced(self, run: Execution) -> None:
        mine = self.lives.get(run.incarnation)
        if mine is None:
            return
        newest = max(life.generation for life in self.of_job[mine.job_id])
        if mine.spec.actor is not None and mine.spec.actor.may_overlap:
            return
        if newest > mine.generation:
            self.breach("P5", f"{run.token} was executed by {run.incarnation} after generation {newest} began")

    def times_run(self, token: str) -> int:
        return len(self.runs.get(token, ()))
