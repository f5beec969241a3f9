"""Archives of ``fray report`` in the simulator: ``python -m tests.simulation --report ARCHIVE``.

The job of the archive runs again on simulated machines like those it ran on. Its processes take as long and end as
recorded, and its machines join and are lost at the recorded times; what follows from that is decided by the scheduler,
and compared with the record. Times begin with the first placement.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import trio
from attrs import Factory, define, evolve, frozen

from fray import Cluster, __version__
from fray.cli.inspection.report import FORMAT
from fray.controller.connections.validation import check_capacity, check_id
from fray.errors import FrayError
from fray.model.ids import AttemptId, NodeName, split_attempt
from fray.model.join_tokens import MACHINE_ATTRIBUTE
from fray.model.messages.client import Launch, NodeInfo
from fray.model.messages.history import AttemptRecord, NodeRecord
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, Device, PortRange
from fray.model.specs import EndReason, EntryKind, JobInfo, JobSpec, JobState, Outcome
from fray.model.text import visible_text
from fray.net.codec import from_json
from fray.scheduler.effects import Effect, Event
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.testing import fakes, sim_devices
from fray.testing.fakes import SimNetwork
from fray.testing.ground_truth import GroundTruth, ProcessRun
from fray.testing.seed import Seed, Trace
from fray.testing.sim_cluster import EPOCH_S, DriverProcess, SimCluster, open_sim_cluster
from tests.simulation.run import run_in_virtual_time

T = TypeVar("T")
LIMIT_BYTES = 64 * 1024**2
"""Largest archive, unpacked."""
MEMBERS_LIMIT = 32
ATTEMPTS_LIMIT = 2_000
SPAN_LIMIT_S = 14 * 86_400.0
"""Longest time from the first placement to the last end."""
LEAD_S = 10.0
"""Simulated seconds before the first placement, in which the first machines join."""
NEAR_S = 10.0
"""Difference of two times that is not marked: real processes take seconds to start."""
LEASE_MIN_S = 60.0
"""Shorter times until a machine was given up are those of a restart of its node."""
DISK_BYTES = 2**50
"""Disk of each machine, which is not in the archive; as `PORTS`."""
PORTS = PortRange(20_000, 10_000)
ON_REQUEST = (EndReason.STOPPED, EndReason.OWNER_ENDED)
BY_OTHERS = {
    EndReason.PREEMPTED: "was preempted: what it made room for is not in the archive",
    EndReason.SIBLING: "ended with another member of its supervised group, which is not in the archive",
    EndReason.GROUP: "ended with its job group, whose other jobs are not in the archive",
}
"""Ends that are due to what the archive does not have."""
NOT_THERE = (
    "not in the archive, and not replayed: other jobs and their load (waits for room), machines on which it never ran, "
    "policy and quotas, code, environment, health checks and calls"
)


class BadReport(Exception):
    """An archive cannot be replayed; the message says why."""


# Reading -------------------------------------------------------------------------------------------------------------


@frozen
class _Machines:
    nodes: tuple[NodeInfo, ...]
    gone: tuple[NodeRecord, ...]


@frozen
class _Attempts:
    attempts: tuple[AttemptRecord, ...]


@frozen
class _Versions:
    format: int = 0
    fray: str = ""
    written_at: float = 0.0


@frozen
class MachineChange:
    """A machine joins, or is lost (``capacity`` is None). Ordered by time, and losses come first."""

    at: float
    node: NodeName
    capacity: Capacity | None = None


@frozen
class Report:
    """Content of an archive, as far as it is replayed."""

    job: JobInfo
    spec: JobSpec
    attempts: dict[AttemptId, AttemptRecord]
    changes: tuple[MachineChange, ...]
    versions: _Versions

    @property
    def began_at(self) -> float:
        """Time of the first placement."""
        return min(each.placed_at for each in self.attempts.values())

    @property
    def ended_at(self) -> float:
        """Time of the job's end, or of the archive if it had not ended."""
        return self.versions.written_at if self.job.end_time is None else self.job.end_time


def read(path: Path) -> Report:
    """Return what an archive has of its job. Nothing is written to disk, and its content is not trusted.

    Raises:
        BadReport: another file, or an archive of a job that cannot run alone on simulated machines.
    """
    files = _members(path)
    versions = _decoded(files, "versions.json", _Versions)
    if versions.format != FORMAT:
        raise BadReport(f"it has format {versions.format}, and this is the reader of format {FORMAT}")
    found = _decoded(files, "attempts.json", _Attempts, '{"attempts": %s}')
    attempts = {each.attempt_id: each for each in found.attempts}
    machines = _decoded(files, "machines.json", _Machines)
    job, spec = _decoded(files, "job.json", JobInfo), _decoded(files, "request.json", JobSpec)
    _check(job, spec, attempts)
    report = Report(job, spec, attempts, tuple(_changes(spec, attempts, machines)), versions)
    times = [each.at for each in report.changes] + [report.began_at, report.ended_at]
    times += [at for each in attempts.values() for at in (each.placed_at, each.started_at, each.ended_at) if at]
    if not all(map(math.isfinite, times)) or not 0 <= report.ended_at - report.began_at <= SPAN_LIMIT_S:
        raise BadReport(f"it has times of more than {SPAN_LIMIT_S / 86_400:g} days, or an end before its begin")
    return report


def _members(path: Path) -> dict[str, str]:
    """Return the text of each file of the archive by its name, without the directory."""
    try:
        with gzip.open(path) as packed:
            content = packed.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise BadReport(f"it has more than {LIMIT_BYTES // 1024**2} MiB unpacked: write it with fewer --lines")
        files: dict[str, str] = {}
        tops = set()
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                top, _, name = member.name.partition("/")
                tops.add(top)
                # A sparse file may say that it has any number of zeros.
                is_plain = member.isreg() and not member.issparse()
                if not is_plain or not name or "/" in name or top in ("", "..") or name in files:
                    raise BadReport(f"it has {member.name!r}, which fray report does not write")
                if len(tops) > 1 or len(files) >= MEMBERS_LIMIT:
                    raise BadReport("it has other files than fray report writes")
                file = archive.extractfile(member)
                files[name] = "" if file is None else file.read().decode()
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise BadReport(f"it is not an archive of fray report: {error}") from None
    return files


def _decoded(files: dict[str, str], name: str, cls: type[T], form: str = "%s") -> T:
    if name not in files:
        why = next((line for line in files.get("missing.txt", "").splitlines() if line.startswith(f"{name}: ")), "")
        raise BadReport(f"it lacks {name}" + why.removeprefix(name))
    try:
        return from_json(cls, form % files[name])
    except (FrayError, RecursionError) as error:
        raise BadReport(f"{name} has another form: {error}") from None


def _check(job: JobInfo, spec: JobSpec, attempts: dict[AttemptId, AttemptRecord]) -> None:
    """Raise BadReport if the job is not one that can run alone on simulated machines."""
    parts = {
        "an actor, whose work are calls": spec.actor is not None,
        "a member of a job group": spec.job_group,
        "a member of a supervised group": spec.siblings is not None,
        "a job of a reservation": spec.reservation_id,
    }
    for what, is_so in parts.items():
        if is_so:
            raise BadReport(f"its job is {what}: what that depends on is not in the archive")
    if not attempts:
        raise BadReport("its job was never placed: there is nothing to compare")
    if len(attempts) > ATTEMPTS_LIMIT:
        raise BadReport(f"its job has {len(attempts)} attempts, more than {ATTEMPTS_LIMIT}")
    if spec.job_id != job.job_id or not all(map(partial(_is_of, job.job_id), attempts)):
        raise BadReport("its files are of several jobs")
    try:
        causes = {each: EndReason(one.cause) for each, one in attempts.items() if one.cause}
    except ValueError as error:
        raise BadReport(f"attempts.json: {error}") from None
    last = max(split_attempt(each)[1] for each in attempts)
    for attempt_id, cause in causes.items():
        if cause in BY_OTHERS:
            raise BadReport(f"attempt {attempt_id} {BY_OTHERS[cause]}")
        if cause in ON_REQUEST and split_attempt(attempt_id)[1] < last:
            raise BadReport(f"attempt {attempt_id} was ended by a person to run again, which is not replayed")


_SHORT_NUMBER = re.compile("[0-9]{1,9}")


def _is_of(job_id: str, attempt_id: AttemptId) -> bool:
    of, *numbers = attempt_id.rsplit(":", 2)
    return of == job_id and len(numbers) == 2 and all(map(_SHORT_NUMBER.fullmatch, numbers))


def _changes(spec: JobSpec, attempts: dict[AttemptId, AttemptRecord], machines: _Machines) -> Iterator[MachineChange]:
    """Yield the changes of machines, in order; of those before the first placement only what was there then."""
    variants = {each.node: each.machine for each in attempts.values()}
    found: list[MachineChange] = []
    for node in (each for each in machines.nodes if each.name in variants):
        kinds = [(device, device.partition("-")[0]) for device in node.devices]
        devices = tuple(Device(device, kind, variants[node.name]) for device, kind in kinds)
        found.append(MachineChange(node.joined_at, node.name, _capacity(node, devices)))
    for gone in (each for each in machines.gone if each.node in variants):
        kind = spec.demand.device_kind or "gpu"
        devices = tuple(Device(f"{kind}-{index}", kind, gone.kind) for index in range(min(gone.devices, 1_000)))
        found.append(MachineChange(gone.joined_at, gone.node, _capacity(gone, devices)))
        found.append(MachineChange(gone.gone_at, gone.node))
    known = {each.node: each.capacity for each in found if each.capacity is not None}
    for attempt in attempts.values():
        if attempt.node not in known:
            raise BadReport(f"machine {attempt.node} of attempt {attempt.attempt_id} is not in it")
        if attempt.cause == EndReason.MACHINE_LOST:
            found.append(MachineChange(attempt.ended_at or 0.0, attempt.node))
    for node_name, capacity in known.items():
        try:
            check_capacity(check_id(node_name, "machine"), capacity)
        except FrayError as error:
            raise BadReport(str(error)) from None
    found.sort(key=_order)
    for attempt in sorted(attempts.values(), key=lambda each: each.placed_at):
        # The same process came back after its lease, of which there is no record.
        before = [each for each in found if each.node == attempt.node and each.at <= attempt.placed_at]
        if not before or before[-1].capacity is None:
            found.append(MachineChange(attempt.placed_at - 1.0, attempt.node, known[attempt.node]))
            found.sort(key=_order)
    began_at = min(each.placed_at for each in attempts.values())
    there = {each.node: each for each in found if each.at <= began_at}
    yield from (each for each in there.values() if each.capacity is not None)
    yield from (each for each in found if each.at > began_at)


def _capacity(machine: NodeInfo | NodeRecord, devices: tuple[Device, ...]) -> Capacity:
    # The unit of a provider is another name of the machine, by which machines of one kind would differ.
    attributes = {key: value for key, value in machine.attributes.items() if key != MACHINE_ATTRIBUTE}
    return Capacity(machine.cpu_milli, machine.memory_bytes, DISK_BYTES, devices, attributes, PORTS)


def _order(change: MachineChange) -> tuple[float, bool]:
    return change.at, change.capacity is not None


# Replaying -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Replay:
    """A replay in progress."""

    report: Report
    truth: GroundTruth
    sim: SimCluster = None  # type: ignore[assignment]
    nursery: trio.Nursery = None  # type: ignore[assignment]
    finished: trio.Event = Factory(trio.Event)
    stop_requested: trio.Event = Factory(trio.Event)
    stands_for: dict[NodeName, NodeName] = Factory(dict)
    """Simulated machine of each recorded one: machines of one kind are interchangeable."""
    refusal: str = ""
    """Error with which the controller has refused the job; empty without one."""
    job: JobInfo | None = None
    attempts: dict[AttemptId, AttemptRecord] = Factory(dict)
    """Attempts in the simulation, as the job's record ``job`` at the end, or at the time of the archive."""
    _seen: set[AttemptId] = Factory(set)

    def simulated(self, at: float) -> float:
        """Return the simulated time of a recorded one."""
        return LEAD_S + at - self.report.began_at

    def watch(self, state: State, event: Event, effects: Sequence[Effect]) -> None:
        """Follow the scheduler: each process that has begun ends when the recorded one did."""
        for attempt_id, process in self.truth.living.items():
            if attempt_id not in self._seen:
                self._seen.add(attempt_id)
                self.nursery.start_soon(self._end, process)
        job = state.jobs.get(self.report.job.job_id)
        if job is not None and job.outcome is not None:
            self.finished.set()

    async def _end(self, process: ProcessRun) -> None:
        """End a process as recorded, unless its machine or the scheduler has to end it."""
        record = self.report.attempts.get(process.attempt_id)
        if record is None:
            # One that the record does not have: the comparison says so, and the rest cannot be the same.
            self.finished.set()
            return
        if not record.cause or record.ended_at is None:
            return
        cause = EndReason(record.cause)
        if cause in (EndReason.MACHINE_LOST, EndReason.GANG, EndReason.TIME_LIMIT):
            return
        began = record.ended_at if record.started_at is None else record.started_at
        await trio.sleep_until(process.began + max(0.0, record.ended_at - began))
        launcher = self.sim.machines[process.machine].launcher
        if cause in ON_REQUEST:
            self.stop_requested.set()
        elif launcher is not None:
            launcher.crash(process.attempt_id, self._outcome(record, cause))

    def _outcome(self, record: AttemptRecord, cause: EndReason) -> Outcome:
        known = {each.attempt_id: each for each in self.report.job.attempts}.get(record.attempt_id)
        # Exit code 1 of an exception is Python's own, and no exit rule applies (`Outcome.raised`).
        raised = self.report.spec.entry is EntryKind.CALLABLE and record.exit_code == 1
        signal, message = (known.signal, known.message) if known is not None else (None, "")
        return Outcome(cause=cause, exit_code=record.exit_code, signal=signal, message=message, raised=raised)

    async def change_machines(self) -> None:
        for change in self.report.changes:
            await trio.sleep_until(self.simulated(change.at))
            if change.capacity is None:
                self._lose(change)
                continue
            name = self.stands_for.setdefault(change.node, change.node)
            machine = self.sim.machines.get(name) or self.sim.add_machine(name, change.capacity)
            if not machine.up:
                machine.capacity = self.truth.offered[name] = change.capacity
                machine.boot()

    def _lose(self, change: MachineChange) -> None:
        """Kill a machine: of several like it, the one on which its lost attempt runs."""
        lost = [each.attempt_id for each in self.report.attempts.values() if _is_lost(each, change)]
        places, machines = self.stands_for, self.sim.machines
        own = places.get(change.node, change.node)
        running = [self.truth.living[each].machine for each in lost if each in self.truth.living]
        like = [each for each in running if own in machines and machines[each].capacity == machines[own].capacity]
        if like and own not in running:
            other = next(node for node, name in places.items() if name == like[0])
            places[change.node], places[other] = like[0], own
            own = like[0]
        if own in machines:
            machines[own].kill(silent=True)

    async def drive(self, cluster: Cluster) -> None:
        """Launch the job, and look at it at its end, or at the time of the archive."""
        report, job_id = self.report, self.report.job.job_id
        await trio.sleep_until(LEAD_S)
        spec = evolve(
            report.spec,
            entry=EntryKind.BINARY,
            argv=("replayed", "inf", "0"),
            namespace="replay",
            user="replay",
            detached=True,
            owned_by_job=False,
            stall_s=None,
        )
        try:
            await cluster._runtime.client.request(Launch(jobs=(spec,)))
        except FrayError as error:
            self.refusal = str(error)
            return
        is_over = report.job.state.finished
        if is_over and report.job.cause in ON_REQUEST and not any(map(_is_stopped, report.attempts.values())):
            self.nursery.start_soon(self._stop_at, self.simulated(report.ended_at))
        self.nursery.start_soon(self._stop, cluster)
        with trio.move_on_at(self.simulated(report.ended_at) + (2 * self.sim.rules.lease_s if is_over else 0.0)):
            await self.finished.wait()
            await trio.sleep(1.0)
        self.job = await cluster.poll(job_id)
        self.attempts = {each.attempt_id: each for each in await cluster.attempts(job=job_id)}

    async def _stop_at(self, at: float) -> None:
        await trio.sleep_until(at)
        self.stop_requested.set()

    async def _stop(self, cluster: Cluster) -> None:
        await self.stop_requested.wait()
        job = await cluster.get_job(self.report.job.job_id)
        await job.terminate()


def _is_lost(attempt: AttemptRecord, change: MachineChange) -> bool:
    is_lost = (attempt.cause, attempt.node) == (EndReason.MACHINE_LOST, change.node)
    return is_lost and abs((attempt.ended_at or 0.0) - change.at) <= 1.0


def _is_stopped(attempt: AttemptRecord) -> bool:
    return attempt.cause in ON_REQUEST


def _lease_s(attempts: Sequence[AttemptRecord]) -> float:
    """Return the lease of the recorded controller, as far as a lost machine shows it; else the default."""
    given_up = [each.recorded_at - (each.ended_at or 0.0) for each in attempts if each.cause == EndReason.MACHINE_LOST]
    default = SchedulerConfig().lease_s
    return max((min(each, default) for each in given_up if each >= LEASE_MIN_S), default=default)


async def _simulate(report: Report, seed: Seed) -> _Replay:
    truth = GroundTruth(trio.current_time)
    replay = _Replay(report, truth)
    rules = SchedulerConfig(lease_s=_lease_s(tuple(report.attempts.values())))
    network = SimNetwork(seed.stream("network"), Trace())
    with (
        # Faults that other scenarios have by chance.
        mock.patch.object(fakes, "PORT_TAKEN_PROBABILITY", 0.0),
        mock.patch.multiple(sim_devices, SLOW=0.0, STUCK=0.0),
    ):
        async with (
            open_sim_cluster(seed, network, truth, (), rules=rules, watch=replay.watch, policy=Policy()) as replay.sim,
            trio.open_nursery() as replay.nursery,
        ):
            replay.nursery.start_soon(replay.change_machines)
            await DriverProcess(replay.sim, "replay").run(replay.drive, namespace="replay", grace_s=30.0)
            replay.nursery.cancel_scope.cancel()
    return replay


# Comparing -----------------------------------------------------------------------------------------------------------


def replay(path: Path) -> tuple[int, list[str]]:
    """Replay an archive; return the exit status, 0 or 1, and what to print.

    Raises:
        BadReport: it cannot be replayed.
    """
    report = read(path)
    seed = Seed(0)
    played, logged = run_in_virtual_time(seed, partial(_simulate, report, seed))
    job = played.job
    if job is None:
        raise BadReport(f"its request is refused: {played.refusal}")
    rows, differences = _compare(played)
    differences += [str(breach) for breach in played.truth.breaches] + logged
    for what, old, new in (("state", report.job.state, job.state), ("cause", report.job.cause, job.cause)):
        if old != new and not {report.job.cause, job.cause} <= set(ON_REQUEST):
            differences.append(f"{what} of the job: {_text(old)} in the record, {_text(new)} in the simulation")
    lines = [f"job {report.job.job_id}, recorded by Fray {report.versions.fray}; this is {__version__}", *rows]
    lines.append(f"state: {_text(report.job.state)} in the record, {_text(job.state)} in the simulation")
    lines += [NOT_THERE, *(f"DIFFERS {each}" for each in differences)]
    if not differences:
        lines.append("the same: state, and causes of all attempts")
    return int(bool(differences)), [visible_text(line) for line in lines]


def _text(value: JobState | EndReason | None) -> str:
    return "none" if value is None else value.value


def _compare(played: _Replay) -> tuple[list[str], list[str]]:
    """Return a row for each attempt, and how causes differ. A ``~`` marks what differs otherwise."""
    report, attempts = played.report, played.attempts
    kinds = {each.node: each.capacity for each in report.changes if each.capacity is not None}
    rows = [_ROW.format("ATTEMPT", "", "MACHINE", "BEGIN", "END", "CAUSE")]
    differences = []
    for attempt_id in sorted(report.attempts.keys() | attempts.keys(), key=lambda each: split_attempt(each)[1:]):
        old, new = report.attempts.get(attempt_id), attempts.get(attempt_id)
        short = attempt_id.removeprefix(report.job.job_id + ":")
        before, after = _cells(old, report.began_at), _cells(new, EPOCH_S + LEAD_S)
        if old is not None and new is not None:
            times = zip(_times(old, report.began_at), _times(new, EPOCH_S + LEAD_S), strict=True)
            marks = [kinds[old.node] != kinds[new.node], *(_is_far(*pair) for pair in times)]
            after[:3] = [f"~{cell}" if mark else cell for mark, cell in zip(marks, after[:3], strict=True)]
        rows += [_ROW.format(short, "recorded", *before), _ROW.format("", "simulated", *after)]
        if old is None:
            differences.append(f"attempt {short}: begins in the simulation, and is not in the record")
        elif new is None:
            differences.append(f"attempt {short}: {old.cause or 'runs'} in the record, never placed in the simulation")
        elif old.cause != new.cause and not (_is_stopped(old) and _is_stopped(new)):
            causes = f"{old.cause or 'runs'} in the record, {new.cause or 'runs'} in the simulation"
            differences.append(f"attempt {short}: {causes}")
    return rows, differences


_ROW = "{:<9} {:<9}  {:<24} {:>10} {:>10}  {}"


def _times(attempt: AttemptRecord, origin: float) -> tuple[float | None, float | None]:
    """Return begin and end in seconds after the first placement."""
    ended = None if attempt.ended_at is None else attempt.ended_at - origin
    return attempt.placed_at - origin, ended


def _is_far(one: float | None, other: float | None) -> bool:
    return one != other if one is None or other is None else abs(one - other) > NEAR_S


def _cells(attempt: AttemptRecord | None, origin: float) -> list[str]:
    if attempt is None:
        return ["-", "-", "-", "-"]
    begin, end = ("-" if at is None else f"{at:.1f}" for at in _times(attempt, origin))
    return [f"{attempt.node} ({attempt.machine or '?'})", begin, end, attempt.cause or "runs"]
