"""Packets that are read, rewritten and answered, beside what the kernel makes of the same."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.network.fabric import ANY, DROP, REJECT, RESET, RESET_BOTH, Fabric, Fault, Link, Nat
from tests.network.packets import ACK, RST, SYN, TCP, Packet, checksum, read_packet, reset_answer, rewrite

A, B, GATEWAY = (socket.inet_aton(address) for address in ("10.0.0.1", "10.0.0.2", "10.0.9.9"))


def segment(flags: int = ACK, payload: bytes = b"data", source: bytes = A, target: bytes = B) -> Packet:
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, 77, 99, 5 << 4, flags, 100, 0, 0) + payload
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 1, 0, 64, TCP, 0, source, target)
    made = read_packet(head + tcp)
    assert made is not None
    return rewrite(made)


def plain_sum(data: bytes) -> int:
    """Return the one's complement sum, digit by digit: 0xffff for a packet with its checksum in place."""
    total = 0
    for at in range(0, len(data), 2):
        total += int.from_bytes(data[at : at + 2].ljust(2, b"\0"))
        total = (total & 0xFFFF) + (total >> 16)
    return total


def is_sealed(packet: Packet) -> bool:
    body = packet.data[packet.payload_at :]
    pseudo = packet.source + packet.target + struct.pack("!HH", packet.protocol, len(body))
    return plain_sum(packet.data[:20]) == 0xFFFF and plain_sum(pseudo + body) == 0xFFFF


@given(st.binary(max_size=60))
def test_the_checksum_makes_the_sum_of_all_digits_one(data: bytes) -> None:
    if len(data) % 2 == 0:
        assert plain_sum(data + checksum(data).to_bytes(2)) == 0xFFFF


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_left_out(data: bytes) -> None:
    packet = read_packet(data)
    assert packet is None or packet.data == data


def test_a_rewritten_packet_has_new_ends_and_right_checksums() -> None:
    changed = rewrite(segment(), source=(GATEWAY, 20000))
    assert (changed.source, changed.source_port, changed.target_port) == (GATEWAY, 20000, 2000)
    assert is_sealed(changed)


@pytest.mark.parametrize(("flags", "numbers", "answer"), [(ACK, (99, 0), RST), (SYN, (0, 77 + 4 + 1), RST | ACK)])
def test_a_reset_has_the_numbers_that_its_receiver_accepts(flags: int, numbers: tuple[int, int], answer: int) -> None:
    reset = reset_answer(segment(flags))
    assert reset is not None
    assert struct.unpack_from("!II", reset.data, 24) == numbers
    assert (reset.tcp_flags, reset.source, reset.target) == (answer, B, A)
    assert is_sealed(reset)
    assert reset_answer(reset) is None


def fabric(**more: object) -> Fabric:
    return Fabric(random.Random(1), addresses={A: "a", B: "b"}, **more)  # type: ignore[arg-type]


def test_packets_arrive_late_over_a_slow_link_and_lost_ones_never() -> None:
    slow = fabric(links={("a", "b"): Link(delay_s=0.5)})
    assert [(due, host) for due, host, _ in slow.forward("a", segment(), 10.0)] == [(10.5, "b")]
    assert not list(fabric(links={("a", "b"): Link(loss=1.0)}).forward("a", segment(), 10.0))


def test_a_packet_with_another_host_s_address_is_dropped() -> None:
    assert not list(fabric().forward("b", segment(), 0.0))


@pytest.mark.parametrize(
    ("action", "receivers"), [(DROP, []), (RESET, ["a"]), (RESET_BOTH, ["a", "b"]), (REJECT, ["a"])]
)
def test_a_fault_ends_at_its_time(action: str, receivers: list[str]) -> None:
    broken = fabric(faults=[Fault("a", ANY, action, until=5.0)])
    assert [host for _, host, _ in broken.forward("a", segment(), 4.9)] == receivers
    assert [host for _, host, _ in broken.forward("a", segment(), 5.0)] == ["b"]


def test_a_gateway_lets_in_answers_only_and_forgets() -> None:
    network = fabric(gateways={"a": Nat(GATEWAY)})
    ((_, _, seen),) = network.forward("a", segment(SYN), 0.0)
    assert seen.source == GATEWAY
    answer = rewrite(segment(source=B, target=GATEWAY), source=(B, 2000), target=(GATEWAY, seen.source_port))
    ((_, host, back),) = network.forward("b", answer, 0.0)
    assert (host, back.target, back.target_port) == ("a", A, 1000)
    assert not list(network.forward("b", segment(source=B, target=A), 0.0)), "its own address means nothing outside"
    network.gateways["a"].forget()
    assert not list(network.forward("b", answer, 0.0))
    assert not list(network.forward("a", segment(ACK), 0.0))
