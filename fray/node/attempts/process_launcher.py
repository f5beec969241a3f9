"""Launcher of attempts as real processes: a zygote forks one shim per attempt, and the shim forks the job.

Each attempt has a directory (its Unix sockets, payload and outcome), a log that outlives it (`fray.node.logs.store`)
and one task here, which runs it (`fray.node.attempts.runner`) and reports every phase.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from fray.errors import LaunchFailed, Refused
from fray.model.messages.session import VERSION
from fray.model.messages.tunnels import RunCommand
from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.atomic_file import write_atomically
from fray.net.buffers import shared_memory
from fray.net.codec import to_json
from fray.net.tunnels.byte_stream import HalfCloseableStream
from fray.node.accounts.leftovers import uid_of
from fray.node.accounts.table import AccountTable
from fray.node.attempts.adoption import pass_on, take_over
from fray.node.attempts.runner import (
    AttemptRunner,
    RunningAttempt,
    close_shim,
    start_failure,
)
from fray.node.attempts.shim_connection import ShimConnection
from fray.node.attempts.values import send_from_file
from fray.node.config import LogRules, PidNamespaceMode
from fray.node.handover.process import confirm
from fray.node.handover.state import AttemptHandover, LauncherHandover, ZygoteHandover
from fray.node.job_process.bootstrap import ENTRY, PRELOAD
from fray.node.job_process.inherited_environ import STATE_MARK, node_environ
from fray.node.launcher import Launcher
from fray.node.linux.process_tree import (
    become_subreaper,
    children,
    end_all,
    end_descendants,
    has_mark,
    has_terminal,
    works_in,
)
from fray.node.linux.remove_tree import remove
from fray.node.logs.retention import DiskLogs
from fray.node.logs.store import LogStore
from fray.node.prepare import (
    EnvironmentServices,
    NothingToPrepare,
    PreparedEnvironment,
    Preparer,
    RequirementProvider,
)
from fray.node.resources.allocator import ResourceAllocator
from fray.node.resources.attempt_limit import AttemptLimiter
from fray.node.shim.pid_namespace import isolation_mode, uses_pid_namespace
from fray.node.shim.stack_capture import CAPTURED, find_py_spy
from fray.node.zygotes.manager import ZygoteManager
from fray.node.zygotes.pool import PooledZygote, ZygotePool
from fray.node.zygotes.zygote import ForkedZygote

STATE_FORMAT = 2
"""Format of a state directory. To be raised with every change that a node of another version could not read."""
_FORMAT_FILE = "format"
OVERDUE_S = 10.0
"""Seconds after the end of the termination policy until a shim that has not ended its job is killed."""

log = logging.getLogger("fray.node")


class ProcessLauncher(Launcher):
    """The `Launcher` of real nodes.

    Args:
        state_dir: directory of this node alone; created with mode 0700 and locked while `run` runs. Keep its path
            short: Unix sockets are created below it.
        entry: ``module:function`` that runs user code in the job's process (see
            `fray.node.job_process.bootstrap.ProcessSpec`).
        warm: modules the zygote imports once for all jobs.
        subreaper: adopt the zygote's orphans if it dies, and kill every unknown child of this process. Only for a
            process that starts nothing else: never in a driver.
        offered: number of accelerators of each kind on this node, used to hide those a job was not given.
        zygote: the first zygote, if it is running already. The state directory is new then and holds no survivors.
        pid_namespace: which attempts have a PID namespace of their own.
        environments: provides what attempts need. Default: nothing beyond the node's own environment.
        allocator: allocates CPUs, control groups and devices. Default: CPUs, no control groups, memory watched.
        log_rules: limits for the logs that are retained.
        descriptors: number of file descriptors each attempt may have open. Default: as many as this process.
        accounts: accounts of the users, under which their jobs run. Default: all run under that of this process.
        adopted: what the program that ran in this process before has left running. None: there was none.
    """

    def __init__(
        self,
        state_dir: str | Path,
        *,
        entry: str = ENTRY,
        warm: Sequence[str] = PRELOAD,
        preload: Sequence[str] = (),
        subreaper: bool = False,
        offered: Mapping[str, int] | None = None,
        zygote: ForkedZygote | None = None,
        pid_namespace: PidNamespaceMode = PidNamespaceMode.AUTO,
        environments: RequirementProvider | None = None,
        allocator: ResourceAllocator | None = None,
        log_rules: LogRules | None = None,
        descriptors: int | None = None,
        accounts: AccountTable | None = None,
        adopted: LauncherHandover | None = None,
    ) -> None:
        super().__init__()
        self._adopted = adopted
        self.accounts = accounts
        self.pid_namespace = pid_namespace
        self.state_dir = Path(state_dir).absolute()
        self.entry, self.subreaper, self.offered = entry, subreaper, dict(offered or {})
        self.allocator = allocator or ResourceAllocator(None)
        # Looked up with each call: the node sets `on_busy` later.
        self.allocator.on_busy = lambda: self.on_busy()
        self.logs: DiskLogs = DiskLogs(LogStore(self.state_dir / "logs", log_rules or LogRules()))
        self.before_removal: Callable[[AttemptSpec], None] = lambda attempt_spec: None
        """Callback in a thread before the directory of an attempt is removed."""
        self.preparer: Preparer = environments or NothingToPrepare()
        self.environment_services: EnvironmentServices = environments or NothingToPrepare()
        self._is_new = zygote is not None
        environ = node_environ(os.environ, str(self.state_dir))
        self._descriptors = descriptors
        own = (*warm, *preload)
        self.zygotes = ZygoteManager(own, environ, self._on_zygote_lost, zygote, descriptors=descriptors)
        self.zygote_pool = ZygotePool(self.zygotes, partial(self._make_zygote_manager, warm))
        self.attempt_limiter = AttemptLimiter()
        self._attempts: dict[str, RunningAttempt] = {}
        self._resumed: list[tuple[RunningAttempt, AttemptHandover, PooledZygote]] = []
        """Adopted attempts whose tasks do not run yet."""
        self._nursery: trio.Nursery | None = None
        self._shim_started = trio.Event()
        self.own_children: set[int] = set()
        """Pids of processes that others of this node have started, and reap."""
        self._lingering_shims: dict[int, int | None] = {}
        """Shims still trying to end processes of ended attempts: process descriptor to pid."""

    def statistics(self) -> dict[str, Any]:
        """Return the zygote's pid, and phase, shim pid and job pid of each attempt, for tests and benchmarks."""
        attempts = {a.attempt_id: (str(a.phase), a.shim, a.pid) for a in self._attempts.values()}
        return {"zygote": self.zygotes.pid, "attempts": attempts}

    def attributes(self) -> dict[str, str]:
        """See `Launcher.attributes`."""
        held = isolation_mode(self.pid_namespace, self.zygotes.namespace_error)
        return {"isolation": held, "memory_limit": self.allocator.memory_limiter}

    async def details(self) -> dict[str, str]:
        """See `Launcher.details`."""

        from fray.node import node_details  # imported a second after the node's start, not on the way to it

        found = {
            "isolation": node_details.isolation(self.pid_namespace, self.zygotes.namespace_error),
            "memory limit": node_details.memory_limit(self.allocator),
            "environments": await self.environment_services.describe(),
            "zygotes": node_details.zygotes(self.zygote_pool.interpreters),
            "logs": node_details.logs(self.logs.store.rules),
            "python": node_details.python(),
            "fray": VERSION,
        }
        return {about: text for about, text in found.items() if text}

    @property
    def busy(self) -> dict[str, str]:
        """See `Launcher.busy`."""
        return self.allocator.busy

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Launcher.run`.

        Raises:
            LaunchFailed: another node uses the state directory, its format is another version's, the zygote cannot
                start, or PID namespaces are required and not available.
        """
        # The lock first: without it, the "survivors" could be the jobs of another running node.
        with _lock_state_dir(self.state_dir):
            _check_format(self.state_dir)
            if self.accounts is not None:
                _open_accounts(self.accounts)
            # Before this process starts or adopts anything: all that is found now belongs to an earlier run.
            if self._adopted is not None:
                self._adopt_attempts(self._adopted)
            else:
                self._end_survivors()
            if self.subreaper:
                become_subreaper()
            try:
                error = await self._serve(task_status)
            finally:
                self._nursery = None
                if self.subreaper:
                    # Also what was adopted from a zygote that did not end in time.
                    end_descendants()
                    become_subreaper(False)
                for each in (self._root, self._sockets, self._records):
                    remove(each)
                shared_memory.sweep()  # of a driver that was killed, too: this node ends with it
            # Raised here, since a nursery would wrap it in an ExceptionGroup.
            if error is not None:
                raise error

    async def _serve(self, task_status: trio.TaskStatus[None]) -> LaunchFailed | None:
        async with trio.open_nursery() as self._nursery:
            try:
                # First: only a running zygote knows whether PID namespaces can be created.
                await self._nursery.start(self.zygote_pool.run)
                await self._nursery.start(self.environment_services.run)
                self._check_namespaces()
                if self._adopted is not None:
                    self.zygote_pool.hold_adopted()
                    confirm()
            except LaunchFailed as error:
                self._nursery.cancel_scope.cancel()
                return error
            if self.subreaper:
                self._nursery.start_soon(self._reap_adopted)
            # Devices that survivors of an earlier run still hold.
            self._watch_busy_devices(list(self.allocator.busy))
            self._nursery.start_soon(self.logs.run)
            for attempt, adopted, pooled in self._resumed:
                control = ShimConnection(socket.socket(fileno=adopted.control), adopted.unread)
                self._nursery.start_soon(self._run_attempt, attempt, (control, pooled))
                if attempt.overdue_at is not None:
                    overdue_s = max(0.0, attempt.overdue_at - time.monotonic())
                    self._nursery.start_soon(self._kill_overdue_shim, attempt, overdue_s)
            self._resumed = []
            task_status.started()
        return None

    def _check_namespaces(self) -> None:
        error = self.zygotes.namespace_error
        if error and self.pid_namespace is PidNamespaceMode.ON:
            raise LaunchFailed(f"PID namespaces are not available on this machine: {error}; use --pid-namespace auto")

    # The launcher's interface

    def start(self, attempt_spec: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "start needs a launcher that runs"
        # Hashed: an id may be long, and the path of a Unix socket is limited to 107 bytes.
        name = hashlib.sha256(attempt_spec.attempt_id.encode()).hexdigest()[:12]
        directory, sockets = self._root / name, self._sockets / name
        attempt_spec = evolve(attempt_spec, directory=str(directory), sockets=str(sockets))
        # What the node and the shim write is not within reach of an account, which could put links there.
        records = directory if self.accounts is None else self._records / name
        attempt = RunningAttempt(attempt_spec=attempt_spec, directory=records)
        self._attempts[attempt_spec.attempt_id] = attempt
        try:
            for each in {directory, sockets, records}:
                each.mkdir(mode=0o700)
            attempt.log = self.logs.store.open(attempt_spec.attempt_id, partial(self.on_log, attempt_spec.attempt_id))
            # For the operator, since the name of the directory is a hash.
            (records / "attempt").write_text(attempt_spec.attempt_id)
            if payload is not None:
                attempt.attempt_spec = evolve(attempt_spec, payload_path=str(directory / "payload"))
                (directory / "payload").write_bytes(payload)
            elif attempt_spec.spec.payload is not None:
                # It is large: fetched before the start, by the attempt's task.
                attempt.attempt_spec = evolve(attempt_spec, payload_path=str(directory / "payload"))
                attempt.fetches_payload = True
        except OSError as error:
            self._report_ended(
                attempt, start_failure(f"cannot create its directory on node {attempt_spec.node}: {error}"), None
            )
        else:
            self._nursery.start_soon(self._run_attempt, attempt)

    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        attempt = self._attempts.get(attempt_id)
        # Reconciliation repeats its actions after every message.
        if attempt is None or attempt.stop_requested or attempt.ended.is_set():
            return
        attempt.stop_requested = True
        policy = attempt.attempt_spec.spec.termination
        # The shim carries out the policy; this timer is for one that hangs or was stopped (SIGSTOP).
        overdue_s = policy.cancel_s + policy.term_s + OVERDUE_S
        if notice_s is None:
            self._request_end(attempt, "stop", overdue_s)
        else:
            self._request_end(attempt, "notice", notice_s + overdue_s, notice_s)

    def kill(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.kill_requested or attempt.ended.is_set():
            return
        attempt.kill_requested = True
        self._request_end(attempt, "kill", OVERDUE_S)

    def forget(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return
        attempt.forget_requested = True
        if attempt.ended.is_set():
            self._delete(attempt)

    async def capture(self, attempt_id: str) -> str:
        """See `Launcher.capture`."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.control is None:
            return "[fray] not running"
        # Before the request: the event is replaced with each capture.
        captured = attempt.captured
        attempt.control.notify(capture=find_py_spy())
        await captured.wait()
        try:
            text = (attempt.directory / CAPTURED).read_text("utf-8", "replace")
        except OSError:
            text = ""
        return text or "[fray] the shim could not capture its stacks"

    async def start_command(self, attempt_id: str, command: RunCommand) -> HalfCloseableStream:
        """See `Launcher.start_command`."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.control is None or attempt.pid is None:
            raise Refused(f"{attempt_id} is not running yet, or no more")
        if command.record_s and attempt.prepared is not None and attempt.prepared.image:
            raise Refused(f"{attempt_id} runs in a container, which this machine's py-spy does not look into")
        py_spy = find_py_spy() if command.record_s else ""
        if command.record_s and not py_spy:
            raise Refused("py-spy is not installed on this machine: pip install 'fray[stacks]' where fray-node runs")
        near, far = socket.socketpair()
        with far:
            # By the shim, so that it ends with the attempt. It takes the descriptor for the first word that it knows.
            attempt.control.notify_with(far.fileno(), **({"record": py_spy} if py_spy else {}), command=1)
        near.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        try:
            await stream.send_all(to_json(command).encode() + b"\n")
        except trio.BrokenResourceError:
            raise Refused(f"{attempt_id} has ended") from None
        return stream

    def _request_end(self, attempt: RunningAttempt, what: str, overdue_s: float, value: float = 1) -> None:
        assert self._nursery is not None
        due_at = time.monotonic() + overdue_s
        attempt.overdue_at = due_at if attempt.overdue_at is None else min(due_at, attempt.overdue_at)
        self._nursery.start_soon(self._kill_overdue_shim, attempt, overdue_s)
        if attempt.request(what, value):
            AttemptRunner(attempt, self).report_phase(Phase.STOPPING)

    # One attempt

    async def _run_attempt(
        self, attempt: RunningAttempt, resumed: tuple[ShimConnection, PooledZygote] | None = None
    ) -> None:
        runner = AttemptRunner(attempt, self)
        try:
            outcome, value = await (runner.run() if resumed is None else runner.resume(*resumed))
            if attempt.unkillable:
                outcome = self._keep_devices_busy(attempt, outcome)
            else:
                # The end is reported only when its devices are free, or reported as busy: otherwise the scheduler would
                # assign them while a process still has them open.
                await self.allocator.release(attempt.attempt_spec)
                self._watch_busy_devices(attempt.attempt_spec.devices)
        finally:
            close_shim(attempt)
            # Not before: the slot stands for the descriptors.
            self.attempt_limiter.release(attempt.attempt_id)
            # Also if the node is cancelled meanwhile; a second release does nothing.
            self.allocator.release_now(attempt.attempt_spec)
        if isinstance(value, Path):
            outcome, value = await self._send_result(attempt, outcome, value), None
        self._report_ended(attempt, outcome, value)
        shared_memory.sweep()
        if attempt.attempt_spec.account is not None:
            shared_memory.sweep(uid=attempt.attempt_spec.account.uid)
        self.sweep_adopted()

    async def _send_result(self, attempt: RunningAttempt, outcome: Outcome, path: Path) -> Outcome:
        """Send a large result, part by part. The end is reported afterwards: it names only what the controller has."""
        ended = evolve(outcome, cause=EndReason.STOPPED, message="stopped before its result was sent", value_bytes=0)
        # A stop that came before the job succeeded has had its chance; one from now on ends the transfer.
        with trio.CancelScope() as attempt.preparing:
            ended = await send_from_file(self.request, outcome, path)
        attempt.preparing = None
        return ended

    def _keep_devices_busy(self, attempt: RunningAttempt, outcome: Outcome) -> Outcome:
        """Withhold the devices of an attempt with unkillable processes until its shim has ended them."""
        assert self._nursery is not None
        # `close_shim` closes the attempt's own descriptor before the shim has ended.
        pidfd = os.dup(attempt.shim_pidfd)
        self._lingering_shims[pidfd] = attempt.shim
        why = f"{attempt.unkillable} processes of {attempt.attempt_id} cannot be killed (below pid {attempt.shim})"
        log.error("%s; shim keeps retrying", why)
        # Before the end is reported, so that the scheduler never sees these devices as free.
        self.allocator.mark_busy(dict.fromkeys(attempt.attempt_spec.devices, why))
        self._nursery.start_soon(self._wait_lingering_shim, pidfd, attempt.attempt_spec.devices)
        note = f"{attempt.unkillable} of its processes could not be killed yet: they are blocked in the kernel"
        return evolve(outcome, message="; ".join(filter(None, (outcome.message, note))))

    async def _wait_lingering_shim(self, shim_pidfd: int, devices: tuple[str, ...]) -> None:
        try:
            await trio.lowlevel.wait_readable(shim_pidfd)
            log.warning("shim %s has ended its remaining processes", self._lingering_shims.get(shim_pidfd))
            self.allocator.mark_free(devices)
        finally:
            del self._lingering_shims[shim_pidfd]
            os.close(shim_pidfd)

    def _watch_busy_devices(self, devices: Iterable[str]) -> None:
        busy = [device for device in devices if device in self.allocator.busy]
        if busy and self._nursery is not None:
            self._nursery.start_soon(self.allocator.wait_released, busy)

    def _report_ended(self, attempt: RunningAttempt, outcome: Outcome, value: bytes | None) -> None:
        attempt.phase = Phase.ENDED
        attempt.ended.set()
        attempt.captured.set()
        if attempt.log is not None:
            # Complete on disk before the end is reported: a reader then knows that no line is missing.
            attempt.log.close()
            self.logs.ended(attempt.attempt_id)
        observed = ObservedAttempt(attempt_id=attempt.attempt_id, phase=Phase.ENDED, pid=attempt.pid, outcome=outcome)
        self.on_observed(observed, value)
        if attempt.forget_requested:
            self._delete(attempt)

    def say(self, attempt_id: str, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``) to the log of an attempt that has not ended."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.ended.is_set():
            attempt.say(text)

    async def _kill_overdue_shim(self, attempt: RunningAttempt, overdue_s: float) -> None:
        with trio.move_on_after(overdue_s):
            await attempt.ended.wait()
            return
        log.error("%s: shim %s did not terminate the job; killing the shim", attempt.attempt_id, attempt.shim)
        if attempt.shim_pidfd >= 0 and not attempt.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                # Its job dies with it by PDEATHSIG, and the zygote kills the rest.
                signal.pidfd_send_signal(attempt.shim_pidfd, signal.SIGKILL)

    def _delete(self, attempt: RunningAttempt) -> None:
        """Forget an attempt; its directory is removed in a thread."""
        if self._attempts.pop(attempt.attempt_id, None) is None or self._nursery is None:
            return
        self._nursery.start_soon(self._remove_attempt, attempt)

    async def _remove_attempt(self, attempt: RunningAttempt) -> None:
        # Abandoned when the node ends: removing a million files, or a share that is not reachable, must not delay that.
        await trio.to_thread.run_sync(self._remove, attempt, abandon_on_cancel=True)
        if self.accounts is not None and attempt.attempt_spec.account is not None:
            self.accounts.release(attempt.attempt_spec.spec.user)

    def _remove(self, attempt: RunningAttempt) -> None:
        try:
            self.before_removal(attempt.attempt_spec)
        finally:
            for each in {attempt.directory, Path(attempt.attempt_spec.directory), Path(attempt.attempt_spec.sockets)}:
                remove(each)

    # Replacement of this program by another one in the same process

    def hand_over(self) -> LauncherHandover | None:
        """Return what another program needs to continue in this process; None while something cannot be passed on.

        Attempts without a process are left out: they are started again.
        """
        if self._lingering_shims:
            return None
        found = []
        for attempt in self._attempts.values():
            if attempt.control is not None:
                one = pass_on(attempt, self.allocator)
                if one is None:
                    return None
                found.append(one)
            # Ended and not forgotten, being started, or ending.
            elif attempt.ended.is_set() or attempt.zygote is not None or attempt.shim is not None:
                return None
        links = self.zygote_pool.hand_over()
        used = {one.zygote for one in found}
        # Killed, and its shims are ending.
        if not used.issubset(links):
            return None
        return LauncherHandover(
            attempts=tuple(found),
            zygotes=tuple(ZygoteHandover(pid=pid, link=link) for pid, link in links.items()),
            leases=tuple(self.environment_services.hand_over([one.attempt_spec.attempt_id for one in found])),
        )

    def _adopt_attempts(self, adopted: LauncherHandover) -> None:
        """Take over attempts of the program that ran in this process before, and remove what is left of others."""
        for descriptor in adopted.descriptors:
            os.set_inheritable(descriptor, False)
        for zygote in adopted.zygotes:
            self.zygote_pool.adopt(zygote.pid, zygote.link, self._on_zygote_lost)
        self.environment_services.adopt(adopted.leases)
        for one in adopted.attempts:
            # Before the zygotes are held, which is as long as they are used.
            self._resumed.append((self._adopt_attempt(one), one, self.zygote_pool.adopted(one.zygote)))
        kept = {path for one in adopted.attempts for path in one.directories}
        for each in (self._root, self._sockets, self._records):
            for entry in each.iterdir() if each.is_dir() else ():
                if str(entry) not in kept:
                    remove(entry)
        groups = {one.allocation.group for one in adopted.attempts}
        for group in self.allocator.leftover_groups():
            if group.path not in groups:
                group.kill_and_remove()
        self.logs.store.recover([one.attempt_spec.attempt_id for one in adopted.attempts])
        self._make_directories()

    def _adopt_attempt(self, one: AttemptHandover) -> RunningAttempt:
        attempt = take_over(one)
        attempt_id = attempt.attempt_id
        self._attempts[attempt_id] = attempt
        if one.log is not None:
            attempt.log = self.logs.store.open(attempt_id, partial(self.on_log, attempt_id))
            attempt.log.move(one.log)
        self.allocator.adopt(one.attempt_spec, one.allocation, lambda: attempt.shim, one.holders_before)
        self.attempt_limiter.adopt(attempt_id)
        if self.accounts is not None and one.attempt_spec.account is not None:
            self.accounts.adopt(one.attempt_spec.spec.user)
        return attempt

    def release_logs(self) -> None:
        """Report lines of adopted attempts: there is a connection to the controller."""
        for attempt in self._attempts.values():
            if attempt.log is not None and not attempt.ended.is_set():
                attempt.log.release()

    # Orphans and survivors

    def _end_survivors(self) -> None:
        """Kill what an earlier node on this state directory left behind, and remove its directories."""
        if not self._is_new:
            mark = str(self.state_dir)
            uids = self.accounts.assigned_uids if self.accounts is not None else set[int]()
            ended, left = end_all(lambda pid: _belongs_to_node(pid, mark) or uid_of(pid) in uids)
            # Processes that have cleared their environment and changed their directory are found by their control
            # group.
            for group in self.allocator.leftover_groups():
                ended, left = ended + len(group.pids()), left + group.kill_and_remove()
            if ended:
                log.warning("killed %d processes of an earlier run of this node (%d are still alive)", ended, left)
            if left:
                log.warning("%d processes or control groups of an earlier run of this node could not be ended", left)
                self.allocator.mark_survivors_busy(lambda pid: _belongs_to_node(pid, mark))
            for each in (self._root, self._sockets, self._records):
                remove(each)
            # After the kill: a shim that lives still writes its log.
            self.logs.store.recover()
        self._make_directories()

    def _make_directories(self) -> None:
        """Make the directories in which each attempt has its own."""
        for each in (self._root, self._sockets):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.accounts is not None:
            self._records.mkdir(mode=0o700, exist_ok=True)
            # An account has to enter its own directories. It cannot list these, and all else in them is private.
            for each in (self.state_dir, self._root, self._sockets):
                each.chmod(0o711)

    async def _reap_adopted(self) -> None:
        with trio.open_signal_receiver(signal.SIGCHLD) as signals:
            # Signals of the same number merge, so one may stand for any number of children: each time, all are looked
            # at.
            async for _ in signals:
                self.sweep_adopted()

    def _make_zygote_manager(self, warm: Sequence[str], prepared: PreparedEnvironment) -> ZygoteManager:
        environ = node_environ(prepared.environ, str(self.state_dir))
        interpreter, lock_path = prepared.interpreter, prepared.lock_path
        descriptors = self._descriptors
        return ZygoteManager(
            warm, environ, self._on_zygote_lost, interpreter=interpreter, lock_path=lock_path, descriptors=descriptors
        )

    def _on_zygote_lost(self) -> None:
        self.sweep_adopted()

    def sweep_adopted(self, dead: int | None = None) -> bool:
        """Kill every child that is neither a zygote nor a living shim: orphans no zygote was there to adopt.

        Returns False if this is not possible now, because one of the children may be a shim that has not sent its pid
        yet. That passes: its first message, or the end of its socket, is on its way, and `wait_shim_started` returns
        then.
        """
        if not self.subreaper:
            return True
        living = [a for a in self._attempts.values() if not a.ended.is_set()]
        zygotes = self.zygote_pool.pids
        # The zygote that was asked for a shim has died: a child of this process may be that shim.
        if any(a.zygote not in (None, *zygotes) for a in living):
            return False
        shims = [*(a.shim for a in living if a.shim != dead), *self._lingering_shims.values()]
        others = (*zygotes, *self.environment_services.pids, *self.own_children)
        spare = {pid for pid in (*shims, *others) if pid is not None}
        # Looked at first: with only spared children left, `end_descendants` would read all of /proc to be certain.
        if any(pid not in spare for pid in children(os.getpid())):
            end_descendants(spare)
        return True

    def has_pid_namespace(self, attempt_spec: AttemptSpec) -> bool:
        return uses_pid_namespace(self.pid_namespace, attempt_spec.spec.entry, self.zygotes.namespace_error)

    def note_shim_started(self) -> None:
        """See `AttemptServices.note_shim_started`."""
        self._shim_started.set()
        self._shim_started = trio.Event()

    async def wait_shim_started(self) -> None:
        await self._shim_started.wait()

    @property
    def _root(self) -> Path:
        return self.state_dir / "attempts"

    @property
    def _sockets(self) -> Path:
        # Apart from all else, so that a container can have the sockets of other attempts and nothing besides.
        return self.state_dir / "sockets"

    @property
    def _records(self) -> Path:
        return self.state_dir / "records"


def _belongs_to_node(pid: int, mark: str) -> bool:
    """Return whether a process runs below a node on this state directory.

    It carries the node's mark, or it works in the directory of an attempt and has no terminal (as a person looking
    around there would).
    """
    # Of several marks: a node that was started within a job of another node has those of both.
    if has_mark(pid, STATE_MARK, mark):
        return True
    return works_in(pid, f"{mark}/attempts/") and not has_terminal(pid)


def _open_accounts(accounts: AccountTable) -> None:
    try:
        accounts.open()
    except (OSError, ValueError, KeyError) as error:
        raise LaunchFailed(f"the table of accounts in {accounts.state_dir} cannot be read: {error!r}") from error


def _check_format(state_dir: Path) -> None:
    """Raise LaunchFailed unless the locked state directory is new or has this version's format."""
    file = state_dir / _FORMAT_FILE
    try:
        found = file.read_text().strip()
    except FileNotFoundError:
        # A directory of the first format has these and no format file.
        if not any((state_dir / name).exists() for name in ("attempts", "logs")):
            write_atomically(file, f"{STATE_FORMAT}\n".encode())
            return
        found = "1"  # which had no such file
    if found != str(STATE_FORMAT):
        raise LaunchFailed(
            f"state directory {state_dir} was written by an incompatible version of Fray (format {found}, expected "
            f"{STATE_FORMAT}); nothing was changed. Remove it, or use a different --state-dir"
        )


@contextlib.contextmanager
def _lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Hold an exclusive lock on the state directory."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            # The kernel releases it with the process, however that ends: a lock file by itself would outlive a crash.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode() or "unknown"
            raise LaunchFailed(
                f"another fray-node (pid {holder}) uses the state directory {state_dir}; use a different --state-dir"
            ) from None
        # Only after the lock was acquired: the file names its holder.
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)
