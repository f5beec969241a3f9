"""IPv4 packets as the wire reads and changes them: addresses, ports, checksums, TCP resets, ICMP errors. Pure."""

from __future__ import annotations

import struct

from attrs import evolve, field, frozen

ICMP, TCP, UDP = 1, 6, 17
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
_PORTS = struct.Struct("!HH")


@frozen
class Packet:
    """One IPv4 packet. Addresses are four bytes; ports are 0 where the protocol has none."""

    data: bytes = field(repr=False)
    source: bytes
    target: bytes
    protocol: int
    source_port: int = 0
    target_port: int = 0

    @property
    def payload_at(self) -> int:
        """Offset of what follows the IP header."""
        return (self.data[0] & 15) * 4

    @property
    def tcp_flags(self) -> int:
        """Flags of a TCP segment; 0 for other protocols."""
        return self.data[self.payload_at + 13] if self.protocol == TCP else 0


def read_packet(data: bytes) -> Packet | None:
    """Return the packet in ``data``; None for what is not IPv4 or is cut off."""
    if len(data) < 20 or data[0] >> 4 != 4:
        return None
    start, protocol = (data[0] & 15) * 4, data[9]
    ports = (0, 0)
    if protocol in (TCP, UDP):
        if len(data) < start + (20 if protocol == TCP else 8):
            return None
        ports = _PORTS.unpack_from(data, start)
    return Packet(data, data[12:16], data[16:20], protocol, *ports)


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    # A number of 16-bit digits modulo 65535 is the sum of the digits in one's complement.
    total = int.from_bytes(data) % 0xFFFF
    return 0xFFFF - (total or (0xFFFF if any(data) else 0))


def rewrite(
    packet: Packet,
    *,
    source: tuple[bytes, int] | None = None,
    target: tuple[bytes, int] | None = None,
) -> Packet:
    """Return the packet with another address and port of its sender or receiver, as a NAT does; checksums fit."""
    new = evolve(
        packet,
        source=source[0] if source else packet.source,
        source_port=source[1] if source else packet.source_port,
        target=target[0] if target else packet.target,
        target_port=target[1] if target else packet.target_port,
    )
    body = bytearray(packet.data[packet.payload_at :])
    _PORTS.pack_into(body, 0, new.source_port, new.target_port)
    head = bytearray(packet.data[: packet.payload_at])
    head[12:20] = new.source + new.target
    return evolve(new, data=_sealed(head, body, new.protocol))


def _sealed(head: bytearray, body: bytearray, protocol: int) -> bytes:
    """Return both parts with checksums computed again."""
    head[10:12] = b"\0\0"
    head[10:12] = checksum(bytes(head)).to_bytes(2)
    at = {TCP: 16, UDP: 6, ICMP: 2}[protocol]
    body[at : at + 2] = b"\0\0"
    pseudo = bytes(head[12:20]) + struct.pack("!HH", protocol, len(body)) if protocol != ICMP else b""
    body[at : at + 2] = checksum(pseudo + bytes(body)).to_bytes(2)
    return bytes(head + body)


def _packet(source: bytes, target: bytes, protocol: int, body: bytearray) -> Packet:
    head = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0x4000, 64, protocol, 0, source, target))
    made = read_packet(_sealed(head, body, protocol))
    assert made is not None
    return made


def reset_answer(packet: Packet) -> Packet | None:
    """Return the reset that a closed port, or a firewall, answers to a TCP segment (RFC 9293, 3.10.7.1).

    None for a reset, which has no answer.
    """
    start, flags = packet.payload_at, packet.tcp_flags
    if flags & RST:
        return None
    sequence, acknowledged = struct.unpack_from("!II", packet.data, start + 4)
    if flags & ACK:
        numbers, answer = (acknowledged, 0), RST
    else:
        length = len(packet.data) - start - (packet.data[start + 12] >> 4) * 4
        length += bool(flags & SYN) + bool(flags & FIN)
        numbers, answer = (0, (sequence + length) % 2**32), RST | ACK
    ports = (packet.target_port, packet.source_port)
    segment = struct.pack("!HHIIBBHHH", *ports, *numbers, 5 << 4, answer, 0, 0, 0)
    return _packet(packet.target, packet.source, TCP, bytearray(segment))


def reset_onward(packet: Packet) -> Packet:
    """Return a reset in place of a TCP segment, for its receiver: valid, since it has the segment's number."""
    sequence, acknowledged = struct.unpack_from("!II", packet.data, packet.payload_at + 4)
    ports = (packet.source_port, packet.target_port)
    segment = struct.pack("!HHIIBBHHH", *ports, sequence, acknowledged, 5 << 4, RST | ACK, 0, 0, 0)
    return _packet(packet.source, packet.target, TCP, bytearray(segment))


def unreachable_answer(packet: Packet, code: int, router: bytes) -> Packet:
    """Return the ICMP error "destination unreachable" to a packet: 1 for the host, 3 the port, 13 a firewall."""
    quoted = packet.data[: packet.payload_at + 8]
    return _packet(router, packet.source, ICMP, bytearray(struct.pack("!BBHI", 3, code, 0, 0) + quoted))
