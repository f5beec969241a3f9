"""The ``local`` cluster: the real controller and a real node, whose jobs are tasks and threads of this process.

Payloads are still pickled and every conversation is held, over memory, so what works here works on machines. A thread
cannot be killed: a sync job that does not end when told is abandoned, and said so.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve, field

from fray.deploy.embedded_controller import (
    CONTROLLER,
    embedded_network,
    open_driver,
    serve_controller,
)
from fray.model.ids import AttemptId, JobId, Namespace
from fray.model.log_records import LogLine
from fray.model.monitoring.health import Progress
from fray.model.monitoring.progress_protocol import AttemptReport, parse
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, PortRange, parse_bytes
from fray.model.specs import AttemptSpec, EndReason, EntryKind, ObservedAttempt, Outcome, Phase
from fray.net.codec import blob_id
from fray.net.transport import Network
from fray.node.config import NodeConfig
from fray.node.job_process.bootstrap import job_variables
from fray.node.launcher import Launcher
from fray.node.logs.store import MemoryLogs
from fray.node.logs.writer import LineSplitter, system_lines
from fray.node.ports import OFFERED_EMBEDDED, find_ports, ports_in_use, ports_taken_outcome
from fray.node.run import run_node
from fray.node.shim.progress_pipe import READ_BYTES, ProgressLog, open_pipe
from fray.runtime.background import open_background_nursery
from fray.runtime.process import current_job, stack_dump
from fray.runtime.process.attempt import AttemptResult, SyncRunner, run_attempt
from fray.runtime.runtime import Runtime
from fray.runtime.threads.user_threads import ThreadRegistry, register_thread, thread_registry_var

log = logging.getLogger("fray.deploy.local")

THREADS = trio.CapacityLimiter(1_000)
"""Sync jobs at the same time; far above what a laptop's ``local`` cluster offers in CPUs."""


GRACE_S = 2.0
"""How long leaving waits for threads of what was ended."""


class ThreadStage:
    """Sync code of a job runs in a thread of its own; cancellation abandons it, and the roll remembers it."""

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        def run() -> Any:
            with register_thread(name):
                return fn()

        name = f"fray-{self._job_id}"
        return await trio.to_thread.run_sync(run, thread_name=name, abandon_on_cancel=True, limiter=THREADS)

    def executor(self, runtime: Runtime) -> None:
        """The host makes a thread for each actor."""


@define(eq=False)
class _LocalAttempt:
    ticket: AttemptSpec
    cancel: trio.CancelScope
    asked_to_end: bool = False
    ended: bool = False
    remarks: ProgressLog = field(factory=ProgressLog)


class TaskLauncher(Launcher):
    """Runs attempts as tasks of this loop: a `fray.node.launcher.Launcher`."""

    def __init__(self, network: Network, stage: Callable[[AttemptSpec], SyncRunner], rng: random.Random) -> None:
        super().__init__()
        self.logs: MemoryLogs = MemoryLogs(time.time)
        self._network, self._stage, self._rng = network, stage, rng
        self._held: dict[AttemptId, _LocalAttempt] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def start(self, ticket: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "run the launcher first"
        held = self._held[ticket.attempt_id] = _LocalAttempt(ticket, trio.CancelScope())
        self._nursery.start_soon(self._run, held, payload)

    def stop(self, attempt_id: AttemptId, notice_s: float | None = None) -> None:
        held = self._held.get(attempt_id)
        if held is not None and not held.ended:
            held.asked_to_end = True
            self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.STOPPING, pid=os.getpid()), None)
            if notice_s is not None:
                current_job.set_preemption_notice(attempt_id)
                held.cancel.deadline = trio.current_time() + notice_s
            else:
                held.cancel.cancel()

    def kill(self, attempt_id: AttemptId) -> None:
        self.stop(attempt_id)

    def forget(self, attempt_id: AttemptId) -> None:
        held = self._held.pop(attempt_id, None)
        if held is not None:
            held.cancel.cancel()

    async def capture(self, attempt_id: AttemptId) -> str:
        """See `Launcher.capture`; all jobs share the process, and so its threads."""
        await trio.lowlevel.checkpoint()
        return f"{stack_dump.threads_text()}\n{stack_dump.tasks_text()}"

    def _hear(self, held: _LocalAttempt, said: AttemptReport) -> None:
        attempt_id = held.ticket.attempt_id
        if held.ended:
            return
        self.on_report(attempt_id, said)
        if isinstance(said, Progress):
            self._remark(attempt_id, held.remarks.line(said, trio.current_time()))

    def _remark(self, attempt_id: AttemptId, line: str | None) -> None:
        if line is not None:
            self._tell(attempt_id, "sys", system_lines(line))

    async def _run(self, held: _LocalAttempt, content: bytes | None) -> None:
        ticket, began = held.ticket, trio.current_time()
        taken = ports_in_use(ticket.ports.values())
        if not taken:
            self.on_observed(ObservedAttempt(attempt_id=ticket.attempt_id, phase=Phase.RUNNING, pid=os.getpid()), None)
        if taken:
            ended = AttemptResult(ports_taken_outcome(ticket, taken))
        elif ticket.spec.entry is EntryKind.BINARY:
            ended = await self._run_program(held)
        else:
            stage = self._stage(ticket)
            ended = await run_attempt(
                ticket,
                content or b"",
                self._network,
                stage,
                rng=self._rng,
                cancel=held.cancel,
                on_report=partial(self._hear, held),
            )
        self._remark(ticket.attempt_id, held.remarks.last_line(trio.current_time()))
        held.ended = True
        current_job.clear_preemption_notice(ticket.attempt_id)
        outcome = evolve(
            ended.outcome,
            value=None if ended.value is None else blob_id(ended.value),
            duration_s=trio.current_time() - began,
        )
        self.on_observed(ObservedAttempt(attempt_id=ticket.attempt_id, phase=Phase.ENDED, outcome=outcome), ended.value)

    async def _run_program(self, held: _LocalAttempt) -> AttemptResult:
        """A program is a process in every kind of cluster; its output becomes log lines."""
        spec = held.ticket.spec
        ended = Outcome(cause=EndReason.STOPPED, message="ended on request")
        try:
            with held.cancel, tempfile.TemporaryDirectory(prefix="fray-") as place, _open_ear(place) as pipe:
                variables = job_variables(evolve(held.ticket, directory=place))
                async with trio.open_nursery() as listening:
                    listening.start_soon(self._listen, held, pipe)
                    async with trio.open_nursery() as nursery:
                        process = await nursery.start(_start_program, spec.argv, variables)
                        for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
                            nursery.start_soon(self._relay, held.ticket.attempt_id, stream, name)
                    self._listen_now(held, pipe)
                    listening.cancel_scope.cancel()
                ended = program_outcome(process.returncode)
        except* OSError as group:  # out of the nurseries
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            ended = Outcome(cause=EndReason.ENVIRONMENT, message=f"cannot start {spec.argv[0]!r}: {error}")
        return AttemptResult(ended)

    async def _listen(self, held: _LocalAttempt, pipe: int) -> None:
        while True:
            await trio.lowlevel.wait_readable(pipe)
            self._listen_now(held, pipe)

    def _listen_now(self, held: _LocalAttempt, pipe: int) -> None:
        """To the whole lines that are there: programs write them whole."""
        with suppress(BlockingIOError):
            for line in os.read(pipe, READ_BYTES).split(b"\n"):
                said = parse(line)
                if said is not None:
                    self._hear(held, said)

    async def _relay(self, attempt_id: AttemptId, stream: Any, name: str) -> None:
        cutter = LineSplitter()
        async for chunk in stream:
            self._tell(attempt_id, name, cutter.feed(chunk))
        self._tell(attempt_id, name, cutter.flush())

    def _tell(self, attempt_id: AttemptId, name: str, lines: bytes) -> None:
        if lines:
            self.on_log(attempt_id, self.logs.add(attempt_id, name, lines))


@contextmanager
def _open_ear(place: str) -> Iterator[int]:
    pipe = open_pipe(Path(place))
    try:
        yield pipe
    finally:
        os.close(pipe)


async def _start_program(
    argv: tuple[str, ...],
    env_vars: dict[str, str],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    await trio.run_process(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, **env_vars},
        task_status=task_status,
    )


def program_outcome(code: int | None) -> Outcome:
    """The outcome of a program by its return code; negative means a signal."""
    if code == 0:
        return Outcome(cause=EndReason.SUCCEEDED, exit_code=0)
    if code is not None and code < 0:
        return Outcome(cause=EndReason.KILLED, signal=-code, message=f"killed by signal {-code}")
    return Outcome(cause=EndReason.FAILURE, exit_code=code, message=f"the program ended with exit code {code}")


# The cluster ---------------------------------------------------------------------------------------------------------


def local_capacity(ports: PortRange = PortRange()) -> Capacity:  # noqa: B008 - it is a value
    """What ``local`` offers: this machine's CPUs, at least 4 so that small gangs fit, and its memory on paper."""
    cpus = max(4, len(os.sched_getaffinity(0)))
    size = parse_bytes("1TB")
    return Capacity(cpu_milli=cpus * 1000, memory_bytes=size, disk_bytes=size, ports=ports)


@asynccontextmanager
async def open_local(
    *,
    namespace: Namespace | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    env_vars: Mapping[str, str] | None = None,
    policy: Policy | None = None,
    grace_s: float | None = None,
) -> AsyncIterator[Runtime]:
    """The driver's place in a cluster of this process alone; it ends, with all it runs, on exit.

    Threads cannot be ended: leaving waits ``grace_s`` (`GRACE_S`) for them to return, then a RuntimeWarning names those
    that are left.
    """
    rng = random.SystemRandom()
    network = embedded_network(rng)
    token = f"{rng.getrandbits(128):032x}"
    claim = find_ports(OFFERED_EMBEDDED, rng)
    capacity = local_capacity(claim.ports)
    config = NodeConfig(name="local", controller=CONTROLLER, token=token, capacity=capacity, state_dir="")
    with claim, _calling(ThreadRegistry()) as roll:
        async with _waiting_for(roll, GRACE_S if grace_s is None else grace_s), open_background_nursery() as nursery:
            await nursery.start(serve_controller, network, (), token, rng, [config], None, env_vars, policy)
            await nursery.start(_node, config, network, rng)
            async with open_driver(network, token, rng, namespace=namespace, on_log=on_log) as runtime:
                yield runtime


@contextmanager
def _calling(roll: ThreadRegistry) -> Iterator[ThreadRegistry]:
    """All threads that are begun from here on stand on it."""
    token = thread_registry_var.set(roll)
    try:
        yield roll
    finally:
        thread_registry_var.reset(token)


@asynccontextmanager
async def _waiting_for(roll: ThreadRegistry, grace_s: float) -> AsyncIterator[None]:
    """Also after an error or a cancellation: nothing outlives the block without a word."""
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            left = await roll.wait_empty(grace_s)
        if left:
            warnings.warn(told_left(left, grace_s), RuntimeWarning, stacklevel=1)


def told_left(left: Sequence[str], grace_s: float) -> str:
    """Which threads are left."""
    are = "is" if len(left) == 1 else "are"
    return (
        f"the local cluster has ended, and {len(left)} of its threads {are} still in user code after {grace_s:g} s: "
        f"{', '.join(left)}; a thread cannot be ended, so what it runs should return when it is asked to, or be run on "
        "'machine'"
    )


async def _node(
    config: NodeConfig,
    network: Network,
    rng: random.Random,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    launcher = TaskLauncher(network, lambda ticket: ThreadStage(ticket.spec.job_id), rng)
    await run_node(config, network, launcher, rng=rng, task_status=task_status)
