"""One attempt on a node: from its attempt_spec to its outcome, through what it needs, its shim, and its shim's words.

Law: what an attempt needs is made ready before a shim is asked for. A stop gives that up; after it, the shim ends
the job by the ladder. The outcome is known once the shim has said that nothing is left below it, or, if the shim
was killed, once the orphans it left have been swept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import asdict, define, field

from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.codec import to_json
from fray.node.attempts.shim_connection import ShimConnection
from fray.node.job_process.outcome_file import load
from fray.node.launcher import SUSPENDED_BEFORE_START, OnObserved, OnReport
from fray.node.logs.redact import Redactor
from fray.node.logs.store import AttemptLogWriter
from fray.node.ports import ports_in_use, ports_taken_outcome
from fray.node.prepare import (
    EnvironmentServices,
    NotPrepared,
    PreparedEnvironment,
    Preparer,
)
from fray.node.resources.allocation import Allocation
from fray.node.resources.allocator import ResourceAllocator
from fray.node.resources.attempt_limit import AttemptLimiter
from fray.node.shim.progress_pipe import parse_report
from fray.node.zygotes.manager import ZygoteManager
from fray.node.zygotes.pool import PooledZygote, ZygotePool

START_S = 30.0
"""An attempt whose shim says nothing for so long could not be started."""
START_TRIES = 3

log = logging.getLogger("fray.node")


@define(eq=False)
class RunningAttempt:
    """One attempt, as its node holds it."""

    attempt_spec: AttemptSpec
    directory: Path
    log: AttemptLogWriter | None = None
    """What it prints; None if the disk has no room for it."""
    phase: Phase = Phase.STARTING
    pid: int | None = None
    preparing: trio.CancelScope | None = None
    """Set while what it needs is made ready."""
    control: ShimConnection | None = None
    """Set while the shim listens."""
    zygote: int | None = None
    """Pid of the zygote that was asked for the shim, until the shim has said its own."""
    shim: int | None = None
    shim_pidfd: int = -1
    pipes: dict[str, int] = field(factory=dict)
    """The shim's ends of the job's output, held here too: what is in them outlives a shim that is killed."""
    stop_requested: bool = False
    kill_requested: bool = False
    forget_requested: bool = False
    captured: trio.Event = field(factory=trio.Event)
    """Set when a capture is there, and replaced."""
    unkillable: int = 0
    """Processes of it that its shim could not end yet."""
    ended: trio.Event = field(factory=trio.Event)

    @property
    def attempt_id(self) -> str:
        return self.attempt_spec.attempt_id

    @property
    def end_requested(self) -> bool:
        return self.stop_requested or self.kill_requested

    def say(self, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``) into its log, whether it has a process yet or not."""
        if self.log is not None:
            self.log.say(text)

    def request(self, what: str, value: float = 1) -> bool:
        """Pass ``stop``, ``notice`` or ``kill`` on to whoever works on it; False if its process is not there yet."""
        if self.preparing is not None:
            self.preparing.cancel()
        if self.control is not None:
            self.control.notify(**{what: value})
        return self.control is not None


class AttemptServices(Protocol):
    """Where attempts are: what one needs of its launcher."""

    entry: str
    offered: dict[str, int]
    allocator: ResourceAllocator
    preparer: Preparer
    environment_services: EnvironmentServices
    zygote_pool: ZygotePool
    attempt_limiter: AttemptLimiter
    on_observed: OnObserved
    on_report: OnReport

    def sweep_adopted(self, dead: int | None = None) -> bool:
        """See `ProcessLauncher.sweep_adopted`."""
        ...

    def has_pid_namespace(self, attempt_spec: AttemptSpec) -> bool:
        """Whether its processes have a PID namespace of their own."""
        ...

    in_doubt: Callable[[], bool]
    """See `fray.node.launcher.Doubting`."""

    def note_shim_started(self) -> None:
        """One that was asked for has said its pid, or never will."""
        ...

    async def wait_shim_started(self) -> None: ...


@define
class AttemptRunner:
    """The way of one attempt through its services."""

    attempt: RunningAttempt
    services: AttemptServices

    async def run(self) -> tuple[Outcome, bytes | None]:
        """Its outcome, and the value that this names."""
        pooled: PooledZygote | None = None
        try:
            prepared, pooled = await self._prepare()
            return await self._run(prepared, pooled)
        except NotPrepared as error:
            return Outcome(cause=error.cause, message=str(error)), None
        finally:
            if pooled is not None:
                pooled.release()
            self.services.environment_services.release(self.attempt.attempt_id)
            self.services.attempt_limiter.release(self.attempt.attempt_id)

    async def _run(self, prepared: PreparedEnvironment, pooled: PooledZygote | None) -> tuple[Outcome, bytes | None]:
        given = await self._allocate()
        attempt_spec = self.attempt.attempt_spec
        taken = ports_in_use(attempt_spec.ports.values())
        if taken and not self.attempt.end_requested:
            return ports_taken_outcome(attempt_spec, taken), None
        for _ in range(START_TRIES):
            if pooled is None or self.attempt.end_requested:
                return Outcome(cause=EndReason.STOPPED, message="stopped before it started"), None
            if self.services.in_doubt():
                return SUSPENDED_BEFORE_START, None
            control = await self._start_shim(prepared, given, pooled.manager)
            if control is not None:
                with contextlib.closing(control):
                    return await self._handle_messages(control, prepared, pooled.manager)
        return start_failure(f"node {attempt_spec.node} cannot start a process; its log says why"), None

    async def _prepare(self) -> tuple[PreparedEnvironment, PooledZygote | None]:
        """What it starts from, and the zygote that forks it: None if it was stopped meanwhile."""
        attempt = self.attempt
        if attempt.end_requested:
            return PreparedEnvironment(), None
        with trio.CancelScope() as attempt.preparing:
            try:
                await self.services.attempt_limiter.acquire(attempt.attempt_id, self._say)
                prepared = await self._prepare_environment(attempt.attempt_spec)
                return prepared, await self.services.zygote_pool.acquire(prepared)
            finally:
                attempt.preparing = None
        return PreparedEnvironment(), None

    async def _prepare_environment(self, attempt_spec: AttemptSpec) -> PreparedEnvironment:
        """What jobs bring along is anybody's: an error nobody thought of costs this attempt, and not the node."""
        try:
            return await self.services.preparer.prepare(attempt_spec, self._say)
        except NotPrepared:
            raise
        except Exception as error:
            log.exception("%s cannot be made ready", attempt_spec.attempt_id)
            raise NotPrepared(
                f"what it needs cannot be made ready: {error!r}; the log of node {attempt_spec.node} says where"
            ) from error

    def _say(self, line: str) -> None:
        self.attempt.say(line)

    async def _allocate(self) -> Allocation:
        attempt, services = self.attempt, self.services
        isolated = services.has_pid_namespace(attempt.attempt_spec)
        return await services.allocator.allocate(attempt.attempt_spec, lambda: attempt.shim, isolated=isolated)

    async def _start_shim(
        self, prepared: PreparedEnvironment, given: Allocation, zygotes: ZygoteManager
    ) -> ShimConnection | None:
        """The control socket of a new shim; None if it could not be forked (the zygote died, no process left)."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            log.error("%s: no socket for its shim: %s", self.attempt.attempt_id, error)
            return None
        control, greeted = ShimConnection(ours), False
        try:
            with trio.move_on_after(START_S) as patience, theirs:
                self.attempt.zygote = await self._request_shim(theirs, zygotes)
                theirs.close()
                greeted = await self._send_start(control, prepared, given)
            if patience.cancelled_caught:
                zygotes.kill(self.attempt.zygote)
        finally:
            self.attempt.zygote = None
            self.services.note_shim_started()
            if not greeted:
                control.close()
        self.services.sweep_adopted()
        return control if greeted else None

    async def _request_shim(self, theirs: socket.socket, zygotes: ZygoteManager) -> int:
        namespace = self.services.has_pid_namespace(self.attempt.attempt_spec)
        return await zygotes.fork_shim(theirs, namespace=namespace)

    async def _send_start(self, control: ShimConnection, prepared: PreparedEnvironment, given: Allocation) -> bool:
        attempt = self.attempt
        start = {
            "attempt_spec": to_json(attempt.attempt_spec),
            "entry": self.services.entry,
            "offered": self.services.offered,
        }
        log_of = attempt.log.hand_over() if attempt.log is not None else None
        try:
            await control.send({**start, "prepared": prepared.for_shim(), "given": asdict(given), "log": log_of})
        except OSError as error:
            log.debug("%s: no shim: %s", attempt.attempt_id, error)
            return False
        greeting = await control.receive()
        if greeting is None:
            return False
        attempt.shim, attempt.shim_pidfd = greeting["shim"], control.take_descriptor()
        return True

    async def _handle_messages(
        self, control: ShimConnection, prepared: PreparedEnvironment, zygotes: ZygoteManager
    ) -> tuple[Outcome, bytes | None]:
        attempt = self.attempt
        attempt.control = control
        if attempt.log is not None:
            attempt.log.send_to_shim = lambda text: control.notify(say=text)
        if attempt.end_requested:
            control.notify(**{"kill" if attempt.kill_requested else "stop": 1})
        try:
            while (message := await control.receive()) is not None:
                if "running" in message:
                    attempt.pid = message["running"]
                    attempt.pipes = control.take_descriptors("out", "err")
                    self.report_phase(Phase.STOPPING if attempt.stop_requested else Phase.RUNNING)
                elif "log" in message:
                    self._forward_log()
                elif "said" in message:
                    control.notify(heard=1)
                    for said in parse_report(message["said"]):
                        self.services.on_report(attempt.attempt_id, said)
                elif "captured" in message:
                    attempt.captured.set()
                    attempt.captured = trio.Event()
                elif "ended" in message:
                    return self._read_outcome(message)
        finally:
            attempt.control = None
            if attempt.log is not None:
                attempt.log.send_to_shim = None
        return await self._handle_shim_lost(prepared, zygotes)

    def report_phase(self, phase: Phase) -> None:
        attempt = self.attempt
        attempt.phase = phase
        self.services.on_observed(ObservedAttempt(attempt_id=attempt.attempt_id, phase=phase, pid=attempt.pid), None)

    def _forward_log(self) -> None:
        if self.attempt.log is not None:
            self.attempt.log.forward()

    def _read_outcome(self, message: dict[str, Any]) -> tuple[Outcome, bytes | None]:
        self._forward_log()
        self.attempt.unkillable = message["left"]
        if message["swept"] or message["left"]:
            words = self.attempt.attempt_id, message["swept"], message["left"]
            log.info("%s: ended %d processes that it left behind; %d are left", *words)
        return load(self.attempt.directory, message.get("outcome")) or (start_failure("the shim left no outcome"), None)

    async def _handle_shim_lost(
        self, prepared: PreparedEnvironment, zygotes: ZygoteManager
    ) -> tuple[Outcome, bytes | None]:
        """The shim was killed: wait until it is dead, then until its orphans are."""
        attempt = self.attempt
        if attempt.shim_pidfd >= 0:
            await trio.lowlevel.wait_readable(attempt.shim_pidfd)
        self.services.sweep_adopted(dead=attempt.shim)
        await zygotes.sweep()
        await self.services.environment_services.clean_up(prepared, attempt.attempt_id)
        while not self.services.sweep_adopted(dead=attempt.shim):
            await self.services.wait_shim_started()
        if attempt.log is not None:
            attempt.log.finish(attempt.pipes, Redactor(attempt.attempt_spec.secrets).hide)
        lost = Outcome(
            cause=EndReason.STOPPED if attempt.end_requested else EndReason.KILLED,
            message="its shim process was killed, and the job with it",
            signal=signal.SIGKILL,
        )
        return load(attempt.directory) or (lost, None)


def start_failure(message: str) -> Outcome:
    """The outcome of an attempt that this machine could not start, whatever it was."""
    return Outcome(cause=EndReason.ENVIRONMENT, message=message, machine_fault=True)


def close_shim(attempt: RunningAttempt) -> None:
    """Let go of what was held of its shim."""
    if attempt.shim_pidfd >= 0:
        os.close(attempt.shim_pidfd)
        attempt.shim_pidfd = -1
    for pipe in attempt.pipes.values():
        os.close(pipe)
    attempt.pipes = {}
