"""A network of several hosts on this machine: `Laboratory` starts them and breaks what connects them.

Hosts are namespaces with network, mounts, processes, names, /tmp and /dev/shm of their own. Packets between them pass
through one process (`tests.network.wire`), which delays, drops, rejects and rewrites them. Nothing is left behind,
also if the tests are killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from attrs import asdict, define, field

from tests.network.fabric import ANY, DROP, ICMP_FIREWALL, REJECT, RESET, RESET_BOTH
from tests.network.host import DEVICE, DISK, SHARED, HostPlan
from tests.network.namespaces import reason_to_skip

MESSAGE_LIMIT_BYTES = 64 * 1024
LAN = "10.77.0."
PRIVATE = "192.168.7."
OUTSIDE = "10.77.9."


class LaboratoryError(Exception):
    """A request that a laboratory or one of its hosts could not serve."""


class _Requests:
    """Requests and answers, one after the other, on a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def ask(self, do: str, descriptors: Sequence[int] = (), **arguments: Any) -> Any:
        """Return the answer. Raises LaboratoryError if it is an error, or the other end has ended."""
        with self._lock:
            try:
                socket.send_fds(self._end, [json.dumps({"do": do, **arguments}).encode()], list(descriptors))
                answer = json.loads(self._end.recv(MESSAGE_LIMIT_BYTES) or b'{"error": "the other end has ended"}')
            except OSError as error:
                raise LaboratoryError(f"{do}: {error}") from error
        if "error" in answer:
            raise LaboratoryError(f"{do}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._end.close()


@define(eq=False)
class Program:
    """One program on a host. ``stdin`` and ``stdout`` are pipes if they were asked for."""

    host: Host
    pid: int
    """Number of the process on its host."""
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    log: Path
    """File with its standard error, and its standard output unless that is a pipe."""
    _status: int
    _exit: int | None = None

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit status, as `subprocess.Popen.wait` does; -9 if its host has ended.

        Raises:
            TimeoutError: it still runs.
        """
        if self._exit is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} on {self.host.name} still runs after {timeout_s:g} s")
            self._exit = int(os.read(self._status, 100) or b"-9")
            os.close(self._status)
        return self._exit

    def is_running(self) -> bool:
        return self._exit is None and not select.select([self._status], [], [], 0)[0]

    def send_signal(self, number: int) -> None:
        """Send a signal to the program alone. Raises LaboratoryError if it has ended."""
        self.host.requests.ask("signal", pid=self.pid, number=number)

    def kill(self) -> int:
        """End it by SIGKILL, and return its exit status."""
        with contextlib.suppress(LaboratoryError):
            self.send_signal(signal.SIGKILL)
        return self.wait()


@define(eq=False)
class Host:
    """One machine of a laboratory."""

    laboratory: Laboratory
    name: str
    address: str
    disk: Path
    """Folder that the host sees as `DISK`, and that survives a reboot."""
    requests: _Requests = field(init=False)
    """Requests to its first process; see `tests.network.host`."""
    programs: list[Program] = field(factory=list)

    def start(self) -> None:
        """Start the machine: for the first time, or again after `kill`, with another boot id and an empty /tmp."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plan = HostPlan(self.name, self.address, str(self.disk), str(self.laboratory.shared))
        with theirs:
            self.laboratory.wire.ask("start_host", [theirs.fileno()], plan=asdict(plan))
        self.requests = _Requests(ours)
        self.programs = []

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, log: str = "programs", pipes: bool = False
    ) -> Program:
        """Start a program in the working directory of this process.

        Args:
            env: variables besides those of this process (without its ``FRAY_*``); ``HOME`` is on the host's `DISK`.
            log: name of the file for its output.
            pipes: whether ``stdin`` and ``stdout`` are pipes.
        """
        (self.disk / "home").mkdir(exist_ok=True)
        paths = f"{os.getcwd()}:{os.getcwd()}/tests/network/shifted_clock"
        own = {"HOME": f"{DISK}/home", "PYTHONPATH": paths, "FRAY_LAB_CLOCK": f"{SHARED}/{self.name}.clock"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FRAY_")}
        environ = {**inherited, **own, **(env or {})}
        log_file = self.laboratory.directory / f"{self.name}.{log}.log"
        status, status_end = os.pipe2(os.O_CLOEXEC)
        stdin, to_stdin = os.pipe2(os.O_CLOEXEC) if pipes else (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
        with log_file.open("ab") as output:
            from_stdout, stdout = os.pipe2(os.O_CLOEXEC) if pipes else (-1, os.dup(output.fileno()))
            given = [stdin, stdout, output.fileno(), status_end]
            try:
                answer = self.requests.ask("run", given, argv=list(argv), env=environ, cwd=os.getcwd())
            finally:
                for descriptor in (stdin, stdout, status_end):
                    os.close(descriptor)
        mine_in = os.fdopen(to_stdin, "wb", buffering=0) if pipes else None
        mine_out = os.fdopen(from_stdout, "rb") if pipes else None
        program = Program(self, answer["pid"], mine_in, mine_out, log_file, status)
        self.programs.append(program)
        return program

    def output_of(self, *argv: str, timeout_s: float = 30.0) -> str:
        """Run a program to its end, and return its standard output. Raises LaboratoryError if it fails."""
        program = self.run(*argv, pipes=True)
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.close()
        text = program.stdout.read().decode()
        status = program.wait(timeout_s)
        if status:
            raise LaboratoryError(f"{argv} on {self.name} ended with {status}: {program.log.read_text()[-2000:]}")
        return text

    def freeze(self) -> None:
        """Stop all processes of the machine, as a suspended virtual machine does; the kernel still answers."""
        self.requests.ask("signal", pid=-1, number=signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue all processes."""
        self.requests.ask("signal", pid=-1, number=signal.SIGCONT)

    def kill(self) -> None:
        """Switch the machine off: its processes end, and it answers to nothing."""
        self.laboratory.wire.ask("kill_host", name=self.name)
        self.requests.close()

    def reboot(self) -> None:
        """Switch it off and on again; what ran there is not started."""
        self.kill()
        self.start()

    def set_clock(self, seconds: float) -> None:
        """Shift the wall clock that Python programs of this host read, by so much from the true time."""
        (self.laboratory.shared / f"{self.name}.clock").write_text(str(seconds))

    def change_address(self, address: str) -> None:
        """Give the machine another address, as another access point does. Its sockets keep the old one."""
        self.laboratory.wire.ask("address", name=self.name, address=address)
        old = f"addr del {self.address}/32 dev {DEVICE}"
        # The routes go with the last address.
        self.requests.ask("ip", lines=[f"addr add {address}/32 dev {DEVICE}", old])
        self.address = address
        self.laboratory.write_names()


class Laboratory:
    """Context manager of several hosts. All ``seconds`` are real time; without them a fault lasts until `heal`.

    Args:
        directory: for logs and the disks of hosts.
        seed: of the wire's random choices.
    """

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.hosts: dict[str, Host] = {}
        self._seed = seed
        self._process: subprocess.Popen[bytes] | None = None
        self.wire: _Requests

    def __enter__(self) -> Laboratory:
        reason = reason_to_skip()
        if reason:
            raise LaboratoryError(reason)
        self.shared.mkdir()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self.directory / "wire.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.network.wire", str(theirs.fileno()), str(self._seed)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.wire = _Requests(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        for host in self.hosts.values():
            host.requests.close()
        self.wire.close()
        self._process.wait(timeout=30)
        if error is not None:
            error.add_note(f"logs of the hosts: {self.directory}")

    # Hosts -----------------------------------------------------------------------------------------------------------

    def host(self, name: str, *, behind_nat: bool = False, remaps: bool = False) -> Host:
        """Start a host, in the one network where all reach all, or behind a gateway of its own.

        Args:
            behind_nat: nothing reaches it but answers, and others see the gateway's address and ports.
            remaps: whether the gateway gives a new port to a connection it does not know; else it drops its packets.
        """
        number = len(self.hosts) + 1
        disk = self.directory / f"{name}.disk"
        disk.mkdir()
        host = Host(self, name, f"{PRIVATE if behind_nat else LAN}{number}", disk)
        self.write_names(host)
        if behind_nat:
            self.wire.ask("gateway", name=name, public=f"{OUTSIDE}{number}", remaps=remaps)
        host.start()
        self.hosts[name] = host
        return host

    def write_names(self, *more: Host) -> None:
        """Tell the names and addresses of all hosts to all."""
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in (*self.hosts.values(), *more))]
        # In place: the file is mounted in the hosts.
        (self.shared / "hosts").write_text("\n".join(lines) + "\n")

    # Faults ----------------------------------------------------------------------------------------------------------

    def cut(self, a: str, b: str = ANY, *, seconds: float | None = None) -> None:
        """Drop all packets between two hosts, or between one and all others."""
        self.cut_one_way(a, b, seconds=seconds)
        self.cut_one_way(b, a, seconds=seconds)

    def cut_one_way(self, source: str, target: str = ANY, *, seconds: float | None = None) -> None:
        """Drop the packets from one host to another; the other direction works."""
        self.wire.ask("fault", source=source, target=target, action=DROP, seconds=seconds)

    def close_port(self, host: str, port: int, *, seconds: float | None = None) -> None:
        """Drop all packets to and from one port of a host."""
        self.wire.ask("fault", source=ANY, target=host, port=port, action=DROP, seconds=seconds)

    def reset_connections(self, a: str, b: str, *, seconds: float = 0.3) -> None:
        """End TCP connections between two hosts that send something now: both ends get a reset, as by a middlebox."""
        for source, target in ((a, b), (b, a)):
            self.wire.ask("fault", source=source, target=target, action=RESET_BOTH, seconds=seconds)

    def firewall(self, host: str, *, except_from: str = "", seconds: float | None = None) -> None:
        """Answer TCP segments to a host with a reset: ``-p tcp ! -s EXCEPT -j REJECT --reject-with tcp-reset``."""
        unless = [except_from] if except_from else []
        self.wire.ask("fault", source=ANY, target=host, action=RESET, unless=unless, seconds=seconds)

    def reject(self, source: str, target: str, *, code: int = ICMP_FIREWALL, seconds: float | None = None) -> None:
        """Answer packets from one host to another with an ICMP error (`tests.network.fabric`)."""
        self.wire.ask("fault", source=source, target=target, action=REJECT, code=code, seconds=seconds)

    def heal(self, a: str = ANY, b: str = ANY) -> None:
        """End the faults between two hosts, or all."""
        self.wire.ask("heal", a=a, b=b)

    def link(self, a: str, b: str, *, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        """Set delay (each way), its random part, and the share of packets lost, between two hosts."""
        for source, target in ((a, b), (b, a)):
            self.wire.ask("link", source=source, target=target, delay_s=delay_s, jitter_s=jitter_s, loss=loss)

    def forget_connections(self, host: str) -> None:
        """Let the gateway of a host lose all connections."""
        self.wire.ask("forget_gateway", name=host)

    def seen(self) -> dict[str, int]:
        """Return how many packets the wire has delivered, dropped and answered, by cause."""
        seen: dict[str, int] = self.wire.ask("seen")["value"]
        return seen


@contextlib.contextmanager
def measured() -> Iterator[list[float]]:
    """Yield a list that has the seconds of the block at its end."""
    began, seconds = time.monotonic(), []
    yield seconds
    seconds.append(time.monotonic() - began)
