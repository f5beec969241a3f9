"""Lines of an attempt, from its pipes through the spool to the node."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.node import capture
from fray.node.capture import LINE_LIMIT_BYTES, LineCutter, Spool
from fray.node.tails import Tail


def cut(*pieces: bytes) -> list[str]:
    cutter = LineCutter()
    return [line for piece in pieces for line in cutter.feed(piece)] + cutter.flush()


def test_lines_are_cut_at_newlines_wherever_the_reads_end() -> None:
    assert cut(b"one\ntw", b"o\n", b"\nfour\r\n") == ["one", "two", "", "four"]


def test_the_last_line_is_kept_without_its_newline() -> None:
    assert cut(b"one\nlast words") == ["one", "last words"]


def test_nothing_printed_is_no_line() -> None:
    assert cut() == cut(b"") == []


def test_a_line_over_the_limit_comes_in_pieces() -> None:
    assert [len(line) for line in cut(b"x" * (2 * LINE_LIMIT_BYTES + 5) + b"\n")] == [LINE_LIMIT_BYTES] * 2 + [5]
    assert [len(line) for line in cut(b"x" * LINE_LIMIT_BYTES + b"\n")] == [LINE_LIMIT_BYTES]


def test_a_character_is_not_cut_in_two() -> None:
    text = "x" + "\N{EURO SIGN}" * LINE_LIMIT_BYTES
    lines = cut(text.encode())
    assert "".join(lines) == text
    assert all(len(line.encode()) <= LINE_LIMIT_BYTES for line in lines)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert cut(b"\xff\xfe\n") == ["\N{REPLACEMENT CHARACTER}" * 2]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_how_the_bytes_arrive_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert cut(*pieces) == cut(data)


# The spool -----------------------------------------------------------------------------------------------------------


def texts(lines: tuple[tuple[str, float, str], ...]) -> list[str]:
    return [text for _, _, text in lines]


def read_all(tail: Tail, until: int, limit_bytes: int = 1000) -> list[str]:
    found: list[str] = []
    while lines := tail.read(until, limit_bytes):
        found += texts(lines)
    return found


def test_the_node_reads_what_the_keeper_wrote(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    spool.write("out", 1.5, ["a", "b\N{EURO SIGN}"])
    spool.write("err", 2.5, ["c"])
    assert tail.read(spool.written) == (("out", 1.5, "a"), ("out", 1.5, "b\N{EURO SIGN}"), ("err", 2.5, "c"))
    assert tail.read(spool.written) == ()
    assert tail.offset == spool.written


def test_the_node_reads_no_further_than_it_was_told(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    spool.write("out", 0.0, ["told"])
    told = spool.written
    spool.write("out", 0.0, ["not yet"])
    assert read_all(tail, told) == ["told"]
    assert read_all(tail, spool.written) == ["not yet"]


def test_batches_are_bounded_and_lose_nothing(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    lines = [f"line {number}" for number in range(1000)]
    spool.write("out", 0.0, lines)
    assert len(tail.read(spool.written, 500)) == 21
    assert texts(Tail(tmp_path).read(spool.written)) == lines
    assert read_all(Tail(tmp_path), spool.written, limit_bytes=1) == lines


def test_a_line_longer_than_a_batch_is_read_whole(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    spool.write("out", 0.0, ["x" * 5000, "y"])
    assert texts(tail.read(spool.written, 100)) == ["x" * 5000]
    assert texts(tail.read(spool.written, 100)) == ["y"]


def test_what_was_read_is_dropped_segment_by_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "SEGMENT_LIMIT_BYTES", 100)
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    lines = [f"line {number}" for number in range(50)]
    for line in lines:
        spool.write("out", 0.0, [line])
    assert len(list(tmp_path.iterdir())) == 10
    assert read_all(tail, spool.written) == lines
    assert len(list(tmp_path.iterdir())) == 1


def test_a_spool_that_is_gone_is_skipped(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert tail.read(1000) == ()
    assert tail.offset == 1000


def test_a_keeper_that_died_in_the_middle_of_a_line_leaves_the_whole_ones(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write("out", 0.0, ["whole"])
    with capture.segment(tmp_path, 0).open("ab") as file:
        file.write(b'["out", 0.0, "ha')
    assert read_all(Tail(tmp_path), 1 << 62) == ["whole"]


def test_how_far_the_node_is_behind_is_what_it_has_not_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write("out", 0.0, ["a" * 100])
    assert spool.behind_bytes == spool.written > 100
    spool.read = spool.written
    assert spool.behind_bytes == 0
