"""Manager of one zygote: one runs at any time; one that dies is replaced, and running jobs continue."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

import trio
from attrs import define, field

from fray.errors import LaunchFailed
from fray.node.job_process.inherited_environ import mark_argument
from fray.node.zygotes.zygote import ForkedZygote

READY_S = 60.0
"""Seconds after which a zygote that has not finished its imports is killed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
FIRST_TRIES = 3
"""Attempts to start the first zygote in all when it is killed before it is ready: that is not its own failure."""
EXIT_S = 5.0
"""Seconds that a zygote has to kill everything below it when the node ends."""

log = logging.getLogger("fray.node")


@define
class _RunningZygote:
    """Process of a zygote."""

    pid: int
    link: socket.socket
    pidfd: int
    ready: bool = False
    swept: dict[int, trio.Event] = field(factory=dict)


class ZygoteManager:
    """Starts zygotes and sends requests to the running one."""

    def __init__(
        self,
        preload: Sequence[str],
        environ: Mapping[str, str],
        on_lost: Callable[[], None],
        first: ForkedZygote | None = None,
        *,
        interpreter: str = sys.executable,
        lock_path: str = "",
        descriptors: int | None = None,
    ) -> None:
        self.interpreter, self.lock_path = interpreter, lock_path
        """Python that runs the zygote, and a file whose lock it holds, shared, while it runs."""
        self.descriptors = descriptors
        """Number of file descriptors it and its jobs may have open. Default: as this process."""
        self.preload, self.environ = tuple(preload), dict(environ)
        self.on_lost = on_lost
        """Callback after a zygote has died: its children have come to this process, if it is a subreaper."""
        self.pid: int | None = first.pid if first is not None else None
        self.namespace_error = ""
        """Reason why this machine has no PID namespaces; empty: it has. Known once there is a zygote."""
        self._first = first
        """Zygote that was forked before there was a loop."""
        self._running_zygote: _RunningZygote | None = None
        self._changed = trio.Event()
        self._refs = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep one running; started when the first is ready.

        Raises:
            LaunchFailed: the first one could not be started; the message says why.
        """
        pause_s, first, tries = FIRST_PAUSE_S, True, 0
        while True:
            try:
                tries += 1
                await self._run_one(task_status if first else None)
                pause_s, first = FIRST_PAUSE_S, False
            except LaunchFailed as error:
                # A first zygote that fails by itself (an import error) will fail again, and the operator should see
                # why. Later ones have worked before, so they are retried for ever.
                if first and not (error.details.get("killed") and tries < FIRST_TRIES):
                    raise
                log.error("%s; retrying in %g s", error, pause_s)
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _run_one(self, task_status: trio.TaskStatus[None] | None) -> None:
        """Run one zygote from its start to its end."""
        running = self._take_first() or self._spawn()
        try:
            await self._wait_ready(running)
            self._set_running(running)
            if task_status is not None:
                task_status.started()
            await self._listen(running)
        finally:
            self._set_running(None)
            # Also when the node is cancelled: it must not end before everything below the zygote has.
            with trio.CancelScope(shield=True):
                await reap_when_done(running)
        log.warning("the zygote (pid %d) has died; starting another", running.pid)
        # After it was reaped: the kernel reparents its children when it ends.
        self.on_lost()

    def _take_first(self) -> _RunningZygote | None:
        first, self._first = self._first, None
        return None if first is None else make_running(first.pid, first.link)

    def _spawn(self) -> _RunningZygote:
        """Start a zygote; it ends when the node does, whose pidfd it watches."""
        # Sequenced packets keep message boundaries, so each descriptor stays with its request.
        node_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with zygote_end:
            os.set_inheritable(zygote_end.fileno(), True)
            # -P elsewhere: nothing must be imported from the node's directory.
            at_home = self.interpreter == sys.executable
            command = [self.interpreter, *([] if at_home else ["-P"]), "-m", "fray.node.zygotes.zygote"]
            command += ["--mark", mark_argument(self.environ), "--link-fd", str(zygote_end.fileno())]
            command += ["--node-pid", str(os.getpid()), *(f"--preload={name}" for name in self.preload)]
            command += ["--lock-path", self.lock_path] if self.lock_path else []
            command += [f"--descriptors={self.descriptors}"] if self.descriptors is not None else []
            stdin = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            try:
                # Not os.fork: the child of a process with worker threads can meet locks that are never released.
                # posix_spawn runs no Python code in it.
                pid = os.posix_spawn(self.interpreter, command, self.environ, file_actions=[stdin], setsid=True)
            except OSError as error:
                node_end.close()
                raise LaunchFailed(f"{self.interpreter} could not be started: {error.strerror}") from None
        self.pid = pid
        return make_running(pid, node_end)

    async def _wait_ready(self, running: _RunningZygote) -> None:
        with trio.move_on_after(READY_S):
            if packet := await _packet(running.link):
                running.ready, self.namespace_error = True, json.loads(packet)["namespace"]
                return
            await trio.lowlevel.wait_readable(running.pidfd)
            names = ", ".join(self.preload) or "nothing"
            code = _exit_code(running)
            raise LaunchFailed(
                f"the zygote ended with code {code} while it imported {names}: see the node's stderr",
                killed=code == -signal.SIGKILL,
            )
        raise LaunchFailed(f"the zygote was not ready after {READY_S:g} s")

    async def _listen(self, running: _RunningZygote) -> None:
        while packet := await _packet(running.link):
            event = running.swept.pop(json.loads(packet).get("swept"), None)
            if event is not None:
                event.set()

    def _set_running(self, running: _RunningZygote | None) -> None:
        # A dead zygote answers no sweep. Its orphans have come to this process, and `on_lost` ends them.
        if running is None and self._running_zygote is not None:
            for event in self._running_zygote.swept.values():
                event.set()
        self._running_zygote = running
        # Replaced at once: each event stands for one change.
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_running(self) -> _RunningZygote:
        while self._running_zygote is None:
            await self._changed.wait()
        return self._running_zygote

    def running_links(self) -> dict[int, int]:
        """Return the pid of the running zygote, if there is one, and the descriptor of the link to it."""
        running = self._running_zygote
        return {running.pid: running.link.fileno()} if running is not None else {}

    async def fork_shim(self, control: socket.socket, *, namespace: bool = False) -> int:
        """Fork a shim that holds ``control``; waits for a running zygote. If it fails, the socket is closed.

        Args:
            namespace: make it the init of a new PID namespace.

        Returns the pid of the zygote that was asked.
        """
        return await self._send({"fork": 1, "namespace": int(namespace)}, control)

    def kill(self, pid: int | None) -> None:
        """Kill the zygote of this pid, if it runs: it does not answer. Another will be started."""
        if self._running_zygote is not None and self._running_zygote.pid == pid:
            log.error("the zygote (pid %s) does not answer; killing it", pid)
            signal.pidfd_send_signal(self._running_zygote.pidfd, signal.SIGKILL)

    async def sweep(self) -> None:
        """Return when nothing is left of shims that have died."""
        self._refs += 1
        event, ref = trio.Event(), self._refs
        running = await self._wait_running()
        # Before the request, which may have to wait: if the zygote dies meanwhile, the event is set.
        running.swept[ref] = event
        await self._send({"sweep": ref}, None)
        await event.wait()

    async def _send(self, message: dict[str, int], control: socket.socket | None) -> int:
        data = [json.dumps(message).encode()]
        descriptors = [] if control is None else [control.fileno()]
        while True:
            running = await self._wait_running()
            try:
                # A packet is sent whole or not at all, so a request can be repeated to the next zygote.
                socket.send_fds(running.link, data, descriptors)
                return running.pid
            except BlockingIOError:
                # Its link is closed when the zygote dies while the request waits.
                with contextlib.suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(running.link)
            except OSError:
                # It has died; the request goes to the next one.
                await self._wait_changed(running)

    async def _wait_changed(self, running: _RunningZygote) -> None:
        while self._running_zygote is running:
            await self._changed.wait()


def make_running(pid: int, link: socket.socket) -> _RunningZygote:
    """Return the process of a zygote that runs."""
    link.setblocking(False)
    return _RunningZygote(pid=pid, link=link, pidfd=os.pidfd_open(pid))


def _exit_code(running: _RunningZygote) -> int:
    """Return the exit code of a zygote that has ended, without reaping it. Negative: the signal that killed it."""
    # WNOWAIT: `reap_when_done` reaps it, and its pid must not be reused before.
    ended = os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _reap(running: _RunningZygote) -> None:
    os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED)


async def _packet(link: socket.socket) -> bytes:
    """Return the next message; empty when the other end is closed."""
    while True:
        try:
            return link.recv(4096)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(link)
        except ConnectionError:
            return b""


async def reap_when_done(running: _RunningZygote) -> None:
    """Let it end (it kills what is below it first), and reap it. One that is not ready has nothing below it."""
    trio.lowlevel.notify_closing(running.link)
    # The end of its link asks a zygote to end everything below it.
    running.link.close()
    if not running.ready:
        signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
    with trio.move_on_after(EXIT_S) as patience:
        await trio.lowlevel.wait_readable(running.pidfd)
    if patience.cancelled_caught:
        signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
    _reap(running)
    os.close(running.pidfd)
