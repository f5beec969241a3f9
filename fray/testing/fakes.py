"""Fakes for a simulated cluster: network between machines, processes, threads.

Everything else in a simulated cluster is the real implementation.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from attrs import define, evolve, field

from fray.errors import FrayError, Unreachable
from fray.model.ids import AttemptId
from fray.model.monitoring.health import Progress
from fray.model.monitoring.progress_protocol import AttemptReport
from fray.model.specs import AttemptSpec, EndReason, EntryKind, ObservedAttempt, Outcome, Phase
from fray.net.auth import Authorize
from fray.net.codec import blob_id
from fray.net.large_values import download_to_memory
from fray.net.transport import Credential, Transport
from fray.net.transports.memory import MemoryHost, MemoryNetwork, MemoryTransport
from fray.node.attempts.values import send_from_memory
from fray.node.health.http_check import BadAnswer
from fray.node.launcher import SUSPENDED_BEFORE_START, Launcher
from fray.node.logs.store import MemoryLogs
from fray.node.ports import ports_taken_outcome
from fray.node.self_test import PROBE
from fray.node.shim.resource_usage import out_of_memory_outcome
from fray.node.workspaces.preparer import fetch
from fray.runtime.process import current_job
from fray.runtime.process.attempt import AttemptResult, run_attempt
from fray.runtime.runtime import Runtime
from fray.runtime.serialization.values import LargeValue
from fray.runtime.threads.executor import InlineExecutor
from fray.testing.ground_truth import GroundTruth
from fray.testing.seed import Trace
from fray.testing.sim_devices import SimDevices
from fray.testing.sim_environments import SimEnvironments
from fray.testing.sim_workspaces import SimChunkCache

NEAR_S = (0.00002, 0.0001)
"""Delay of a message between two processes of one machine."""
FAR_S = (0.0003, 0.003)
"""Delay of a message between two machines."""
CAPTURE_S = 0.1
START_S = (0.005, 0.05)
"""Delay between the node's request and a running process."""
KILLED_AT_START = Outcome(cause=EndReason.KILLED, signal=7, message="killed by signal 7")
KILLED_FROM_OUTSIDE = Outcome(cause=EndReason.KILLED, signal=9, message="killed by signal 9")
PORT_TAKEN_PROBABILITY = 0.04
"""Probability that an unrelated process listens on one of an attempt's ports."""


# The network ---------------------------------------------------------------------------------------------------------


class SimNetwork(MemoryNetwork):
    """Network in which each process is a host on a machine; machines are cut off, frozen and lost as a whole."""

    def __init__(self, rng: random.Random, trace: Trace) -> None:
        super().__init__(rng)
        self._places: dict[str, str] = {}
        self._killed: set[str] = set()
        self._dark: set[str] = set()
        self.slow: dict[str, float] = {}
        """Additional delay in seconds of each message between these machines and others."""
        self._ports = 0
        self._trace = trace
        self.on_delivery = self._delivered

    def at(self, host: str) -> SimHost:
        return SimHost(self, host)

    def process(self, host: str, machine: str) -> SimHost:
        """Return the network as seen from a new process on ``machine``."""
        self._places[host] = machine
        return SimHost(self, host)

    def next_port(self) -> int:
        """Return an unused port number."""
        self._ports += 1
        return self._ports

    def machine_of(self, host: str) -> str:
        return self._places.get(host, host)

    def kill(self, host: str, *, silent: bool = False) -> None:
        """Kill a process: it will never send again.

        Args:
            silent: like a power failure: its peers are not notified and wait. Otherwise their connections break.
        """
        self._killed.add(host)
        if silent:
            self._dark.add(host)
        else:
            self.crash(host)

    def revive(self, host: str) -> None:
        """Allow another process to use the host's name (only the controller's is reused)."""
        self._killed.discard(host)

    def restore_power(self, machine: str) -> None:
        """End a power failure: connections to its dead processes are refused from now on."""
        for host in [host for host in self._places if host in self._dark and self._places[host] == machine]:
            self._dark.discard(host)
            self.crash(host)

    def holds(self, a: str, b: str) -> bool:
        if not (self._dark or self._frozen or self._cut):  # nearly always, and asked several times for each message
            return False
        if a in self._dark or b in self._dark:
            return True
        here, there = self.machine_of(a), self.machine_of(b)
        if here in self._frozen or there in self._frozen:
            return True
        return here != there and (here, there) in self._cut

    def delay_s(self, a: str, b: str) -> float:
        places = self._places
        here, there = places.get(a, a), places.get(b, b)
        low_s, high_s = NEAR_S if here == there else FAR_S
        delay_s = low_s + (high_s - low_s) * self.rng.random()
        if here != there and self.slow:
            delay_s += self.slow.get(here, 0.0) + self.slow.get(there, 0.0)
        return delay_s

    def drop_machines(self, a: str, b: str) -> int:
        """Break all connections between two machines; return how many."""
        affected = [transport for transport in self._living.values() if self._joins(transport, a, b)]
        for transport in affected:
            transport.break_off()
        return len({transport.number for transport in affected})

    def _joins(self, transport: MemoryTransport, a: str, b: str) -> bool:
        ends = {self.machine_of(host) for host in transport.hosts}
        return ends == {a, b}

    async def connect(self, source: str, address: str, credential: Credential | None) -> MemoryTransport:
        if source in self._killed:
            raise Unreachable(f"{source} has been killed", address=address)
        return await super().connect(source, address, credential)

    def _delivered(self, source: str, target: str, connection: int, message: bytes) -> None:
        self._trace.note(f"sent {trio.current_time():.9f} {source} {target} {connection}", message)


class SimHost(MemoryHost):
    """Network as seen from one process; TCP ports are addresses of the same network."""

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        if address.startswith("tcp:"):
            assert isinstance(self.network, SimNetwork)
            address = f"memory:{self.host}/{self.network.next_port()}"
        await super().listen(address, authorize, handler, task_status=task_status)


# Processes -----------------------------------------------------------------------------------------------------------


class InlineStage:
    """Executor of sync user code in the loop: it must be short, and cannot be interrupted."""

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        await trio.lowlevel.checkpoint()
        return fn()

    def executor(self, runtime: Runtime) -> InlineExecutor:
        return InlineExecutor()


@define(eq=False)
class _Process:
    """One attempt's process."""

    attempt: AttemptSpec
    starting: trio.CancelScope = field(factory=trio.CancelScope)
    cancel: trio.CancelScope = field(factory=trio.CancelScope)
    stop_requested: bool = False
    ran: bool = False
    finished: bool = False
    """Ended or killed: its remaining tasks prepare no effect."""
    ended: trio.Event = field(factory=trio.Event)

    @property
    def attempt_id(self) -> AttemptId:
        return self.attempt.attempt_id


class SimLauncher(Launcher):
    """Launcher that runs attempts as tasks that can be killed like processes.

    A killed attempt is off the network at once, and its tasks are cancelled; their ``finally`` blocks affect no other
    process.
    """

    def __init__(
        self,
        machine: str,
        network: SimNetwork,
        truth: GroundTruth,
        rng: random.Random,
        logs: MemoryLogs,
        chunk_cache: SimChunkCache,
        environments: SimEnvironments,
    ) -> None:
        super().__init__()
        self.logs: MemoryLogs = logs
        self.check_path = self._check_path
        self.chunk_cache, self.environments = chunk_cache, environments
        self.held: dict[AttemptId, _Process] = {}
        self._machine, self._network, self._truth, self._rng = machine, network, truth, rng
        self._nursery: trio.Nursery | None = None
        self._pids = 100
        self._dead = False
        self._devices = SimDevices(machine, truth)
        self._devices.on_busy = lambda: self.on_busy()
        self.bad = False
        """Set while every attempt that starts there is killed at once."""

    @property
    def busy(self) -> dict[str, str]:
        """See `fray.node.launcher.Launcher.busy`."""
        return self._devices.busy

    @property
    def busy_since(self) -> float:
        """Time of the last change of `busy`."""
        return self._devices.busy_since

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.lose("with its node")

    # Called by the node

    def start(self, attempt: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "run the launcher first"
        if self._dead:
            return
        if attempt.spec.name == PROBE:
            self._nursery.start_soon(self._probe, attempt.attempt_id)
            return
        process = self.held[attempt.attempt_id] = _Process(attempt)
        self._nursery.start_soon(self._run, process, payload)

    def stop(self, attempt_id: AttemptId, notice_s: float | None = None) -> None:
        process = self.held.get(attempt_id)
        if process is None or process.finished or process.stop_requested or self._nursery is None:
            return
        process.stop_requested = True
        self._report(process, Phase.STOPPING)
        process.starting.cancel()
        if notice_s is not None:
            current_job.set_preemption_notice(attempt_id)
        self._nursery.start_soon(self._terminate, process, notice_s or 0.0)

    def kill(self, attempt_id: AttemptId) -> None:
        process = self.held.get(attempt_id)
        if process is not None:
            self._end_now(process, Outcome(cause=EndReason.STOPPED, message="killed on request"), "asked")

    def forget(self, attempt_id: AttemptId) -> None:
        process = self.held.get(attempt_id)
        if process is not None and self._nursery is not None:
            self._nursery.start_soon(self._forget, process)

    async def capture(self, attempt_id: AttemptId) -> str:
        """See `Launcher.capture`; takes `CAPTURE_S`."""
        await trio.sleep(CAPTURE_S)
        return f"the stacks of {attempt_id}"

    async def _check_path(self, attempt_id: AttemptId, port: int, path: str) -> None:
        """Check health without HTTP: the ground truth has the unhealthy attempts."""
        await trio.sleep(NEAR_S[0])
        if attempt_id not in self._truth.living:
            raise BadAnswer(f"connection refused at port {port}")
        if attempt_id in self._truth.unhealthy:
            raise BadAnswer("status 503 Service Unavailable")

    def _on_report(self, process: _Process, report: AttemptReport) -> None:
        if process.finished:
            return
        self.on_report(process.attempt_id, report)
        process_run = self._truth.living.get(process.attempt_id)
        if process_run is not None and isinstance(report, Progress):
            process_run.progressed_at = trio.current_time()

    # Called by the simulation

    def crash(self, attempt_id: AttemptId, outcome: Outcome = KILLED_FROM_OUTSIDE) -> bool:
        """End the process at once, by default by SIGKILL from outside; return False if there is none."""
        process = self.held.get(attempt_id)
        if process is None or process.finished or attempt_id not in self._truth.living:
            return False
        self._end_now(process, outcome, "crashed")
        return True

    def lose(self, how: str, *, silent: bool = False) -> None:
        """Lose the machine (or the node with all its shims): every process ends without a report."""
        self._dead = True
        self._devices.drop()
        for process in self.held.values():
            if not process.finished:
                self._network.kill(process.attempt_id, silent=silent)
                self._leave(process, how)

    # Running

    async def _probe(self, attempt_id: AttemptId) -> None:
        """Run the node's self-test, which starts no process of a job."""
        await trio.sleep(self._rng.uniform(*START_S))
        outcome = KILLED_AT_START if self.bad else Outcome(cause=EndReason.SUCCEEDED)
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome), None)

    async def _run(self, process: _Process, content: bytes | None) -> None:
        attempt = process.attempt
        self._report(process, Phase.STARTING)
        with process.starting:
            await trio.sleep(self._rng.uniform(*START_S))
            problem = await self._fetch(attempt) or await self.environments.prepare(attempt.spec.environment)
            if problem:
                self._end(process, Outcome(cause=EndReason.ENVIRONMENT, message=problem), None, "by itself")
        if process.finished:
            return
        if process.stop_requested:
            self._end(process, Outcome(cause=EndReason.STOPPED, message="ended before it began"), None, "asked")
            return
        if attempt.ports and self._rng.random() < PORT_TAKEN_PROBABILITY:
            self._end(process, ports_taken_outcome(attempt, list(attempt.ports.values())[:1]), None, "by itself")
            return
        if self.in_doubt():
            self._end(process, SUSPENDED_BEFORE_START, None, "by itself")
            return
        if self.bad:
            self._truth.not_begun(attempt.spec)
            self._end(process, KILLED_AT_START, None, "crashed")
            return
        self._pids += 1
        process.ran = True
        began = trio.current_time()
        self._truth.began(attempt.attempt_id, self._machine, attempt.spec, attempt.devices)
        self._truth.check_attempt_spec(attempt)
        self._report(process, Phase.RUNNING, self._pids)
        if content is None and attempt.spec.payload is not None:
            content = bytes(await download_to_memory(self.request, attempt.spec.payload))
        ended = await self._work(process, content or b"")
        outcome, value = evolve(ended.outcome, duration_s=round(trio.current_time() - began, 6)), ended.value
        if isinstance(value, LargeValue):
            outcome, value = await send_from_memory(self.request, outcome, value.join()), None
        elif value is not None:
            outcome = evolve(outcome, value=blob_id(value))
        self._end(process, outcome, value, "asked" if process.stop_requested else "by itself")

    async def _fetch(self, attempt: AttemptSpec) -> str:
        """Fetch the workspace of an attempt and check that it is exactly the one named by its spec; return an error or
        ""."""
        bundle = attempt.spec.environment.bundle
        if bundle is None:
            return ""
        try:
            manifest, _ = await fetch(bundle, self.request, self.chunk_cache, lambda line: None)
        except FrayError as error:
            return f"the workspace cannot be fetched: {error}"
        damage = self.chunk_cache.damage(bundle, manifest)
        if damage:
            self._truth.breach("P4", f"{attempt.attempt_id} would start in another workspace than {bundle}: {damage}")
        return ""

    async def _work(self, process: _Process, content: bytes) -> AttemptResult:
        attempt = process.attempt
        if attempt.spec.entry is EntryKind.BINARY:
            return await _program(attempt, process.cancel, partial(self._print, process))
        network = self._network.process(attempt.attempt_id, self._machine)
        rng = random.Random(f"{attempt.attempt_id}/{self._rng.random()}")
        try:
            on_report = partial(self._on_report, process)
            return await run_attempt(
                attempt, content, network, InlineStage(), rng=rng, cancel=process.cancel, on_report=on_report
            )
        except Exception as error:  # noqa: BLE001  # the runtime must not raise: recorded as a violation
            if not process.finished:
                self._truth.breach("error", f"the runtime of {attempt.attempt_id} failed: {error!r}")
            return AttemptResult(Outcome(cause=EndReason.KILLED, message=repr(error)))

    async def _print(self, process: _Process) -> None:
        """Write numbered lines at random intervals to the machine's disk."""
        attempt_id = process.attempt_id
        rng = random.Random(f"{attempt_id}/lines")
        while not process.finished:
            first = self._truth.printed[attempt_id]
            count = rng.choice((1, 1, 2, 5, 20))
            lines = "".join(f"{attempt_id} {number}\n" for number in range(first, first + count))
            self._truth.printed[attempt_id] += count
            self.on_log(attempt_id, self.logs.add(attempt_id, rng.choice(("out", "err")), lines.encode()))
            await trio.sleep(rng.uniform(0.05, 3.0))

    async def _terminate(self, process: _Process, notice_s: float) -> None:
        policy = process.attempt.spec.termination
        with trio.move_on_after(notice_s):
            await process.ended.wait()
        process.cancel.cancel()
        with trio.move_on_after(policy.cancel_s + policy.term_s):
            await process.ended.wait()
        self._end_now(process, Outcome(cause=EndReason.STOPPED, signal=9, message="did not end when asked"), "asked")

    async def _forget(self, process: _Process) -> None:
        await process.ended.wait()
        self.held.pop(process.attempt_id, None)

    # Ending

    def _end_now(self, process: _Process, outcome: Outcome, how: str) -> None:
        if not process.finished:
            self._network.kill(process.attempt_id)
            self._end(process, outcome, None, how)

    def _end(self, process: _Process, outcome: Outcome, value: bytes | None, how: str) -> None:
        if process.finished:
            return
        current_job.clear_preemption_notice(process.attempt_id)
        self._leave(process, how)
        held_s = self._devices.hold_devices(process.attempt) if process.ran and not self._dead else 0.0
        if held_s and self._nursery is not None:
            self._nursery.start_soon(self._report_end_later, process, outcome, value, held_s)
        else:
            self._report_end(process, outcome, value)

    async def _report_end_later(self, process: _Process, outcome: Outcome, value: bytes | None, held_s: float) -> None:
        left_s = await self._devices.wait_reportable(process.attempt, held_s)
        self._report_end(process, outcome, value)
        if left_s:
            await self._devices.wait_free(process.attempt, left_s)

    def _report_end(self, process: _Process, outcome: Outcome, value: bytes | None) -> None:
        self.on_observed(ObservedAttempt(attempt_id=process.attempt_id, phase=Phase.ENDED, outcome=outcome), value)

    def _leave(self, process: _Process, how: str) -> None:
        process.finished = True
        self._truth.ended(process.attempt_id, how)
        process.starting.cancel()
        process.cancel.cancel()
        process.ended.set()

    def _report(self, process: _Process, phase: Phase, pid: int | None = None) -> None:
        if not process.finished:
            self.on_observed(ObservedAttempt(attempt_id=process.attempt_id, phase=phase, pid=pid), None)


async def _program(
    attempt: AttemptSpec, cancel: trio.CancelScope, chat: Callable[[], Awaitable[None]]
) -> AttemptResult:
    """Run a program as its arguments say: ``(name, seconds, exit code)``. ``chatter`` prints, ``hog`` uses too much
    memory."""
    argv, limit_bytes = attempt.spec.argv, attempt.spec.memory_limit_bytes
    with cancel:
        with trio.move_on_after(float(argv[1])):
            if argv[0] == "chatter":
                await chat()
            await trio.sleep_forever()
        if argv[0] == "hog":
            return AttemptResult(evolve(out_of_memory_outcome(limit_bytes, limit_bytes + 1), signal=9))
        code = int(argv[2])
        cause = EndReason.FAILURE if code else EndReason.SUCCEEDED
        return AttemptResult(Outcome(cause=cause, exit_code=code, message=f"exit code {code}" if code else ""))
    return AttemptResult(Outcome(cause=EndReason.STOPPED, message="ended on request"))
