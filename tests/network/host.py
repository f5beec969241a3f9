"""One host of the laboratory: the first process in namespaces of its own, which starts programs on request."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attrs import define, field, frozen

from tests.network.namespaces import (
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUTS,
    bind,
    configure_network,
    ip,
    make_private_folders,
    mount,
    needed_folders,
    open_tun,
    unshare,
)

DEVICE = "lan0"
DISK = "/tmp/disk"
"""Path at which a host sees its folder that survives a reboot."""
SHARED = "/tmp/shared"
"""Path at which hosts see the folder of all."""
MESSAGE_LIMIT_BYTES = 64 * 1024
DESCRIPTOR_LIMIT = 1024


@frozen
class HostPlan:
    """Description of a host to start.

    Attributes:
        name: also of the machine (``hostname``).
        address: IPv4.
        disk: folder of the laboratory that is `DISK` there.
        shared: folder of the laboratory that is `SHARED` on all hosts; its file ``hosts`` is their ``/etc/hosts``.
    """

    name: str
    address: str
    disk: str
    shared: str


def start_host(plan: HostPlan, channel: int, others: Sequence[int]) -> tuple[int, int]:
    """Start a host, and return its process and the descriptor of its network device.

    Args:
        channel: socket on which it takes requests.
        others: descriptors of this process that it must not keep open.

    Raises:
        OSError: the kernel refused; the text of the failure is in the error.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    middle = os.fork()
    if not middle:
        _be_middle(plan, channel, theirs, [ours.fileno(), *others])
    theirs.close()
    known: dict[str, Any] = {}
    tun: list[int] = []
    with ours:
        # The number of its first process comes from the one that forked it, the device from that process itself.
        while not {"pid", "ready"} <= known.keys() and "error" not in known:
            data, descriptors, _, _ = socket.recv_fds(ours, MESSAGE_LIMIT_BYTES, 1)
            known |= json.loads(data or b'{"error": "it ended without a word"}')
            tun += descriptors
    os.waitpid(middle, 0)
    if "error" in known:
        raise OSError(f"host {plan.name} did not start: {known['error']}")
    return known["pid"], tun[0]


def _be_middle(plan: HostPlan, channel: int, reports: socket.socket, others: Sequence[int]) -> NoReturn:
    """Enter the namespaces, leave process 1 of the new PID namespace behind, and exit."""
    try:
        for descriptor in others:
            os.close(descriptor)
        os.setsid()
        unshare(NEWNET | NEWNS | NEWUTS | NEWIPC | NEWPID)
        pid = os.fork()
        if pid:
            reports.send(json.dumps({"pid": pid}).encode())
        else:
            _prepare(plan, reports)
            reports.close()
            _Programs(socket.socket(fileno=channel)).serve()
    except BaseException:  # noqa: BLE001 - reported to the laboratory, or in the log
        reports.send(json.dumps({"error": traceback.format_exc()[-2000:]}).encode())
        os._exit(1)
    os._exit(0)


def _prepare(plan: HostPlan, reports: socket.socket) -> None:
    """Make this process's view of the machine that of a machine of its own."""
    own_folders = [(Path(plan.disk), Path(DISK)), (Path(plan.shared), Path(SHARED))]
    make_private_folders([*((folder, folder) for folder in needed_folders()), *own_folders])
    mount("proc", "/proc", "proc")
    own = Path("/tmp/host")
    own.mkdir()
    (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
    (own / "resolv.conf").write_text("")  # a name that is not in /etc/hosts is unknown at once
    bind(own / "boot_id", "/proc/sys/kernel/random/boot_id")
    bind(own / "resolv.conf", "/etc/resolv.conf")
    bind(f"{SHARED}/hosts", "/etc/hosts")
    socket.sethostname(plan.name)
    device = open_tun(DEVICE)
    configure_network(DEVICE, plan.address)
    socket.send_fds(reports, [b'{"ready": true}'], [device])
    os.close(device)


@define(eq=False)
class _Programs:
    """Work of process 1 of a host: it starts programs, and reports how each ended on its status pipe."""

    channel: socket.socket
    _status_pipes: dict[int, int] = field(factory=dict)

    def serve(self) -> None:
        """Serve until the laboratory closes its end."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self.channel, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._collect()
            if self.channel in ready:
                data, descriptors, _, _ = socket.recv_fds(self.channel, MESSAGE_LIMIT_BYTES, 4)
                if not data:
                    return
                request = json.loads(data)
                try:
                    answer = getattr(self, f"_do_{request.pop('do')}")(*descriptors, **request)
                except Exception as error:  # noqa: BLE001 - it is the answer
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self.channel.send(json.dumps(answer or {}).encode())

    def _collect(self) -> None:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pipe = self._status_pipes.pop(ended[0], None)
                if pipe is not None:
                    os.write(pipe, str(os.waitstatus_to_exitcode(ended[1])).encode())
                    os.close(pipe)
        except ChildProcessError:
            pass

    def _do_run(
        self, stdin: int, stdout: int, stderr: int, status: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> dict[str, Any]:
        pid = os.fork()
        if not pid:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setsid()
                for number, descriptor in enumerate((stdin, stdout, stderr)):
                    os.dup2(descriptor, number)
                os.closerange(3, DESCRIPTOR_LIMIT)
                os.chdir(cwd)
                os.execvpe(argv[0], argv, env)
            except BaseException:  # noqa: BLE001 - reported to the laboratory, or in the log
                os.write(2, traceback.format_exc().encode())
            os._exit(127)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self._status_pipes[pid] = status
        return {"pid": pid}

    def _do_signal(self, pid: int, number: int) -> None:
        """Send a signal to one program, or, with -1, to every process of this host but this one."""
        os.kill(pid, number)

    def _do_ip(self, lines: list[str]) -> None:
        ip(*lines)
