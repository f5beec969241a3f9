"""Stand-ins for what a simulation cannot have: the network between machines, processes, threads.

Everything else in a simulated cluster is the real thing.
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
from fray.net.codec import blob_id
from fray.net.transport import Authorize, Credential, Transport
from fray.net.transports.memory import MemoryHost, MemoryNetwork, MemoryTransport
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
from fray.runtime.threads.executor import InlineExecutor
from fray.testing.ground_truth import GroundTruth
from fray.testing.seed import Trace
from fray.testing.sim_devices import SimDevices
from fray.testing.sim_environments import SimEnvironments
from fray.testing.sim_workspaces import SimShelf

NEAR_S = (0.00002, 0.0001)
"""One trip between two processes of one machine."""
FAR_S = (0.0003, 0.003)
"""One trip between two machines."""
CAPTURE_S = 0.1
START_S = (0.005, 0.05)
"""From the node's wish to a process that runs."""
KILLED_AT_START = Outcome(cause=EndReason.KILLED, signal=7, message="killed by signal 7")
STRANGER = 0.04
"""How often a process that is none of Fray's listens where one of an attempt's ports is."""


# The network ---------------------------------------------------------------------------------------------------------


class SimNetwork(MemoryNetwork):
    """Every process is a host, every host stands in a machine; machines are cut off, frozen and lost as a whole."""

    def __init__(self, rng: random.Random, trace: Trace) -> None:
        super().__init__(rng)
        self._places: dict[str, str] = {}
        self._killed: set[str] = set()
        self._dark: set[str] = set()
        self.slow: dict[str, float] = {}
        """Seconds more for each trip between these machines and others."""
        self._ports = 0
        self._trace = trace
        self.on_delivery = self._delivered

    def at(self, host: str) -> SimHost:
        return SimHost(self, host)

    def process(self, host: str, machine: str) -> SimHost:
        """The network as a new process on ``machine`` sees it."""
        self._places[host] = machine
        return SimHost(self, host)

    def next_port(self) -> int:
        """A number no listener has."""
        self._ports += 1
        return self._ports

    def machine_of(self, host: str) -> str:
        return self._places.get(host, host)

    def kill(self, host: str, *, silent: bool = False) -> None:
        """The process is gone; it will never send again.

        Args:
            silent: as when the power fails: nobody is told, its peers wait. Otherwise their connections break.
        """
        self._killed.add(host)
        if silent:
            self._dark.add(host)
        else:
            self.crash(host)

    def revive(self, host: str) -> None:
        """Another process may use the host's name (only the controller's is used again)."""
        self._killed.discard(host)

    def light(self, machine: str) -> None:
        """Power is back: what was lost with it is refused now."""
        for host in [host for host in self._places if host in self._dark and self._places[host] == machine]:
            self._dark.discard(host)
            self.crash(host)

    def holds(self, a: str, b: str) -> bool:
        if a in self._dark or b in self._dark:
            return True
        here, there = self.machine_of(a), self.machine_of(b)
        if here in self._frozen or there in self._frozen:
            return True
        return here != there and (here, there) in self._cut

    def delay_s(self, a: str, b: str) -> float:
        here, there = self.machine_of(a), self.machine_of(b)
        if here == there:
            return self.rng.uniform(*NEAR_S)
        return self.rng.uniform(*FAR_S) + self.slow.get(here, 0.0) + self.slow.get(there, 0.0)

    def drop_machines(self, a: str, b: str) -> int:
        """Break all connections between two machines; how many."""
        doomed = [transport for transport in self._living.values() if self._joins(transport, a, b)]
        for transport in doomed:
            transport.break_off()
        return len({transport.number for transport in doomed})

    def _joins(self, transport: MemoryTransport, a: str, b: str) -> bool:
        ends = {self.machine_of(host) for host in transport.hosts}
        return ends == {a, b}

    async def connect(self, source: str, address: str, credential: Credential | None) -> MemoryTransport:
        if source in self._killed:
            raise Unreachable(f"{source} has been killed", address=address)
        return await super().connect(source, address, credential)

    def _delivered(self, source: str, target: str, connection: int, message: bytes) -> None:
        self._trace.note("sent", f"{trio.current_time():.9f}", source, target, connection, message)


class SimHost(MemoryHost):
    """The network as one process sees it; TCP ports are places of the same network."""

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
    """Sync user code runs in the loop: it must be short, and cannot be interrupted."""

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        await trio.lowlevel.checkpoint()
        return fn()

    def executor(self, runtime: Runtime) -> InlineExecutor:
        return InlineExecutor()


@define(eq=False)
class _Process:
    """One attempt's process."""

    ticket: AttemptSpec
    starting: trio.CancelScope = field(factory=trio.CancelScope)
    cancel: trio.CancelScope = field(factory=trio.CancelScope)
    asked: bool = False
    ran: bool = False
    gone: bool = False
    """Ended or killed: what its tasks still do concerns nobody."""
    ended: trio.Event = field(factory=trio.Event)

    @property
    def attempt_id(self) -> AttemptId:
        return self.ticket.attempt_id


class SimLauncher(Launcher):
    """Runs attempts as tasks that can be killed like processes: a `fray.node.launcher.Launcher`.

    A killed one is off the network at once, and its tasks are cancelled; whatever their ``finally`` blocks do then
    reaches nobody.
    """

    def __init__(
        self,
        machine: str,
        network: SimNetwork,
        truth: GroundTruth,
        rng: random.Random,
        logs: MemoryLogs,
        shelf: SimShelf,
        environments: SimEnvironments,
    ) -> None:
        super().__init__()
        self.logs: MemoryLogs = logs
        self.check_path = self._check_path
        self.shelf, self.environments = shelf, environments
        self.held: dict[AttemptId, _Process] = {}
        self._machine, self._network, self._truth, self._rng = machine, network, truth, rng
        self._nursery: trio.Nursery | None = None
        self._pids = 100
        self._dead = False
        self._grips = SimDevices(machine, truth)
        self._grips.on_busy = lambda: self.on_busy()
        self.bad = False
        """What starts there is killed at once."""

    @property
    def busy(self) -> dict[str, str]:
        """See `fray.node.launcher.Launcher.busy`."""
        return self._grips.busy

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.lose("with its node")

    # What a node asks

    def start(self, ticket: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "run the launcher first"
        if self._dead:
            return
        if ticket.spec.name == PROBE:
            self._nursery.start_soon(self._probe, ticket.attempt_id)
            return
        process = self.held[ticket.attempt_id] = _Process(ticket)
        self._nursery.start_soon(self._run, process, payload)

    def stop(self, attempt_id: AttemptId, notice_s: float | None = None) -> None:
        process = self.held.get(attempt_id)
        if process is None or process.gone or process.asked or self._nursery is None:
            return
        process.asked = True
        self._tell(process, Phase.STOPPING)
        process.starting.cancel()
        if notice_s is not None:
            current_job.set_preemption_notice(attempt_id)
        self._nursery.start_soon(self._ladder, process, notice_s or 0.0)

    def kill(self, attempt_id: AttemptId) -> None:
        process = self.held.get(attempt_id)
        if process is not None:
            self._end_now(process, Outcome(cause=EndReason.STOPPED, message="killed on request"), "asked")

    def forget(self, attempt_id: AttemptId) -> None:
        process = self.held.get(attempt_id)
        if process is not None and self._nursery is not None:
            self._nursery.start_soon(self._forget, process)

    async def capture(self, attempt_id: AttemptId) -> str:
        """See `Launcher.capture`; it takes a while."""
        await trio.sleep(CAPTURE_S)
        return f"the stacks of {attempt_id}"

    async def _check_path(self, attempt_id: AttemptId, port: int, path: str) -> None:
        """In place of HTTP: the book says who is sick."""
        await trio.sleep(NEAR_S[0])
        if attempt_id not in self._truth.living:
            raise BadAnswer(f"connection refused at port {port}")
        if attempt_id in self._truth.sick:
            raise BadAnswer("status 503 Service Unavailable")

    def _hear(self, process: _Process, said: AttemptReport) -> None:
        if process.gone:
            return
        self.on_report(process.attempt_id, said)
        life = self._truth.living.get(process.attempt_id)
        if life is not None and isinstance(said, Progress):
            life.beaten = trio.current_time()

    # What a simulation does to it

    def crash(self, attempt_id: AttemptId) -> bool:
        """The process dies by SIGKILL of somebody's; False if there is none."""
        process = self.held.get(attempt_id)
        if process is None or process.gone or attempt_id not in self._truth.living:
            return False
        self._end_now(process, Outcome(cause=EndReason.KILLED, signal=9, message="killed by signal 9"), "crashed")
        return True

    def lose(self, how: str, *, silent: bool = False) -> None:
        """The machine (or the node with all its keepers) is gone: every process ends, nobody is told."""
        self._dead = True
        self._grips.drop()
        for process in self.held.values():
            if not process.gone:
                self._network.kill(process.attempt_id, silent=silent)
                self._leave(process, how)

    # Running

    async def _probe(self, attempt_id: AttemptId) -> None:
        """A node that looks whether its machine is well starts nothing of anybody's."""
        await trio.sleep(self._rng.uniform(*START_S))
        outcome = KILLED_AT_START if self.bad else Outcome(cause=EndReason.SUCCEEDED)
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome), None)

    async def _run(self, process: _Process, content: bytes | None) -> None:
        ticket = process.ticket
        self._tell(process, Phase.STARTING)
        with process.starting:
            await trio.sleep(self._rng.uniform(*START_S))
            problem = await self._fetch(ticket) or await self.environments.have(ticket.spec.environment)
            if problem:
                self._end(process, Outcome(cause=EndReason.ENVIRONMENT, message=problem), None, "by itself")
        if process.gone:
            return
        if process.asked:
            self._end(process, Outcome(cause=EndReason.STOPPED, message="ended before it began"), None, "asked")
            return
        if ticket.ports and self._rng.random() < STRANGER:
            self._end(process, ports_taken_outcome(ticket, list(ticket.ports.values())[:1]), None, "by itself")
            return
        if self.in_doubt():
            self._end(process, SUSPENDED_BEFORE_START, None, "by itself")
            return
        if self.bad:
            self._end(process, KILLED_AT_START, None, "crashed")
            return
        self._pids += 1
        process.ran = True
        began = trio.current_time()
        self._truth.began(ticket.attempt_id, self._machine, ticket.spec, ticket.devices)
        self._truth.told(ticket)
        self._tell(process, Phase.RUNNING, self._pids)
        ended = await self._work(process, content or b"")
        outcome = evolve(
            ended.outcome,
            value=None if ended.value is None else blob_id(ended.value),
            duration_s=round(trio.current_time() - began, 6),
        )
        self._end(process, outcome, ended.value, "asked" if process.asked else "by itself")

    async def _fetch(self, ticket: AttemptSpec) -> str:
        """Have its workspace here; says why not. It must be the one that its spec names, to the last byte."""
        bundle = ticket.spec.environment.bundle
        if bundle is None:
            return ""
        try:
            manifest, _ = await fetch(bundle, self.request, self.shelf, lambda line: None)
        except FrayError as error:
            return f"the workspace cannot be fetched: {error}"
        damage = self.shelf.damage(bundle, manifest)
        if damage:
            self._truth.breach("P4", f"{ticket.attempt_id} would start in another workspace than {bundle}: {damage}")
        return ""

    async def _work(self, process: _Process, content: bytes) -> AttemptResult:
        ticket = process.ticket
        if ticket.spec.entry is EntryKind.BINARY:
            return await _program(ticket, process.cancel, partial(self._print, process))
        network = self._network.process(ticket.attempt_id, self._machine)
        rng = random.Random(f"{ticket.attempt_id}/{self._rng.random()}")
        try:
            hear = partial(self._hear, process)
            return await run_attempt(
                ticket, content, network, InlineStage(), rng=rng, cancel=process.cancel, on_report=hear
            )
        except Exception as error:  # noqa: BLE001  # nothing may come out of there: written down as a breach
            if not process.gone:
                self._truth.breach("house", f"the runtime of {ticket.attempt_id} failed: {error!r}")
            return AttemptResult(Outcome(cause=EndReason.KILLED, message=repr(error)))

    async def _print(self, process: _Process) -> None:
        """Numbered lines, now and then, onto the machine's disk."""
        attempt_id = process.attempt_id
        rng = random.Random(f"{attempt_id}/lines")
        while not process.gone:
            first = self._truth.printed[attempt_id]
            count = rng.choice((1, 1, 2, 5, 20))
            lines = "".join(f"{attempt_id} {number}\n" for number in range(first, first + count))
            self._truth.printed[attempt_id] += count
            self.on_log(attempt_id, self.logs.add(attempt_id, rng.choice(("out", "err")), lines.encode()))
            await trio.sleep(rng.uniform(0.05, 3.0))

    async def _ladder(self, process: _Process, notice_s: float) -> None:
        ladder = process.ticket.spec.termination
        with trio.move_on_after(notice_s):
            await process.ended.wait()
        process.cancel.cancel()
        with trio.move_on_after(ladder.cancel_s + ladder.term_s):
            await process.ended.wait()
        self._end_now(process, Outcome(cause=EndReason.STOPPED, signal=9, message="did not end when asked"), "asked")

    async def _forget(self, process: _Process) -> None:
        await process.ended.wait()
        self.held.pop(process.attempt_id, None)

    # Ending

    def _end_now(self, process: _Process, outcome: Outcome, how: str) -> None:
        if not process.gone:
            self._network.kill(process.attempt_id)
            self._end(process, outcome, None, how)

    def _end(self, process: _Process, outcome: Outcome, value: bytes | None, how: str) -> None:
        if process.gone:
            return
        current_job.clear_preemption_notice(process.attempt_id)
        self._leave(process, how)
        held_s = self._grips.take_hold(process.ticket) if process.ran and not self._dead else 0.0
        if held_s and self._nursery is not None:
            self._nursery.start_soon(self._tell_late, process, outcome, value, held_s)
        else:
            self._tell_end(process, outcome, value)

    async def _tell_late(self, process: _Process, outcome: Outcome, value: bytes | None, held_s: float) -> None:
        left_s = await self._grips.wait_told(process.ticket, held_s)
        self._tell_end(process, outcome, value)
        if left_s:
            await self._grips.wait_free(process.ticket, left_s)

    def _tell_end(self, process: _Process, outcome: Outcome, value: bytes | None) -> None:
        self.on_observed(ObservedAttempt(attempt_id=process.attempt_id, phase=Phase.ENDED, outcome=outcome), value)

    def _leave(self, process: _Process, how: str) -> None:
        process.gone = True
        self._truth.ended(process.attempt_id, how)
        process.starting.cancel()
        process.cancel.cancel()
        process.ended.set()

    def _tell(self, process: _Process, phase: Phase, pid: int | None = None) -> None:
        if not process.gone:
            self.on_observed(ObservedAttempt(attempt_id=process.attempt_id, phase=phase, pid=pid), None)


async def _program(ticket: AttemptSpec, cancel: trio.CancelScope, chat: Callable[[], Awaitable[None]]) -> AttemptResult:
    """A program whose arguments say what it does: ``(name, seconds, exit code)``. One named ``chatter`` prints, one
    named ``hog`` takes too much memory."""
    argv, limit_bytes = ticket.spec.argv, ticket.spec.memory_limit_bytes
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
