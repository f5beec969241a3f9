"""Runner of one attempt: from its spec through preparation and its shim to its outcome.

Invariants: everything an attempt needs is ready before a shim is requested. A stop cancels the preparation; later, the
shim ends the job by its termination policy. The outcome is final once the shim has reported that no process is left
below it or, if the shim was killed, once the orphans it left have been killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import trio
from attrs import asdict, define, evolve, field

from fray.errors import FrayError
from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.codec import to_json
from fray.net.part_transfers import RequestController
from fray.node.accounts.table import AccountTable
from fray.node.attempts.shim_connection import ShimConnection
from fray.node.attempts.values import fetch_to_file
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
"""Seconds a shim may take to send its pid; an attempt whose shim takes longer could not be started."""
START_TRIES = 3

log = logging.getLogger("fray.node")


@define(eq=False)
class RunningAttempt:
    """State of one attempt on its node."""

    attempt_spec: AttemptSpec
    directory: Path
    """Directory of what the node and the shim write; that of the job, unless it has an account of its own."""
    log: AttemptLogWriter | None = None
    """Log of the attempt; None if it could not be created (the disk is full)."""
    phase: Phase = Phase.STARTING
    pid: int | None = None
    preparing: trio.CancelScope | None = None
    """Scope of the preparation while it runs, later of the transfer of a large result."""
    control: ShimConnection | None = None
    """Connection to the shim while it accepts requests."""
    zygote: int | None = None
    """Pid of the zygote that was asked for the shim, until the shim has sent its own pid."""
    shim: int | None = None
    shim_pidfd: int = -1
    pipes: dict[str, int] = field(factory=dict)
    """Read ends of the job's output pipes by stream; a copy of the shim's, so that what is in them survives a killed
    shim."""
    prepared: PreparedEnvironment | None = None
    """Environment in which it was started, once it has a shim."""
    zygotes: ZygoteManager | None = None
    """Manager of the zygote that has forked its shim."""
    overdue_at: float | None = None
    """Time of `time.monotonic` at which its shim is killed."""
    fetches_payload: bool = False
    """True if its payload is large, and is fetched before the start."""
    stop_requested: bool = False
    kill_requested: bool = False
    forget_requested: bool = False
    captured: trio.Event = field(factory=trio.Event)
    """Set when a stack capture is written, and replaced then."""
    unkillable: int = 0
    """Number of processes that the shim has not been able to end yet."""
    ended: trio.Event = field(factory=trio.Event)

    @property
    def attempt_id(self) -> str:
        return self.attempt_spec.attempt_id

    @property
    def end_requested(self) -> bool:
        return self.stop_requested or self.kill_requested

    def say(self, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``) to the attempt's log, before or while it has a process."""
        if self.log is not None:
            self.log.say(text)

    def request(self, what: str, value: float = 1) -> bool:
        """Pass ``stop``, ``notice`` or ``kill`` to the preparation or the shim; return whether there is a shim."""
        if self.preparing is not None:
            self.preparing.cancel()
        if self.control is not None:
            self.control.notify(**{what: value})
        return self.control is not None


class AttemptServices(Protocol):
    """Parts of a launcher that `AttemptRunner` uses."""

    entry: str
    offered: dict[str, int]
    allocator: ResourceAllocator
    preparer: Preparer
    environment_services: EnvironmentServices
    zygote_pool: ZygotePool
    attempt_limiter: AttemptLimiter
    accounts: AccountTable | None
    on_observed: OnObserved
    on_report: OnReport
    request: RequestController

    def sweep_adopted(self, dead: int | None = None) -> bool:
        """See `ProcessLauncher.sweep_adopted`."""
        ...

    def has_pid_namespace(self, attempt_spec: AttemptSpec) -> bool:
        """Return whether the attempt has a PID namespace of its own."""
        ...

    in_doubt: Callable[[], bool]
    """See `fray.node.launcher.Launcher`."""

    def note_shim_started(self) -> None:
        """Note that a requested shim has sent its pid, or never will."""
        ...

    async def wait_shim_started(self) -> None: ...


Ended: TypeAlias = tuple[Outcome, bytes | Path | None]
"""Outcome of an attempt and its value, a large one as a file."""


@define
class AttemptRunner:
    """Runs one attempt with the services of its launcher."""

    attempt: RunningAttempt
    services: AttemptServices

    async def run(self) -> Ended:
        """Return the attempt's outcome, and its value if it has one."""
        pooled: PooledZygote | None = None
        try:
            prepared, pooled = await self._prepare()
            return await self._run(prepared, pooled)
        except NotPrepared as error:
            return Outcome(cause=error.cause, message=str(error)), None
        finally:
            if pooled is not None:
                # The environment and its zygote may be evicted from here on: no process of the attempt is left.
                pooled.release()
            self.services.environment_services.release(self.attempt.attempt_id)

    async def resume(self, control: ShimConnection, pooled: PooledZygote) -> Ended:
        """Continue an attempt that the program which ran in this process before has started."""
        assert self.attempt.prepared is not None
        try:
            with contextlib.closing(control):
                return await self._handle_messages(control, self.attempt.prepared, pooled.manager)
        finally:
            pooled.release()
            self.services.environment_services.release(self.attempt.attempt_id)

    async def _run(self, prepared: PreparedEnvironment, pooled: PooledZygote | None) -> Ended:
        allocation = await self._allocate()
        attempt_spec = self.attempt.attempt_spec
        # Immediately before the start: preparation may have taken minutes, in which a program outside Fray may have
        # bound one.
        ports_taken = ports_in_use(attempt_spec.ports.values())
        if ports_taken and not self.attempt.end_requested:
            return ports_taken_outcome(attempt_spec, ports_taken), None
        # A zygote that dies with the request (the OOM killer) is replaced, and a shortage of processes may pass.
        for _ in range(START_TRIES):
            if pooled is None or self.attempt.end_requested:
                return Outcome(cause=EndReason.STOPPED, message="stopped before it started"), None
            # At each try: the machine may have been suspended during the preparation, and the controller may have
            # placed the attempt elsewhere since.
            if self.services.in_doubt():
                return SUSPENDED_BEFORE_START, None
            control = await self._start_shim(prepared, allocation, pooled.manager)
            if control is not None:
                with contextlib.closing(control):
                    return await self._handle_messages(control, prepared, pooled.manager)
        return start_failure(f"node {attempt_spec.node} cannot start a process; see its log"), None

    async def _prepare(self) -> tuple[PreparedEnvironment, PooledZygote | None]:
        """Return what the attempt starts from and the zygote that forks it (None if it was stopped meanwhile)."""
        attempt = self.attempt
        if attempt.end_requested:
            return PreparedEnvironment(), None
        # A stop cancels this scope: it must not wait for a download, an image or a build.
        with trio.CancelScope() as attempt.preparing:
            try:
                await self._fetch_payload()
                # The slot first: everything after it opens descriptors.
                await self.services.attempt_limiter.acquire(attempt.attempt_id, self._say)
                if self.services.accounts is not None:
                    await self._acquire_account(self.services.accounts)
                prepared = await self._prepare_environment(attempt.attempt_spec)
                # Within the scope, too: the first zygote of an environment has to import everything first.
                return prepared, await self.services.zygote_pool.acquire(prepared)
            finally:
                attempt.preparing = None
        return PreparedEnvironment(), None

    async def _acquire_account(self, accounts: AccountTable) -> None:
        spec = self.attempt.attempt_spec
        self.attempt.attempt_spec = evolve(spec, account=await accounts.acquire(spec.spec.user, spec.node))

    async def _fetch_payload(self) -> None:
        """Fetch the payload unless it came with the order to start."""
        attempt_spec = self.attempt.attempt_spec
        payload, path = attempt_spec.spec.payload, attempt_spec.payload_path
        if not self.attempt.fetches_payload or payload is None or path is None:
            return
        try:
            await fetch_to_file(self.services.request, payload, path)
        except FrayError as error:
            # The cause of a lost machine, as the job is not to blame: it is placed again.
            what = f"node {attempt_spec.node} did not receive its payload: {error}"
            raise NotPrepared(what, EndReason.MACHINE_LOST) from error
        except OSError as error:
            raise NotPrepared(f"node {attempt_spec.node} cannot store its payload: {error}") from error

    async def _prepare_environment(self, attempt_spec: AttemptSpec) -> PreparedEnvironment:
        """Run the preparer."""
        try:
            return await self.services.preparer.prepare(attempt_spec, self._say)
        except NotPrepared:
            raise
        except Exception as error:  # what a job brings is untrusted: it costs this attempt, not the node
            log.exception("preparation of %s failed", attempt_spec.attempt_id)
            raise NotPrepared(f"preparation failed: {error!r}; see the log of node {attempt_spec.node}") from error

    def _say(self, line: str) -> None:
        self.attempt.say(line)

    async def _allocate(self) -> Allocation:
        attempt, services = self.attempt, self.services
        isolated = services.has_pid_namespace(attempt.attempt_spec)
        return await services.allocator.allocate(attempt.attempt_spec, lambda: attempt.shim, isolated=isolated)

    async def _start_shim(
        self, prepared: PreparedEnvironment, allocation: Allocation, zygotes: ZygoteManager
    ) -> ShimConnection | None:
        """Return the control socket of a new shim; None if it could not be forked (zygote died, no process left)."""
        try:
            node_end, shim_end = socket.socketpair()
        except OSError as error:
            # Out of descriptors. Raised, it would end the launcher, and with it all jobs of the node.
            log.error("%s: cannot create a socket for its shim: %s", self.attempt.attempt_id, error)
            return None
        control, greeted = ShimConnection(node_end), False
        try:
            with trio.move_on_after(START_S) as patience, shim_end:
                self.attempt.zygote = await self._request_shim(shim_end, zygotes)
                # Now only the zygote and the shim have this end: if either dies, the other end reads the end of the
                # stream.
                shim_end.close()
                greeted = await self._send_start(control, prepared, allocation)
            if patience.cancelled_caught:
                # It has not answered for 30 s; the manager starts another when it has ended.
                zygotes.kill(self.attempt.zygote)
        finally:
            self.attempt.zygote = None
            self.services.note_shim_started()
            if not greeted:
                control.close()
        # While the request was pending, an unknown child might have been this shim, so orphans were left alive.
        self.services.sweep_adopted()
        return control if greeted else None

    async def _request_shim(self, shim_end: socket.socket, zygotes: ZygoteManager) -> int:
        namespace = self.services.has_pid_namespace(self.attempt.attempt_spec)
        return await zygotes.fork_shim(shim_end, namespace=namespace)

    async def _send_start(self, control: ShimConnection, prepared: PreparedEnvironment, allocation: Allocation) -> bool:
        attempt = self.attempt
        start = {
            "attempt_spec": to_json(attempt.attempt_spec),
            "records": str(attempt.directory),
            "entry": self.services.entry,
            "offered": self.services.offered,
        }
        # Before the message is sent: a log has one writer at a time.
        log_of = attempt.log.hand_over() if attempt.log is not None else None
        try:
            await control.send(
                {**start, "prepared": prepared.for_shim(), "allocation": asdict(allocation), "log": log_of}
            )
        except OSError as error:
            log.debug("%s: could not start shim: %s", attempt.attempt_id, error)
            return False
        greeting = await control.receive()
        if greeting is None:
            return False
        # Signals go to the descriptor: the pid may be reused as soon as the zygote has reaped the shim.
        attempt.shim, attempt.shim_pidfd = greeting["shim"], control.take_descriptor()
        return True

    async def _handle_messages(
        self, control: ShimConnection, prepared: PreparedEnvironment, zygotes: ZygoteManager
    ) -> Ended:
        attempt = self.attempt
        attempt.control, attempt.prepared, attempt.zygotes = control, prepared, zygotes
        if attempt.log is not None:
            attempt.log.send_to_shim = lambda text: control.notify(say=text)
        if attempt.end_requested:
            # Requested while the shim was being started, when `RunningAttempt.request` had no connection to send it to.
            control.notify(**{"kill" if attempt.kill_requested else "stop": 1})
        try:
            while (message := await control.receive()) is not None:
                if "running" in message:
                    attempt.pid = message["running"]
                    attempt.pipes = control.take_descriptors("out", "err")
                    self.report_phase(Phase.STOPPING if attempt.stop_requested else Phase.RUNNING)
                elif "log" in message:
                    if attempt.log is not None:
                        attempt.log.forward()
                elif "report" in message:
                    # The shim sends no further report before this, so a slow node gets the latest values and not old
                    # ones.
                    control.notify(acknowledged=1)
                    for report in parse_report(message["report"]):
                        self.services.on_report(attempt.attempt_id, report)
                elif "captured" in message:
                    # The event is replaced, so that each capture is waited for separately.
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

    def _read_outcome(self, message: dict[str, Any]) -> Ended:
        # Before the outcome is returned: a follower of the log must have its last line when the end is reported.
        if self.attempt.log is not None:
            self.attempt.log.forward()
        self.attempt.unkillable = message["left"]
        if message["swept"] or message["left"]:
            words = self.attempt.attempt_id, message["swept"], message["left"]
            log.info("%s: killed %d processes that it left behind; %d are still alive", *words)
        return load(self.attempt.directory, message.get("outcome")) or (
            start_failure("the shim wrote no outcome"),
            None,
        )

    async def _handle_shim_lost(self, prepared: PreparedEnvironment, zygotes: ZygoteManager) -> Ended:
        """Return the outcome of an attempt whose shim was killed, once the shim and its orphans are dead."""
        attempt = self.attempt
        # The socket may end first, and the kernel reparents orphans only when the process has ended.
        if attempt.shim_pidfd >= 0:
            await trio.lowlevel.wait_readable(attempt.shim_pidfd)
        self.services.sweep_adopted(dead=attempt.shim)
        # The zygote, the nearest subreaper, has adopted what the shim left; if that zygote has died, this process has.
        await zygotes.sweep()
        # A container is a child of the engine's daemon and not below this process.
        await self.services.environment_services.clean_up(prepared, attempt.attempt_id)
        # Until another attempt's shim has sent its pid, it cannot be distinguished from an orphan of this one.
        while not self.services.sweep_adopted(dead=attempt.shim):
            await self.services.wait_shim_started()
        if attempt.log is not None:
            # After the kill: no process writes any more, so the pipes hold all that is left.
            attempt.log.finish(attempt.pipes, Redactor(attempt.attempt_spec.secrets).hide)
        lost = Outcome(
            cause=EndReason.STOPPED if attempt.end_requested else EndReason.KILLED,
            message="its shim process was killed, and the job with it",
            signal=signal.SIGKILL,
        )
        # It may have been killed after it had written the outcome, which counts then.
        return load(attempt.directory) or (lost, None)


def start_failure(message: str) -> Outcome:
    """Return the outcome of an attempt that this machine could not start; does not count against the job."""
    return Outcome(cause=EndReason.ENVIRONMENT, message=message, machine_fault=True)


def close_shim(attempt: RunningAttempt) -> None:
    """Close the descriptors held for the shim of an attempt."""
    if attempt.shim_pidfd >= 0:
        os.close(attempt.shim_pidfd)
        attempt.shim_pidfd = -1
    for pipe in attempt.pipes.values():
        os.close(pipe)
    attempt.pipes = {}
