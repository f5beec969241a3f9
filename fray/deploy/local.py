"""The ``local`` cluster: the real controller and a real node, whose jobs are tasks and threads of this process.

Payloads are still pickled and all messages are exchanged, in memory, so what works here works on machines. A thread
cannot be killed: a sync job that does not end on request is abandoned, and a warning names it.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve

from fray.deploy.embedded_controller import (
    CONTROLLER,
    embedded_network,
    open_driver,
    serve_controller,
)
from fray.deploy.local_processes import JobProcesses
from fray.errors import FrayError
from fray.model.ids import AttemptId, JobId, Namespace
from fray.model.log_records import LogLine
from fray.model.monitoring.health import Progress
from fray.model.monitoring.progress_protocol import AttemptReport, parse
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, PortRange, parse_bytes
from fray.model.specs import AttemptSpec, EndReason, EntryKind, ObservedAttempt, Outcome, Phase
from fray.net.codec import Bytes, blob_id
from fray.net.large_values import download_to_memory
from fray.net.transport import Network
from fray.node.attempts.values import send_from_memory
from fray.node.config import NodeConfig
from fray.node.job_process.bootstrap import job_variables
from fray.node.launcher import Launcher
from fray.node.logs.store import MemoryLogs
from fray.node.logs.writer import LineSplitter, system_lines
from fray.node.ports import OFFERED_EMBEDDED, find_ports, ports_in_use, ports_taken_outcome
from fray.node.run import run_node
from fray.node.shim.progress_pipe import READ_BYTES, ProgressLog, open_pipe
from fray.runtime.background import open_background_nursery
from fray.runtime.notebook_cells import KERNEL, enter_cell_of
from fray.runtime.process import current_job, stack_dump
from fray.runtime.process.attempt import AttemptResult, SyncRunner, run_attempt, stopped
from fray.runtime.runtime import Runtime
from fray.runtime.serialization.values import LargeValue
from fray.runtime.threads.user_threads import ThreadRegistry, register_thread, thread_registry_var
from fray.tracebacks import first_error

log = logging.getLogger("fray.deploy.local")

THREADS = trio.CapacityLimiter(1_000)
"""Limit of concurrent sync jobs; far above the CPUs that a laptop's ``local`` cluster offers."""


GRACE_S = 2.0
"""Default seconds that leaving waits for threads of jobs that have been ended."""


class ThreadStage:
    """Runs the sync code of a job in a thread of its own; cancellation abandons it, and the thread registry
    remembers it.
    """

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        def run() -> Any:
            with register_thread(name):
                return fn()

        name = f"fray-{self._job_id}"
        # The loop must not wait for a thread that ignores its cancellation; the registry names it at the end.
        return await trio.to_thread.run_sync(run, thread_name=name, abandon_on_cancel=True, limiter=THREADS)

    def executor(self, runtime: Runtime) -> None:
        """Return None: the actor host makes a thread for each actor."""


@define(eq=False)
class _LocalAttempt:
    attempt_spec: AttemptSpec
    cancel: trio.CancelScope
    end_requested: bool = False
    ended: bool = False
    progress_log: ProgressLog | None = None
    """Made with the first progress report."""


class TaskLauncher(Launcher):
    """Launcher that runs attempts as tasks of this loop: a `fray.node.launcher.Launcher`."""

    def __init__(
        self,
        network: Network,
        stage: Callable[[AttemptSpec], SyncRunner],
        rng: random.Random,
        processes: JobProcesses,
    ) -> None:
        super().__init__()
        self._processes = processes
        self.logs: MemoryLogs = MemoryLogs(time.time)
        self._network, self._stage, self._rng = network, stage, rng
        self._attempts: dict[AttemptId, _LocalAttempt] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def start(self, attempt_spec: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "run the launcher first"
        attempt = self._attempts[attempt_spec.attempt_id] = _LocalAttempt(attempt_spec, trio.CancelScope())
        self._nursery.start_soon(self._run, attempt, payload)

    def stop(self, attempt_id: AttemptId, notice_s: float | None = None) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.ended:
            attempt.end_requested = True
            # Reported before the cancellation, so that the end which follows is classified as requested.
            self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.STOPPING, pid=os.getpid()), None)
            if notice_s is not None:
                current_job.set_preemption_notice(attempt_id)
                # A preemption notice: the job may save its state until then.
                attempt.cancel.deadline = trio.current_time() + notice_s
            else:
                attempt.cancel.cancel()

    def kill(self, attempt_id: AttemptId) -> None:
        self.stop(attempt_id)

    def forget(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            attempt.cancel.cancel()

    async def capture(self, attempt_id: AttemptId) -> str:
        """Return the stacks; see `Launcher.capture`. All jobs share the process, and so its threads."""
        await trio.lowlevel.checkpoint()
        return f"{stack_dump.threads_text()}\n{stack_dump.tasks_text()}"

    def _on_attempt_report(self, attempt: _LocalAttempt, report: AttemptReport) -> None:
        attempt_id = attempt.attempt_spec.attempt_id
        if attempt.ended:
            return
        self.on_report(attempt_id, report)
        if isinstance(report, Progress):
            attempt.progress_log = attempt.progress_log or ProgressLog()
            self._log_progress(attempt_id, attempt.progress_log.line(report, trio.current_time()))

    def _log_progress(self, attempt_id: AttemptId, line: str | None) -> None:
        if line is not None:
            self._log(attempt_id, "sys", system_lines(line))

    async def _run(self, attempt: _LocalAttempt, content: bytes | None) -> None:
        attempt_spec, began = attempt.attempt_spec, trio.current_time()
        if KERNEL in sys.modules:
            enter_cell_of(attempt_spec.spec.job_id)
        # Ports are tried right before the start: another program may have taken one since the placement.
        taken = ports_in_use(attempt_spec.ports.values()) if attempt_spec.ports else []
        if not taken:
            self.on_observed(
                ObservedAttempt(attempt_id=attempt_spec.attempt_id, phase=Phase.RUNNING, pid=os.getpid()), None
            )
        if taken:
            ended = AttemptResult(ports_taken_outcome(attempt_spec, taken))
        else:
            is_program = attempt_spec.spec.entry is EntryKind.BINARY
            try:
                with self._processes.started_by(attempt_spec.attempt_id):
                    ended = await (self._run_program(attempt) if is_program else self._run_code(attempt, content))
            finally:
                # Before the end is reported: nothing is left of an attempt that has ended.
                await self._processes.end(attempt_spec.attempt_id)
        if attempt.progress_log is not None:
            self._log_progress(attempt_spec.attempt_id, attempt.progress_log.last_line(trio.current_time()))
        # Before the outcome: reports that a thread still sends do not belong to the attempt any more.
        attempt.ended = True
        current_job.clear_preemption_notice(attempt_spec.attempt_id)
        outcome, value = evolve(ended.outcome, duration_s=trio.current_time() - began), ended.value
        if isinstance(value, LargeValue):
            # A copy: the driver may have the same array, and change it.
            outcome, value = await send_from_memory(self.request, outcome, value.join()), None
        elif value is not None:
            outcome = evolve(outcome, value=blob_id(value))
        self.on_observed(ObservedAttempt(attempt_id=attempt_spec.attempt_id, phase=Phase.ENDED, outcome=outcome), value)

    async def _run_code(self, attempt: _LocalAttempt, content: Bytes | None) -> AttemptResult:
        """Run a function or an actor, after fetching its payload if that is large."""
        payload = attempt.attempt_spec.spec.payload
        if content is None and payload is not None:
            with attempt.cancel:
                try:
                    content = await download_to_memory(self.request, payload)
                except FrayError as error:
                    return AttemptResult(Outcome(cause=EndReason.ENVIRONMENT, message=f"its payload: {error}"))
            if content is None:
                return stopped()
            # A scope can be entered only once.
            attempt.cancel = trio.CancelScope(deadline=attempt.cancel.deadline)
        return await run_attempt(
            attempt.attempt_spec,
            content or b"",
            self._network,
            self._stage(attempt.attempt_spec),
            rng=self._rng,
            cancel=attempt.cancel,
            on_report=partial(self._on_attempt_report, attempt),
        )

    async def _run_program(self, attempt: _LocalAttempt) -> AttemptResult:
        """Run a program as a process, as in every kind of cluster; its output becomes log lines."""
        spec = attempt.attempt_spec.spec
        ended = Outcome(cause=EndReason.STOPPED, message="ended on request")
        try:
            with (
                attempt.cancel,
                tempfile.TemporaryDirectory(prefix="fray-") as directory,
                _open_report_pipe(directory) as pipe,
            ):
                variables = job_variables(evolve(attempt.attempt_spec, directory=directory))
                # Two nurseries: the listener for reports never ends by itself and is cancelled when program and pipes
                # have ended.
                async with trio.open_nursery() as listeners:
                    listeners.start_soon(self._listen, attempt, pipe)
                    async with trio.open_nursery() as nursery:
                        process = await nursery.start(_start_program, spec.argv, variables)
                        for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
                            nursery.start_soon(self._relay, attempt.attempt_spec.attempt_id, stream, name)
                    # The last reports may have arrived after the listener's last turn.
                    self._read_reports(attempt, pipe)
                    listeners.cancel_scope.cancel()
                ended = program_outcome(process.returncode)
        except* OSError as group:  # raised in the nurseries
            message = f"cannot start {spec.argv[0]!r}: {first_error(group)}"
            ended = Outcome(cause=EndReason.ENVIRONMENT, message=message)
        return AttemptResult(ended)

    async def _listen(self, attempt: _LocalAttempt, pipe: int) -> None:
        while True:
            await trio.lowlevel.wait_readable(pipe)
            self._read_reports(attempt, pipe)

    def _read_reports(self, attempt: _LocalAttempt, pipe: int) -> None:
        """Read the reports that have arrived; programs write whole lines."""
        # Another wake-up may have read everything.
        with suppress(BlockingIOError):
            for line in os.read(pipe, READ_BYTES).split(b"\n"):
                report = parse(line)
                if report is not None:
                    self._on_attempt_report(attempt, report)

    async def _relay(self, attempt_id: AttemptId, stream: Any, name: str) -> None:
        cutter = LineSplitter()
        async for chunk in stream:
            self._log(attempt_id, name, cutter.feed(chunk))
        self._log(attempt_id, name, cutter.flush())

    def _log(self, attempt_id: AttemptId, name: str, lines: bytes) -> None:
        if lines:
            self.on_log(attempt_id, self.logs.add(attempt_id, name, lines))


@contextmanager
def _open_report_pipe(directory: str) -> Iterator[int]:
    pipe = open_pipe(Path(directory))
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
        # As on machines: a program that reads the driver's terminal would work only here.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, **env_vars},
        task_status=task_status,
    )


def program_outcome(code: int | None) -> Outcome:
    """Return the outcome of a program by its return code; negative means a signal."""
    if code == 0:
        return Outcome(cause=EndReason.SUCCEEDED, exit_code=0)
    if code is not None and code < 0:
        return Outcome(cause=EndReason.KILLED, signal=-code, message=f"killed by signal {-code}")
    return Outcome(cause=EndReason.FAILURE, exit_code=code, message=f"the program ended with exit code {code}")


# The cluster ---------------------------------------------------------------------------------------------------------


def local_capacity(ports: PortRange = PortRange()) -> Capacity:  # noqa: B008 - it is a value
    """Return the capacity of ``local``: this machine's CPUs, at least 4 so that small gangs fit, and nominal memory."""
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
    """Open a cluster within this process as its driver; it ends, with all it runs, on exit.

    Threads cannot be killed: leaving waits ``grace_s`` (`GRACE_S`) for them to return, then a RuntimeWarning names
    those that are left.
    """
    rng = random.SystemRandom()
    network = embedded_network(rng)
    # Random, although only memory addresses are used: the same code checks it as in every cluster.
    token = f"{rng.getrandbits(128):032x}"
    claim = find_ports(OFFERED_EMBEDDED, rng)
    capacity = local_capacity(claim.ports)
    config = NodeConfig(name="local", controller=CONTROLLER, token=token, capacity=capacity, state_dir="")
    with (
        claim,
        _registering_threads(ThreadRegistry()) as registry,
        closing(JobProcesses(f"local-{rng.getrandbits(64):016x}")) as processes,
    ):
        async with (
            # Outside of the nursery: threads are waited for after everything in the loop has ended.
            _waiting_for_threads(registry, GRACE_S if grace_s is None else grace_s),
            open_background_nursery() as nursery,
        ):
            await nursery.start(serve_controller, network, (), token, rng, [config], None, env_vars, policy)
            await nursery.start(_node, config, network, rng, processes)
            async with open_driver(network, token, rng, namespace=namespace, on_log=on_log) as runtime:
                yield runtime


@contextmanager
def _registering_threads(registry: ThreadRegistry) -> Iterator[ThreadRegistry]:
    """Register all threads started in this block."""
    token = thread_registry_var.set(registry)
    try:
        yield registry
    finally:
        thread_registry_var.reset(token)


@asynccontextmanager
async def _waiting_for_threads(registry: ThreadRegistry, grace_s: float) -> AsyncIterator[None]:
    """Wait for the registered threads on exit, also after an error or a cancellation; warn of those that are left."""
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            remaining = await registry.wait_empty(grace_s)
        if remaining:
            warnings.warn(leftover_threads_text(remaining, grace_s), RuntimeWarning, stacklevel=1)


def leftover_threads_text(remaining: Sequence[str], grace_s: float) -> str:
    """Return the warning about threads that are left."""
    verb = "is" if len(remaining) == 1 else "are"
    return (
        f"the local cluster has ended, and {len(remaining)} of its threads {verb} still in user code after "
        f"{grace_s:g} s: {', '.join(remaining)}; a thread cannot be killed, so its code should return when it is "
        "cancelled, or run on 'machine'"
    )


async def _node(
    config: NodeConfig,
    network: Network,
    rng: random.Random,
    processes: JobProcesses,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    launcher = TaskLauncher(network, lambda attempt_spec: ThreadStage(attempt_spec.spec.job_id), rng, processes)
    await run_node(config, network, launcher, rng=rng, task_status=task_status)
