"""The process of a laboratory that owns its hosts and carries their packets: ``python -m tests.network.wire FD``.

It is process 1 of a PID namespace, and each host is a PID namespace below it. So nothing survives it, and it ends with
the laboratory's end of the socket ``FD``, also if the tests are killed by SIGKILL.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from attrs import define, evolve, field

from tests.network.fabric import ANY, Fabric, Fault, Link, Nat
from tests.network.host import HostPlan, start_host
from tests.network.namespaces import NEWNS, NEWPID, unshare
from tests.network.packets import Packet, read_packet

MESSAGE_LIMIT_BYTES = 64 * 1024
PACKET_LIMIT_BYTES = 64 * 1024
BURST = 64
"""Packets read from one host before the others have their turn."""


@define(eq=False)
class _Host:
    """One running host: its first process, and its network device."""

    plan: HostPlan
    pid: int
    tun: int


@define(eq=False)
class Wire:
    """Carrier of packets and maker of hosts; requests arrive as JSON messages on ``control``."""

    control: socket.socket
    fabric: Fabric
    _hosts: dict[str, _Host] = field(factory=dict)
    _late: list[tuple[float, int, str, Packet]] = field(factory=list)
    _numbers: count[int] = field(factory=count)
    _poll: select.epoll = field(factory=select.epoll)

    def run(self) -> None:
        """Serve until the laboratory closes its end."""
        self._poll.register(self.control, select.EPOLLIN)
        while True:
            for descriptor, _ in self._poll.poll(self._pause_s()):
                if descriptor == self.control.fileno():
                    if not self._serve_request():
                        return
                else:
                    self._read_packets(descriptor)
            self._deliver_late()
            self._reap()

    # Packets ---------------------------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else 1.0

    def _read_packets(self, descriptor: int) -> None:
        name = next((name for name, host in self._hosts.items() if host.tun == descriptor), None)
        for _ in range(BURST if name is not None else 0):
            try:
                data = os.read(descriptor, PACKET_LIMIT_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self._poll.unregister(descriptor)  # its host has ended
                return
            packet = read_packet(data)
            if packet is not None and name is not None:
                now = time.monotonic()
                for due, target, answer in self.fabric.forward(name, packet, now):
                    if due <= now:
                        self._write(target, answer)
                    else:
                        heapq.heappush(self._late, (due, next(self._numbers), target, answer))

    def _deliver_late(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._late)
            self._write(target, packet)

    def _write(self, target: str, packet: Packet) -> None:
        host = self._hosts.get(target)
        if host is not None:
            try:
                os.write(host.tun, packet.data)
            except OSError:
                self.fabric.seen["host is down"] += 1

    # Requests --------------------------------------------------------------------------------------------------------

    def _serve_request(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_LIMIT_BYTES, 4)
        if not data:
            return False
        request = json.loads(data)
        serve: Callable[..., Any] = getattr(self, f"_do_{request.pop('do')}")
        try:
            answer = {"value": serve(*descriptors, **request)}
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.control.send(json.dumps(answer).encode())
        return True

    def _do_start_host(self, channel: int, plan: dict[str, Any]) -> int:
        made = HostPlan(**plan)
        others = [self.control.fileno(), self._poll.fileno(), *(host.tun for host in self._hosts.values())]
        pid, tun = start_host(made, channel, others)
        os.close(channel)
        self._hosts[made.name] = _Host(made, pid, tun)
        self.fabric.addresses[socket.inet_aton(made.address)] = made.name
        self._poll.register(tun, select.EPOLLIN)
        return pid

    def _do_kill_host(self, name: str) -> None:
        host = self._hosts.pop(name)
        os.kill(host.pid, signal.SIGKILL)
        # Its end is that of all its processes, and of their sockets: without a word to their peers, since its device
        # is read no more.
        os.waitpid(host.pid, 0)
        os.close(host.tun)
        self._forget_address(name)

    def _forget_address(self, name: str) -> None:
        self.fabric.addresses = {at: host for at, host in self.fabric.addresses.items() if host != name}

    def _do_address(self, name: str, address: str) -> None:
        self._forget_address(name)
        self.fabric.addresses[socket.inet_aton(address)] = name
        host = self._hosts[name]
        host.plan = evolve(host.plan, address=address)

    def _do_fault(self, seconds: float | None = None, **settings: Any) -> None:
        until = time.monotonic() + seconds if seconds is not None else float("inf")
        settings["unless"] = tuple(settings.get("unless", ()))
        self.fabric.faults.append(Fault(**settings, until=until))

    def _do_heal(self, a: str, b: str) -> None:
        ends = {a, b}
        self.fabric.faults = [
            fault for fault in self.fabric.faults if ends != {ANY} and not ends >= {fault.source, fault.target}
        ]

    def _do_link(self, source: str, target: str, **quality: float) -> None:
        self.fabric.links[source, target] = Link(**quality)

    def _do_gateway(self, name: str, public: str, remaps: bool) -> None:
        self.fabric.gateways[name] = Nat(socket.inet_aton(public), remaps)

    def _do_forget_gateway(self, name: str) -> None:
        self.fabric.gateways[name].forget()

    def _do_seen(self) -> dict[str, int]:
        return dict(self.fabric.seen)

    def _reap(self) -> None:
        """Collect processes whose parents have ended, as process 1 must; hosts are collected where they are killed."""
        hosts = {host.pid for host in self._hosts.values()}
        try:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in hosts:
                    return
                os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            pass


def main() -> int:
    """Become process 1 of a new PID namespace, and serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    seed = int(sys.argv[2])
    # Ctrl-C is for the tests, which then close their end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unshare(NEWPID | NEWNS)
    child = os.fork()
    if child:
        control.close()
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    Wire(control, Fabric(random.Random(seed))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
