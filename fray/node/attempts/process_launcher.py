"""Attempts as real processes: zygote, one keeper an attempt, the job below it.

Each attempt has a directory (its Unix sockets, payload and outcome), a log that outlives it (`fray.node.logs.store`),
and one task here, which takes its course (`fray.node.attempts.runner`) and tells every phase.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, LaunchFailed
from fray.model.log_records import LogChunk
from fray.model.specs import AttemptSpec, ObservedAttempt, Outcome, Phase
from fray.net.buffers import shared_memory
from fray.node.attempts.runner import (
    AttemptRunner,
    RunningAttempt,
    close_keeper,
    unstarted,
)
from fray.node.config import LogRules, PidNamespaceMode
from fray.node.job_process.bootstrap import (
    ENTRY,
    PRELOAD,
    STATE_MARK,
    node_environ,
)
from fray.node.launcher import Ask, OnLog, OnObserved, OnSaid
from fray.node.linux.process_tree import (
    become_subreaper,
    children,
    end_all,
    end_descendants,
    environ_of,
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
from fray.node.shim.pid_namespace import applies, isolation
from fray.node.shim.stack_capture import CAPTURED, find_py_spy
from fray.node.zygotes.manager import ZygoteManager
from fray.node.zygotes.pool import ZygotePool
from fray.node.zygotes.zygote import ForkedZygote

OVERDUE_S = 10.0
"""A keeper that has not ended its job this long after the ladder's end is killed itself."""

log = logging.getLogger("fray.node")


async def _no_member(message: object) -> Any:
    raise ChannelClosed("this node is no member of a cluster", reason="closed")


class ProcessLauncher:
    """The `fray.node.launcher.Launcher` of real nodes.

    Args:
        state_dir: this node's own directory; made with mode 0700, held exclusively while `run` runs. Keep its path
            short: Unix sockets live below it.
        entry: ``module:function`` that runs user code, called in the job's process (see
        `fray.node.job_process.bootstrap.Body`).
        warm: modules the zygote imports once for all jobs.
        subreaper: adopt the zygote's orphans if it dies, and end every unknown child of this process. Only for a
            process that starts nothing of its own: never in a driver.
        offered: how many accelerators of each kind this node has, to hide those a job was not granted.
        zygote: the first one, if it is there already: then the state directory is new, and nobody has lived in it.
        pid_namespace: which attempts have a PID namespace of their own.
        environments: makes ready what attempts need. Default: they need nothing but what is there.
        holdings: what else is given to attempts. Default: CPUs, no control groups, memory watched.
        log_rules: what is kept of what they print.
        descriptors: how many each may have open. Default: as many as this process.
    """

    def __init__(
        self,
        state_dir: str | Path,
        *,
        entry: str = ENTRY,
        warm: Sequence[str] = PRELOAD,
        subreaper: bool = False,
        offered: Mapping[str, int] | None = None,
        zygote: ForkedZygote | None = None,
        pid_namespace: PidNamespaceMode = PidNamespaceMode.AUTO,
        environments: RequirementProvider | None = None,
        holdings: ResourceAllocator | None = None,
        log_rules: LogRules | None = None,
        descriptors: int | None = None,
    ) -> None:
        self.pid_namespace = pid_namespace
        self.state_dir = Path(state_dir).absolute()
        self.entry, self.subreaper, self.offered = entry, subreaper, dict(offered or {})
        self.holdings = holdings or ResourceAllocator(None)
        self.on_observed: OnObserved = lambda observed, value: None
        self.on_log: OnLog = lambda attempt_id, chunk: None
        self.logs = DiskLogs(LogStore(self.state_dir / "logs", log_rules or LogRules()))
        self.on_said: OnSaid = lambda attempt_id, said: None
        self.ask: Ask = _no_member
        self.in_doubt: Callable[[], bool] = lambda: False
        self.before_removal: Callable[[AttemptSpec], None] = lambda ticket: None
        """Called in a thread when the directory of an attempt is to go."""
        self.preparer: Preparer = environments or NothingToPrepare()
        self.household: EnvironmentServices = environments or NothingToPrepare()
        self._is_new = zygote is not None
        environ = node_environ(os.environ, str(self.state_dir))
        self._descriptors = descriptors
        self.zygotes = ZygoteManager(warm, environ, self._on_zygote_lost, zygote, descriptors=descriptors)
        self.broods = ZygotePool(self.zygotes, partial(self._zygotes_of, warm))
        self.room = AttemptLimiter()
        self._attempts: dict[str, RunningAttempt] = {}
        self._nursery: trio.Nursery | None = None
        self._hatched = trio.Event()
        self._lasting: dict[int, int | None] = {}
        """Keepers that cannot end yet although their attempts have: descriptor and pid."""

    def statistics(self) -> dict[str, Any]:
        """A window for people: the zygote's pid, and phase and pids of each attempt."""
        attempts = {a.attempt_id: (str(a.phase), a.keeper, a.pid) for a in self._attempts.values()}
        return {"zygote": self.zygotes.pid, "attempts": attempts}

    def attributes(self) -> dict[str, str]:
        """See `fray.node.launcher.Furnished`."""
        held = isolation(self.pid_namespace, self.zygotes.no_namespace)
        return {"isolation": held, "memory_limit": self.holdings.limiter}

    async def particulars(self) -> dict[str, str]:
        """See `fray.node.launcher.Particular`."""
        from fray.node import node_details as told  # a second after the node's start is early enough

        found = {
            "isolation": told.isolation(self.pid_namespace, self.zygotes.no_namespace),
            "memory limit": told.memory_limit(self.holdings),
            "environments": await self.household.told(),
            "zygotes": told.zygotes(self.broods.interpreters),
            "logs": told.logs(self.logs.store.rules),
            "python": told.python(),
        }
        return {about: text for about, text in found.items() if text}

    @property
    def busy(self) -> dict[str, str]:
        """See `fray.node.launcher.Withholding`."""
        return self.holdings.busy

    @property
    def on_busy(self) -> Callable[[], None]:
        return self.holdings.on_busy

    @on_busy.setter
    def on_busy(self, hear: Callable[[], None]) -> None:
        self.holdings.on_busy = hear

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Launcher.run`.

        Raises:
            LaunchFailed: another node uses the state directory, the zygote cannot start, or PID namespaces are asked
                for and cannot be had.
        """
        with _claim(self.state_dir):
            self._end_survivors()
            if self.subreaper:
                become_subreaper()
            try:
                error = await self._serve(task_status)
            finally:
                self._nursery = None
                if self.subreaper:
                    end_descendants()
                    become_subreaper(False)
                remove(self._root)
                shared_memory.sweep()  # of a driver that was killed, too: this node ends with it
            if error is not None:
                raise error

    async def _serve(self, task_status: trio.TaskStatus[None]) -> LaunchFailed | None:
        async with trio.open_nursery() as self._nursery:
            try:
                await self._nursery.start(self.broods.run)
                await self._nursery.start(self.household.run)
                self._check_namespaces()
            except LaunchFailed as error:
                self._nursery.cancel_scope.cancel()
                return error
            if self.subreaper:
                self._nursery.start_soon(self._reap_adopted)
            self._look_on(list(self.holdings.busy))
            self._nursery.start_soon(self.logs.run)
            task_status.started()
        return None

    def _check_namespaces(self) -> None:
        error = self.zygotes.no_namespace
        if error and self.pid_namespace is PidNamespaceMode.ON:
            raise LaunchFailed(f"this machine gives no PID namespaces: {error}; say --pid-namespace auto")

    # The seam

    def start(self, ticket: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None, "start needs a launcher that runs"
        directory = self._root / hashlib.sha256(ticket.attempt_id.encode()).hexdigest()[:12]
        ticket = evolve(ticket, directory=str(directory))
        attempt = RunningAttempt(ticket=ticket, directory=directory)
        self._attempts[ticket.attempt_id] = attempt
        try:
            directory.mkdir(mode=0o700)
            attempt.log = self.logs.store.open(ticket.attempt_id, partial(self._printed, ticket.attempt_id))
            (directory / "attempt").write_text(ticket.attempt_id)
            if payload is not None:
                attempt.ticket = evolve(ticket, payload_path=str(directory / "payload"))
                (directory / "payload").write_bytes(payload)
        except OSError as error:
            self._end(attempt, unstarted(f"its directory on node {ticket.node} cannot be made: {error}"), None)
        else:
            self._nursery.start_soon(self._attend, attempt)

    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.stop_asked or attempt.ended.is_set():
            return
        attempt.stop_asked = True
        ladder = attempt.ticket.spec.ladder
        overdue_s = ladder.cancel_s + ladder.term_s + OVERDUE_S
        if notice_s is None:
            self._ask(attempt, "stop", overdue_s)
        else:
            self._ask(attempt, "notice", notice_s + overdue_s, notice_s)

    def kill(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.kill_asked or attempt.ended.is_set():
            return
        attempt.kill_asked = True
        self._ask(attempt, "kill", OVERDUE_S)

    def forget(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return
        attempt.forget_asked = True
        if attempt.ended.is_set():
            self._delete(attempt)

    async def capture(self, attempt_id: str) -> str:
        """See `fray.node.health.monitor.Attentive`."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.control is None:
            return "[fray] it is not running"
        captured = attempt.captured
        attempt.control.tell(capture=find_py_spy())
        await captured.wait()
        try:
            return (attempt.directory / CAPTURED).read_text("utf-8", "replace")
        except OSError:
            return "[fray] its keeper could not look into it"

    def _ask(self, attempt: RunningAttempt, what: str, overdue_s: float, value: float = 1) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._enforce, attempt, overdue_s)
        if attempt.ask(what, value):
            AttemptRunner(attempt, self).observe(Phase.STOPPING)

    # One attempt

    async def _attend(self, attempt: RunningAttempt) -> None:
        try:
            outcome, value = await AttemptRunner(attempt, self).run()
            if attempt.left:
                outcome = self._hold_left(attempt, outcome)
            else:
                await self.holdings.give_back(attempt.ticket)
                self._look_on(attempt.ticket.devices)
        finally:
            close_keeper(attempt)
            self.holdings.drop(attempt.ticket)
        self._end(attempt, outcome, value)
        shared_memory.sweep()
        self.sweep_adopted()

    def _hold_left(self, attempt: RunningAttempt, outcome: Outcome) -> Outcome:
        """The kernel holds some of its processes: its keeper goes on trying, and nobody gets its devices meanwhile."""
        assert self._nursery is not None
        pidfd = os.dup(attempt.keeper_pidfd)
        self._lasting[pidfd] = attempt.keeper
        why = f"{attempt.left} processes of {attempt.attempt_id} cannot be ended (below pid {attempt.keeper})"
        log.error("%s; its keeper goes on trying", why)
        self.holdings.hold(dict.fromkeys(attempt.ticket.devices, why))
        self._nursery.start_soon(self._outlast, pidfd, attempt.ticket.devices)
        note = f"{attempt.left} of its processes could not be ended yet: the kernel holds them"
        return evolve(outcome, message="; ".join(filter(None, (outcome.message, note))))

    async def _outlast(self, keeper_pidfd: int, devices: tuple[str, ...]) -> None:
        try:
            await trio.lowlevel.wait_readable(keeper_pidfd)
            log.warning("the keeper %s has ended what it could not end before", self._lasting.get(keeper_pidfd))
            self.holdings.free(devices)
        finally:
            del self._lasting[keeper_pidfd]
            os.close(keeper_pidfd)

    def _look_on(self, devices: Iterable[str]) -> None:
        busy = [device for device in devices if device in self.holdings.busy]
        if busy and self._nursery is not None:
            self._nursery.start_soon(self.holdings.wait_let_go, busy)

    def _end(self, attempt: RunningAttempt, outcome: Outcome, value: bytes | None) -> None:
        attempt.phase = Phase.ENDED
        attempt.ended.set()
        attempt.captured.set()
        if attempt.log is not None:
            attempt.log.close()
            self.logs.ended(attempt.attempt_id)
        told = ObservedAttempt(attempt_id=attempt.attempt_id, phase=Phase.ENDED, pid=attempt.pid, outcome=outcome)
        self.on_observed(told, value)
        if attempt.forget_asked:
            self._delete(attempt)

    def _printed(self, attempt_id: str, chunk: LogChunk) -> None:
        self.on_log(attempt_id, chunk)

    def say(self, attempt_id: str, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``) into the log of an attempt that has not ended."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.ended.is_set():
            attempt.say(text)

    async def _enforce(self, attempt: RunningAttempt, overdue_s: float) -> None:
        with trio.move_on_after(overdue_s):
            await attempt.ended.wait()
            return
        log.error("%s: its keeper (pid %s) does not end it; killing the keeper", attempt.attempt_id, attempt.keeper)
        if attempt.keeper_pidfd >= 0 and not attempt.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(attempt.keeper_pidfd, signal.SIGKILL)

    def _delete(self, attempt: RunningAttempt) -> None:
        """Out of the way at once; what a job left there may be large, so a thread removes it."""
        if self._attempts.pop(attempt.attempt_id, None) is None or self._nursery is None:
            return
        self._nursery.start_soon(partial(trio.to_thread.run_sync, self._remove, attempt, abandon_on_cancel=True))

    def _remove(self, attempt: RunningAttempt) -> None:
        try:
            self.before_removal(attempt.ticket)
        finally:
            remove(attempt.directory)

    # Processes that came to this one

    def _end_survivors(self) -> None:
        """End what an earlier node on this state directory left behind, and clear its directories."""
        if not self._is_new:
            mark = str(self.state_dir)
            ended, left = end_all(lambda pid: _is_ours(pid, mark))
            for group in self.holdings.old_groups():
                ended, left = ended + len(group.pids()), left + group.end()
            if ended:
                log.warning("ended %d processes of an earlier life of this node (%d are left)", ended, left)
            if left:
                self.holdings.hold_survivors(lambda pid: _is_ours(pid, mark))
            remove(self._root)
            self.logs.store.recover()
        self._root.mkdir(mode=0o700, parents=True)

    async def _reap_adopted(self) -> None:
        with trio.open_signal_receiver(signal.SIGCHLD) as signals:
            async for _ in signals:
                self.sweep_adopted()

    def _zygotes_of(self, warm: Sequence[str], prepared: PreparedEnvironment) -> ZygoteManager:
        environ = node_environ(prepared.environ, str(self.state_dir))
        interpreter, hold = prepared.interpreter, prepared.hold
        given = self._descriptors
        return ZygoteManager(warm, environ, self._on_zygote_lost, interpreter=interpreter, hold=hold, descriptors=given)

    def _on_zygote_lost(self) -> None:
        self.sweep_adopted()

    def sweep_adopted(self, dead: int | None = None) -> bool:
        """End every child that is neither a zygote nor a living keeper: orphans that no zygote was there to adopt.

        False: not now, because one of the children may be a keeper that has not said so yet. That passes: its
        greeting, or the end of its socket, is on its way, and `wait_hatched` returns then.
        """
        if not self.subreaper:
            return True
        living = [a for a in self._attempts.values() if not a.ended.is_set()]
        zygotes = self.broods.pids
        if any(a.zygote not in (None, *zygotes) for a in living):
            return False
        keepers = [*(a.keeper for a in living if a.keeper != dead), *self._lasting.values()]
        spare = {pid for pid in (*keepers, *zygotes, *self.household.pids) if pid is not None}
        if any(pid not in spare for pid in children(os.getpid())):
            end_descendants(spare)
        return True

    def gets_namespace(self, ticket: AttemptSpec) -> bool:
        return applies(self.pid_namespace, ticket.spec.entry, self.zygotes.no_namespace)

    def note_hatched(self) -> None:
        """One that was asked for has said its pid, or never will."""
        self._hatched.set()
        self._hatched = trio.Event()

    async def wait_hatched(self) -> None:
        await self._hatched.wait()

    @property
    def _root(self) -> Path:
        return self.state_dir / "attempts"


def _is_ours(pid: int, mark: str) -> bool:
    """A process below a node on this state directory: it has the node's mark in its environment; or it works in the
    directory of an attempt and has no terminal, as somebody who only looks around there would."""
    if mark in environ_of(pid).get(STATE_MARK, "").split(":"):
        return True
    return works_in(pid, f"{mark}/attempts/") and not has_terminal(pid)


@contextlib.contextmanager
def _claim(state_dir: Path) -> Iterator[None]:
    """Hold the state directory for this process alone."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode() or "unknown"
            raise LaunchFailed(
                f"another fray-node (pid {holder}) uses the state directory {state_dir}: "
                "give this one another --state-dir"
            ) from None
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)
