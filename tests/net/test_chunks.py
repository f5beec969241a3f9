"""Large buffers beside frames: the two ends against a dumb twin, and who comes when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import ProtocolMismatch
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.net.buffers import chunks as bulk
from fray.net.buffers.chunks import (
    CHUNK_BYTES,
    FLOWS_AT_ONCE,
    PLACE_BYTES,
    ChunkReceiver,
    ChunkSender,
    TransferGroup,
)
from fray.net.channel.session import SendQueue
from fray.net.codec import ACK, HEADER


def take_all(out: ChunkSender, numbered: int = 1 << 60) -> list[tuple[int, bytes]]:
    """Every chunk as (transfer, bytes)."""
    chunks = []
    while (chunk := out.take(numbered)) is not None:
        chunks.append((HEADER.unpack(chunk[0])[5], bytes(chunk[1])))
    return chunks


@given(
    buffers=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=20),
    chunk=st.integers(1, 16),
    placed=st.lists(st.booleans(), min_size=1, max_size=8),
    dropped=st.sets(st.integers(1, 20)),
)
def test_transfers_arrive_for_any_flows_and_ways_of_receiving(
    buffers: list[tuple[int, int]], chunk: int, placed: list[bool], dropped: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "CHUNK_BYTES", chunk)
        out, into = ChunkSender(), ChunkReceiver()
        landed: dict[int, bytes] = {}
        sent: dict[int, bytes] = {}
        for flow, size in buffers:
            data = bytes(range(size))
            number = out.add(flow, memoryview(data))
            sent[number] = data
            into.expect(number, size, lambda buffer, number=number: landed.update({number: bytes(buffer)}))
        out.mark_announced(sent, 0)
        out.drop(dropped)
        assert out.waiting_bytes == sum(len(data) for number, data in sent.items() if number not in dropped)
        for at, (number, piece) in enumerate(take_all(out)):
            if placed[at % len(placed)]:
                start = ACK.pack(0) + HEADER.pack(len(piece), bulk._BULK, 0, 0, 0, number)
                place = into.place(start, PLACE_BYTES + len(piece))
                assert place is not None
                place[:] = piece
                into.placed(number, len(piece))
            else:
                into.on_chunk(number, piece)
        assert landed == {number: data for number, data in sent.items() if number not in dropped}
        assert out.waiting_bytes == 0
        into.forget(dropped)
        assert (into.held_bytes, len(into)) == (0, 0)


def test_an_incomplete_transfer_is_counted_as_it_is_filled() -> None:
    size, half = 2 * bulk.COUNTED_BYTES + 10, bulk.COUNTED_BYTES // 2
    held: list[int] = []
    into = ChunkReceiver(on_held=held.append)
    into.expect(1, size, lambda buffer: None)
    into.expect(2, 10, lambda buffer: None)
    assert held == [], "an announcement takes no memory"
    for _ in range(4):
        into.on_chunk(1, bytes(half))
    into.on_chunk(2, b"ab")
    assert held == [2 * half, 4 * half, 4 * half + 10]
    into.on_chunk(1, bytes(10))
    assert held[3:] == [4 * half + 20, 10]
    into.forget([2])
    assert (into.held_bytes, held[5:]) == (0, [0])


def test_a_complete_transfer_is_counted_until_the_others_of_its_object_are_complete() -> None:
    into, landed = ChunkReceiver(), []
    objects = TransferGroup(), TransferGroup()
    for number in range(4):
        into.expect(number, 100, lambda buffer: landed.append(bytes(buffer)), objects[number % 2])
    into.add_beside(objects[0], 7)
    into.on_chunk(0, b"a" * 100)
    into.on_chunk(1, b"b" * 100)
    assert (len(landed), len(into), into.held_bytes) == (2, 2, 207)
    into.on_chunk(2, b"c" * 60)
    assert into.held_bytes == 307
    into.on_chunk(2, b"c" * 40)
    assert (len(landed), into.held_bytes) == (3, 100)
    # The call of the other one was cancelled.
    into.forget([1, 3])
    assert (into.held_bytes, len(into)) == (0, 0)


def test_no_chunk_is_sent_before_the_frame_that_announces_it() -> None:
    out = ChunkSender()
    first, second = out.add("a", memoryview(b"1")), out.add("b", memoryview(b"2"))
    assert out.take(1 << 60) is None
    out.mark_announced([second], 7)
    assert not out.is_due(6)
    assert out.is_due(7)
    assert take_all(out, 7) == [(second, b"2")]
    out.mark_announced([first], 9)
    assert take_all(out, 9) == [(first, b"1")]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("frame"), st.integers(1, 3)),
            st.tuples(st.just("announce"), st.integers(0, 3)),
            st.tuples(st.just("frames"), st.integers(1, 4)),
            st.tuples(st.just("chunk"), st.just(0)),
            st.tuples(st.just("lose"), st.integers(0, 5)),
        ),
        max_size=60,
    )
)
def test_no_chunk_overtakes_its_announcement_whatever_else_is_sent_or_lost(steps: list[tuple[str, int]]) -> None:
    """One side queues frames and transfers of three chunks; connections are lost with the last entries under way."""
    queue, out = SendQueue(), ChunkSender()
    arrived: list[bytes | int] = []  # at the peer, in order: frames as bytes, chunks as the number of their transfer

    def send_chunk() -> bool:
        if queue.numbered < queue.resend_until or (chunk := out.take(queue.taken)) is None:
            return False
        queue.number_chunk(chunk)
        arrived.append(HEADER.unpack(chunk[0])[5])
        return True

    def send_frames(count: int) -> bool:
        parts = queue.take(10 * count)
        whole = [part for part in parts if len(part) > 1]  # a chunk that is sent again: its header, then its one byte
        arrived.extend(HEADER.unpack(part)[5] if len(part) == HEADER.size else bytes(part) for part in whole)
        return bool(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "CHUNK_BYTES", 1)
        for what, number in steps:
            if what == "frame":
                for _ in range(number):
                    queue.push(b"ordinary..", 10)
            elif what == "announce":
                transfer = out.add(number, memoryview(b"..."))
                queue.push(b"announce%2d" % transfer, 10)
                out.mark_announced([transfer], queue.taken + len(queue.unsent))
            elif what == "frames":
                send_frames(number)
            elif what == "chunk":
                send_chunk()
            elif queue.numbered - queue.acked >= number:
                del arrived[len(arrived) - number :]
                queue.rewind(queue.numbered - number)
        while send_chunk() or send_frames(1):
            pass
    chunks = Counter(each for each in arrived if isinstance(each, int))
    assert all(count == 3 for count in chunks.values())
    for transfer in range(1, out.numbered + 1):
        assert arrived.index(b"announce%2d" % transfer) < arrived.index(transfer)


def test_flows_take_turns_and_each_keeps_its_order() -> None:
    out = ChunkSender()
    big = memoryview(bytes(2 * CHUNK_BYTES))
    numbers = {flow: [out.add(flow, big), out.add(flow, big)] for flow in "ab"}
    out.mark_announced([*numbers["a"], *numbers["b"]], 0)
    turns = [number for number, _ in take_all(out)]
    a, b = numbers["a"], numbers["b"]
    assert turns == [a[0], b[0], a[0], b[0], a[1], b[1], a[1], b[1]]


def test_only_a_few_flows_take_turns_so_that_the_first_are_not_all_late() -> None:
    out = ChunkSender()
    numbers = [out.add(flow, memoryview(bytes(3 * CHUNK_BYTES))) for flow in range(FLOWS_AT_ONCE + 1)]
    out.mark_announced(numbers, 0)
    turns = [number for number, _ in take_all(out)]
    assert turns.index(numbers[-1]) >= 2 * FLOWS_AT_ONCE


def test_a_chunk_sent_again_after_a_lost_connection_goes_to_the_same_place() -> None:
    into, landed = ChunkReceiver(), []
    into.expect(1, 4, lambda buffer: landed.append(bytes(buffer)))
    start = ACK.pack(0) + HEADER.pack(4, bulk._BULK, 0, 0, 0, 1)
    half = into.place(start, PLACE_BYTES + 4)
    assert half is not None
    half[:2] = b"ab"  # and then the connection is lost
    into.on_chunk(1, b"abcd")
    assert landed == [b"abcd"]


def test_more_bytes_than_announced_end_the_channel() -> None:
    into = ChunkReceiver()
    into.expect(1, 4, lambda buffer: None)
    with pytest.raises(ProtocolMismatch, match="more than the 4 bytes"):
        into.on_chunk(1, b"12345")
    with pytest.raises(ProtocolMismatch):
        into.expect(1, 4, lambda buffer: None)
    with pytest.raises(ProtocolMismatch):
        into.expect(2, SIZE_LIMIT_BYTES + 1, lambda buffer: None)


def test_cancelled_transfers_are_discarded() -> None:
    into = ChunkReceiver()
    into.on_chunk(9, b"1234")
    into.expect(1, 4, lambda buffer: pytest.fail("it was forgotten"))
    into.forget([1, 2])
    into.on_chunk(1, b"1234")
    assert len(into) == 0
