"""Decisions of the wire about a packet: deliver it late, drop it, reject it, change its addresses. Pure.

Time and randomness are arguments. Hosts have names; a `Fault` is about one direction between two of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from attrs import define, field, frozen

from tests.network.packets import (
    ACK,
    ICMP,
    RST,
    SYN,
    TCP,
    Packet,
    reset_answer,
    reset_onward,
    rewrite,
    unreachable_answer,
)

DROP, RESET, RESET_BOTH, REJECT = "drop", "reset", "reset both", "reject"
ANY = "*"
ICMP_HOST, ICMP_PORT, ICMP_FIREWALL = 1, 3, 13
FIRST_PORT = 20_000
"""First port that a NAT gives."""


@frozen
class Fault:
    """Treatment of packets from one host to another, until a time.

    Attributes:
        source: its sender's name, or `ANY`.
        target: its receiver's name, or `ANY`.
        action: `DROP` silently, answer the sender with a TCP `RESET`, reset both ends, or `REJECT` by ICMP.
        unless: names of senders and receivers to which it does not apply.
        port: the receiver's port, or the sender's port of its answers; 0 for every port.
        code: of the ICMP error.
        until: time from which it does nothing.
    """

    source: str
    target: str
    action: str = DROP
    unless: tuple[str, ...] = ()
    port: int = 0
    code: int = ICMP_FIREWALL
    until: float = float("inf")

    def is_about(self, source: str, target: str, packet: Packet) -> bool:
        """Return whether it applies to a packet."""
        return (
            self.source in (source, ANY)
            and self.target in (target, ANY)
            and not ({source, target} & set(self.unless))
            and self.port in (0, packet.source_port, packet.target_port)
        )


@frozen
class Link:
    """Quality of one direction between two hosts: seconds of delay, of additional random delay, and share lost."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


Flow = tuple[int, bytes, int, bytes, int]
"""Protocol, address and port inside, address and port of the other end."""


@define
class Nat:
    """The gateway of one host: it rewrites what the host sends, and lets in only answers."""

    public: bytes
    remaps: bool = False
    """A segment of an unknown connection gets a new port; else it is dropped without a word."""
    ports: dict[Flow, int] = field(factory=dict)
    flows: dict[tuple[int, int, bytes, int], Flow] = field(factory=dict)
    next_port: int = FIRST_PORT

    def outward(self, packet: Packet) -> Packet | None:
        """Return a packet of the host as others see it; None drops it."""
        if packet.protocol == ICMP:
            return None
        flow = (packet.protocol, packet.source, packet.source_port, packet.target, packet.target_port)
        port = self.ports.get(flow)
        if port is None:
            opens = packet.tcp_flags & (SYN | ACK | RST) == SYN
            if packet.protocol == TCP and not opens and not self.remaps:
                return None
            port, self.next_port = self.next_port, self.next_port + 1
            self.ports[flow] = port
            self.flows[packet.protocol, port, packet.target, packet.target_port] = flow
        return rewrite(packet, source=(self.public, port))

    def inward(self, packet: Packet) -> Packet | None:
        """Return a packet to the public address as the host gets it; None drops it."""
        flow = self.flows.get((packet.protocol, packet.target_port, packet.source, packet.source_port))
        return rewrite(packet, target=(flow[1], flow[2])) if flow is not None else None

    def forget(self) -> None:
        """Lose all connections, as a gateway does that restarts, or for which they were idle for too long."""
        self.ports.clear()
        self.flows.clear()


@define
class Fabric:
    """State of the whole network: which host has which address, links, faults, gateways."""

    rng: random.Random
    addresses: dict[bytes, str] = field(factory=dict)
    links: dict[tuple[str, str], Link] = field(factory=dict)
    faults: list[Fault] = field(factory=list)
    gateways: dict[str, Nat] = field(factory=dict)
    seen: Counter[str] = field(factory=Counter)
    """Number of packets delivered, in all and by sender and receiver, and of those dropped or answered, by cause."""

    def forward(self, source: str, packet: Packet, now: float) -> Iterable[tuple[float, str, Packet]]:
        """Return what is delivered because host ``source`` sent a packet: times, receivers, packets."""
        if self.addresses.get(packet.source) != source:
            # As every router of an access network does (RFC 2827); a host sends such ones after its address changed.
            self.seen["foreign source"] += 1
            return ()
        if source in self.gateways:
            translated = self.gateways[source].outward(packet)
            if translated is None:
                self.seen["unknown to the gateway"] += 1
                return ()
            packet = translated
        return self._route(source, packet, now)

    def _route(self, source: str, packet: Packet, now: float) -> Iterable[tuple[float, str, Packet]]:
        target = self._host_of(packet.target)
        if target is None:
            self.seen["no such address"] += 1
            return ()
        for fault in self._live_faults(now):
            if fault.is_about(source, target, packet):
                self.seen[fault.action] += 1
                return list(self._answers(fault, source, target, packet, now))
        link = self.links.get((source, target), Link())
        if link.loss and self.rng.random() < link.loss:
            self.seen["lost"] += 1
            return ()
        return self._deliver(source, target, packet, now + link.delay_s + link.jitter_s * self.rng.random())

    def _host_of(self, address: bytes) -> str | None:
        """Return the host at an address, of its own or of its gateway."""
        outside = {gateway.public: name for name, gateway in self.gateways.items()}
        host = outside.get(address) or self.addresses.get(address)
        # The address of a host behind a gateway means nothing to the others.
        return None if host in self.gateways and address not in outside else host

    def _live_faults(self, now: float) -> list[Fault]:
        self.faults = [fault for fault in self.faults if fault.until > now]
        return self.faults

    def _answers(
        self, fault: Fault, source: str, target: str, packet: Packet, now: float
    ) -> Iterable[tuple[float, str, Packet]]:
        if fault.action in (RESET, RESET_BOTH) and packet.protocol == TCP:
            answer = reset_answer(packet)
            if answer is not None:
                yield from self._deliver(target, source, answer, now)
            if fault.action == RESET_BOTH:
                yield from self._deliver(source, target, reset_onward(packet), now)
        elif fault.action == REJECT and packet.protocol != ICMP:
            yield from self._deliver(target, source, unreachable_answer(packet, fault.code, packet.target), now)

    def _deliver(self, source: str, target: str, packet: Packet, due: float) -> Iterable[tuple[float, str, Packet]]:
        if target in self.gateways:
            translated = self.gateways[target].inward(packet)
            if translated is None:
                self.seen["unknown to the gateway"] += 1
                return ()
            packet = translated
        self.seen["delivered"] += 1
        self.seen[f"{source} to {target}"] += 1
        return ((due, target, packet),)
