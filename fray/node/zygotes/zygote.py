"""The zygote: one single-threaded process beside each node, outside any event loop, that forks shims.

It imports once what every job needs, so that a job starts in milliseconds. Invariants: nothing of a shim that died
survives it (orphans come here and are killed), and when the node has ended, everything below ends and then the zygote
does. It holds no secret: a shim reads its attempt spec from the node on a descriptor that only passes through here.

Protocol with the node, one JSON message a packet. Node to zygote: ``{"fork": 1}`` with the shim's control socket
attached (with ``"namespace": 1`` as the init of a PID namespace), ``{"sweep": ref}``. Zygote to node: ``{"ready": pid,
"namespace": why there can be none}``, ``{"swept": ref}``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from attrs import frozen

from fray.model.specs import ActorConfig, AttemptSpec, EndReason, EntryKind, JobSpec, Outcome
from fray.net.codec import from_json, to_json
from fray.net.file_limits import lower_limit
from fray.net.memory_protection import forbid_inspection, hides_processes
from fray.node.job_process.bootstrap import IDLE_PRELOAD, run_entrypoint
from fray.node.linux.process_tree import become_subreaper, end_descendants, set_title
from fray.node.shim.main import run_shim
from fray.node.shim.pid_namespace import fork_init, namespace_error
from fray.node.shim.spawn import close_all_but
from fray.node.zygotes.copy_on_write import compact_heap

PACKET_LIMIT_BYTES = 4096
IDLE_S = 0.25
"""Seconds without a request after which a zygote imports the rest: a request meanwhile waits for about 0.1 s."""
SHIMS_S = 0.5
"""Seconds that shims have to end their jobs, once the node has ended."""


class Zygote:
    """Serves the node's requests for shims."""

    def __init__(self, link: socket.socket, node_pidfd: int) -> None:
        self.link = link
        self.node_pidfd = node_pidfd
        self.shims: set[int] = set()
        self.selector = selectors.DefaultSelector()
        self.wake, self._wake_write = socket.socketpair()
        for end in (self.wake, self._wake_write):
            end.setblocking(False)

    def serve(self) -> socket.socket | None:
        """Fork shims until the node has ended, then end all below and return None.

        Returns a shim's control socket in each forked shim, so that the child leaves this stack frame.
        """
        # A handler that does nothing, so that the wake-up descriptor is written to: with SIG_DFL it is not, and with
        # SIG_IGN the kernel would reap the children itself.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for source in (self.link, self.wake, self.node_pidfd):
            self.selector.register(source, selectors.EVENT_READ)
        # Tested here and not in the node: it takes a fork from a process with one thread.
        self._send(ready=os.getpid(), namespace=namespace_error())
        idle_s: float | None = IDLE_S
        while True:
            ready = {key.fileobj for key, _ in self.selector.select(idle_s)}
            if not ready:
                idle_s = None
                _preload_when_idle()
            # Before the link: requests of a node that has died are not served.
            if self.node_pidfd in ready:
                break
            if self.wake in ready:
                self._reap()
            if self.link in ready:
                packet, descriptors = _receive(self.link)
                if not packet:
                    break
                control = self._handle(json.loads(packet), descriptors)
                if control is not None:
                    return control
        # Shims remove their control groups and write the last lines of the log; a SIGKILL at once would prevent that.
        self._wait_shims()
        end_descendants()
        return None

    def _wait_shims(self) -> None:
        """Wait for shims, which have noticed the end of the node and end their jobs in order. The rest is killed."""
        deadline = time.monotonic() + SHIMS_S
        while self.shims and (left_s := deadline - time.monotonic()) > 0:
            select.select([self.wake], [], [], left_s)
            self._reap()

    def _handle(self, message: dict[str, int], descriptors: list[int]) -> socket.socket | None:
        if "fork" in message:
            fork = fork_init if message.get("namespace") else os.fork
            return self._fork_shim(socket.socket(fileno=descriptors[0]), fork)
        if "sweep" in message:
            self._reap()
            # Living shims are spared, and what is below them.
            end_descendants(self.shims)
            self._send(swept=message["sweep"])
        return None

    def _fork_shim(self, control: socket.socket, fork: Callable[[], int]) -> socket.socket | None:
        """Fork; return the control socket in the child. Closing it, if the fork fails, notifies the node."""
        with contextlib.suppress(OSError):
            # An error closes the socket: the node sees the end of the stream and asks again.
            pid = fork()
            if pid == 0:
                self._close_inherited(control)
                return control
            self.shims.add(pid)
        control.close()
        return None

    def _close_inherited(self, control: socket.socket) -> None:
        """Close the zygote's descriptors in a child, so that its end is noticed as the end of its link."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        # Detached: no object may stay behind that closes the number again once it belongs to another file.
        for end in (self.link, self.wake, self._wake_write):
            end.detach()
        close_all_but((control.fileno(), self.node_pidfd))

    def _reap(self) -> None:
        """Reap children; kill the orphans of a shim that did not end as it should (one that did has left nothing)."""
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):
                pass
        untidy = False
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                self.shims.discard(dead[0])
                untidy = untidy or dead[1] != 0
        # A search for orphans reads /proc, which a thousand tidy ends a minute must not cost.
        if untidy:
            end_descendants(self.shims)

    def _send(self, **message: int | str) -> None:
        with contextlib.suppress(OSError):
            self.link.send(json.dumps(message).encode())


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    try:
        # Close-on-exec, so that a program that is executed in another fork does not inherit it.
        packet, descriptors, _, _ = socket.recv_fds(link, PACKET_LIMIT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return b"", []
    return packet, descriptors


# Start ---------------------------------------------------------------------------------------------------------------


@frozen
class ForkedZygote:
    """Zygote as the process that forked it holds it."""

    pid: int
    link: socket.socket


def fork_zygote(names: Sequence[str]) -> ForkedZygote:
    """Fork a zygote from this process, which has imported ``names`` already. Returns in this process alone.

    Only for a process without threads and loop, executed with the environment its jobs are to have, and before it
    knows anything that no job may know.
    """
    node_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = os.getpid()
    pid = os.fork()
    if pid:
        zygote_end.close()
        return ForkedZygote(pid, node_end)
    try:
        # A session of its own: signals of the driver's terminal must not reach it before `_set_up` ignores them.
        os.setsid()
        close_all_but((zygote_end.fileno(),))
        node_end.detach()
        run_zygote(zygote_end, node, names)
    except BaseException:  # noqa: BLE001 - printed on the node's stderr; the node's code must never continue here
        traceback.print_exc()
    finally:
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a zygote in an interpreter of its own: whenever the node has a loop already."""
    parser = argparse.ArgumentParser(prog="fray.node.zygotes.zygote", description="forks the jobs of a fray-node")
    parser.add_argument("--mark", help="not used by it: what it forks is recognised by it")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--node-pid", type=int, required=True)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--lock-path", help="lock file of its environment")
    parser.add_argument("--descriptors", type=int, help="limit of open file descriptors for it and its jobs")
    options = parser.parse_args(arguments)
    if options.descriptors is not None:
        # Daemons raise their own limit; programs that use `select` break with descriptors beyond 1,024.
        lower_limit(options.descriptors)
    if options.lock_path:
        _hold_lock(options.lock_path)
    # Programs that are executed below must not hold the link.
    os.set_inheritable(options.link_fd, False)
    run_zygote(socket.socket(fileno=options.link_fd), options.node_pid, options.preload)


def _hold_lock(path: str) -> None:
    """Lock the environment for as long as this process lives; the node holds the lock, too, until this returns."""
    # By the zygote itself: if the node is killed, its environment is not evicted under the jobs that still end.
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH)


def run_zygote(link: socket.socket, node_pid: int, names: Sequence[str]) -> NoReturn:
    """Preload and serve; continue as a job in each process that is to be one."""
    _set_up()
    try:
        # The descriptor first, the check of the parent second: in this order the pid cannot have been reused in
        # between.
        node_pidfd = os.pidfd_open(node_pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != node_pid:
        os._exit(0)
    preload(names)
    # Else a later node would not find a shim that is left behind, for example one that was stopped (SIGSTOP).
    protects = os.geteuid() == 0 or not hides_processes()
    control = Zygote(link, node_pidfd).serve()
    if control is None:
        os._exit(0)
    if protects:
        forbid_inspection()
    # Here and not where the fork was: nothing of the zygote's frames and locals is left in the child.
    run_entrypoint(run_shim(control, node_pidfd))


def _set_up() -> None:
    """Prepare the process. Signals are for the node: a service manager sends them to all of its processes at once."""
    # If one of 0 to 2 is closed, the next socket would get its number, and every print would write into it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    become_subreaper()
    set_title("fray-zygote")
    # A collection in a forked child would write to the headers of all inherited objects and so copy their pages.
    gc.disable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def preload(names: Sequence[str]) -> None:
    """Import modules (``module``), or import and call (``module:function``), once for all jobs to come, and compact
    the heap."""
    import_all(names)
    _warm_codec()
    compact_heap()


def _preload_when_idle() -> None:
    """Import what jobs of the blocking and the v2 interface need, for which each would take 0.1 s of CPU time."""
    # An environment of a job may have packages with which they cannot be imported; jobs that need them will say so.
    with contextlib.suppress(ImportError):
        import_all(IDLE_PRELOAD)
    compact_heap()


def import_all(names: Iterable[str]) -> None:
    """Import modules (``module``), or import and call (``module:function``)."""
    for name in names:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()


def _warm_codec() -> None:
    """Compile the converters of what every shim reads and writes, which takes milliseconds each at first use."""
    spec = JobSpec(job_id="", name="", namespace="", entry=EntryKind.ACTOR, actor=ActorConfig())
    from_json(AttemptSpec, to_json(AttemptSpec(attempt_id="", spec=spec, controller="", key="")))
    from_json(Outcome, to_json(Outcome(cause=EndReason.SUCCEEDED)))


if __name__ == "__main__":
    # Imported under its own name: classes of ``__main__`` would be others than those that `manager` and the shim
    # import.
    from fray.node.zygotes import zygote as _zygote

    _zygote.main()
