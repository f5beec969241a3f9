"""Lines of an attempt, from its pipes to the node's disk, and from there to who asks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.model.log_records import LogChunk, head, unpack
from fray.model.log_records import line_texts as lines_of
from fray.model.messages.node import LogPage, ReadLog
from fray.node.config import LogRules
from fray.node.logs import store as logs
from fray.node.logs import writer as writer_module
from fray.node.logs.store import LogStore, finish_log, open_writer, unfinished
from fray.node.logs.tail import BATCH_LIMIT_BYTES, Tail, segments
from fray.node.logs.writer import (
    LINE_LIMIT_BYTES,
    LineSplitter,
    LogWriter,
    segment,
)


def cut(*pieces: bytes) -> list[str]:
    cutter = LineSplitter()
    return lines_of(b"".join([*map(cutter.feed, pieces), cutter.flush()]))


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


# The writer ----------------------------------------------------------------------------------------------------------


def texts(chunk: LogChunk | None) -> list[str]:
    return [text for _, _, _, texts in unpack(chunk.data) for text in texts] if chunk is not None else []


def read_all(tail: Tail, limit_bytes: int = BATCH_LIMIT_BYTES) -> list[str]:
    found: list[str] = []
    while (chunk := tail.read(limit_bytes)) is not None:
        found += texts(chunk)
    return found


def test_the_node_reads_the_lines_of_the_shim_with_their_numbers(tmp_path: Path) -> None:
    writer, tail = LogWriter(tmp_path), Tail(tmp_path)
    writer.write("out", 1.5, "a\nb\N{EURO SIGN}\n".encode())
    writer.write("err", 2.5, b"c\r\n")
    chunk = tail.read()
    assert chunk is not None
    assert (chunk.first, chunk.end) == (0, 3)
    assert list(unpack(chunk.data)) == [(0, "out", 1.5, ["a", "b\N{EURO SIGN}"]), (2, "err", 2.5, ["c"])]
    assert tail.read() is None
    writer.write("out", 3.0, b"d\n")
    assert texts(tail.read()) == ["d"]


def test_what_is_not_a_whole_line_yet_is_on_the_disk_and_no_line(tmp_path: Path) -> None:
    writer, tail = LogWriter(tmp_path), Tail(tmp_path)
    writer.write("out", 1.0, b"whole\n", b"ha")
    writer.write("out", 1.0, b"", b"half")
    writer.write("err", 1.0, b"", b"other")
    assert read_all(tail) == ["whole"]
    assert unfinished(tmp_path) == {"out": b"half", "err": b"other"}
    writer.write("out", 2.0, b"half and end\n")
    assert read_all(tail) == ["half and end"]
    assert unfinished(tmp_path) == {"err": b"other"}
    finish_log(tmp_path)
    assert read_all(tail) == ["other"]
    finish_log(tmp_path)
    assert read_all(tail) == []


def test_batches_are_bounded_and_lose_nothing(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    lines = [f"line {number}" for number in range(1000)]
    for line in lines:
        writer.write("out", 0.0, f"{line}\n".encode())
    assert len(texts(Tail(tmp_path).read(1000))) == 16
    assert read_all(Tail(tmp_path), 100) == read_all(Tail(tmp_path)) == lines


def test_segments_follow_one_another_and_the_oldest_go_when_there_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_LIMIT_BYTES", 600)
    writer, tail = LogWriter(tmp_path, limit_bytes=2000), Tail(tmp_path)
    heard = []
    for number in range(50):
        writer.write("out", 0.0, f"line {number}\n".encode())
        heard += read_all(tail)
    assert heard == [f"line {number}" for number in range(50)]
    kept = read_all(Tail(tmp_path))
    assert kept == [f"line {number}" for number in range(50)][-len(kept) :]
    assert 10 < len(kept) < 40
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2700


def test_an_unfinished_line_survives_the_removal_of_the_segment_in_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_LIMIT_BYTES", 600)
    writer = LogWriter(tmp_path, limit_bytes=2000)
    writer.write("err", 0.0, b"", b"unfin")
    for number in range(50):
        writer.write("out", 0.0, f"line {number}\n".encode())
        assert unfinished(tmp_path) == {"err": b"unfin"}
    segments(tmp_path)[-1][1].with_name("log.000000000050").touch()  # a shim that was killed before its first write
    assert unfinished(tmp_path) == {"err": b"unfin"}
    assert read_all(Tail(tmp_path))[-1] == "line 49"


def test_many_writes_of_one_unfinished_line_stay_in_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_LIMIT_BYTES", 600)
    writer, tail = LogWriter(tmp_path), Tail(tmp_path)
    for length in range(1, 50):
        writer.write("out", 0.0, b"", b"x" * length)
        assert read_all(tail) == []
    assert unfinished(tmp_path) == {"out": b"x" * 49}
    writer.write("out", 0.0, b"x" * 49 + b"\n")
    assert read_all(tail) == ["x" * 49]


def test_a_shim_that_died_within_a_record_leaves_whole_records_and_a_place_to_continue(
    tmp_path: Path,
) -> None:
    writer = LogWriter(tmp_path)
    writer.write("out", 0.0, b"whole\n")
    with segment(tmp_path, 0).open("ab") as file:
        file.write(head("out", 1, 1, 0.0, 500) + b"ha")
    assert read_all(Tail(tmp_path)) == ["whole"]
    again = open_writer(tmp_path)
    again.write("sys", 1.0, b"said later\n")
    assert read_all(Tail(tmp_path)) == ["whole", "said later"]


def test_a_full_disk_costs_lines_and_the_numbers_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(tmp_path)
    writer.write("out", 0.0, b"one\n")
    really = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: really(file, [bytes(parts[0])[:9]]))
    writer.write("out", 1.0, b"two\nthree\n")
    monkeypatch.setattr(os, "writev", really)
    writer.write("out", 2.0, b"four\n")
    chunk = Tail(tmp_path).read()
    assert chunk is not None
    assert [(first, lines) for first, _, _, lines in unpack(chunk.data)] == [(0, ["one"]), (3, ["four"])]


# Pages ---------------------------------------------------------------------------------------------------------------


def page_of(store: LogStore, **ask: Any) -> tuple[LogPage, list[str]]:
    page, data = store.read(ReadLog(attempt_id="a:0:0", **ask), 1000.0)
    return page, texts(LogChunk(0, 0, data))


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """An attempt that printed 100 lines, each in a record of its own, one a second, every tenth to stderr."""
    store = LogStore(tmp_path, LogRules())
    writer = open_writer(store.open("a:0:0", lambda chunk: None).directory)
    for number in range(100):
        writer.write("err" if number % 10 == 9 else "out", 900.0 + number, f"line {number}\n".encode())
    return store


def test_pages_go_on_where_the_one_before_stopped(store: LogStore) -> None:
    found, place = [], 0
    while True:
        page, lines = page_of(store, first=place, limit_bytes=500)
        assert page.start == page.first == place
        found += lines
        place = page.next
        if page.caught_up:
            break
    assert found == [f"line {number}" for number in range(100)]


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        ({"tail": 2}, [98, 99]),
        ({"tail": 0}, []),
        ({"tail": 2, "stream": "err"}, [89, 99]),
        ({"tail": 1000, "contains": "7"}, [7, 17, 27, 37, 47, 57, 67, *range(70, 80), 87, 97]),
        ({"since_s": 3.5}, [97, 98, 99]),
        ({"since_s": 3.5, "tail": 1}, [99]),
        ({"since_s": 0.0}, []),
        ({"first": 97}, [97, 98, 99]),
        ({"first": 500}, []),
    ],
)
def test_a_page_begins_where_it_is_asked_to(store: LogStore, ask: dict[str, Any], wanted: list[int]) -> None:
    assert page_of(store, **ask)[1] == [f"line {number}" for number in wanted]


def test_no_word_that_is_looked_for_is_too_odd(store: LogStore) -> None:
    for word in ("\udcff", "\ud800", "\0", "a\nb", "\n" * 1000):
        page, data = store.read(ReadLog(attempt_id="a:0:0", tail=10, contains=word), 0.0)
        assert (page.caught_up, bytes(data)) == (True, b"")


def test_a_page_says_what_is_lost_and_what_never_was(store: LogStore, tmp_path: Path) -> None:
    segment(store.directory("a:0:0"), 0).rename(segment(store.directory("a:0:0"), 0).with_name("gone"))
    writer = LogWriter(store.directory("a:0:0"), lines=100)
    writer.write("out", 1000.0, b"line 100\n")
    page, lines = page_of(store, first=40)
    assert (page.start, page.first, page.next, lines) == (40, 100, 101, ["line 100"])
    nothing, _ = store.read(ReadLog(attempt_id="unknown:0:0"), 0.0)
    assert "keeps no log" in nothing.missing


def test_old_logs_go_first_by_age_then_by_size_and_living_ones_are_only_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_LIMIT_BYTES", 1000)
    store = LogStore(tmp_path, LogRules(total_bytes=10_000, age_s=100.0))

    def printed(attempt: str, ago_s: float, ended: bool) -> Path:
        log = store.open(attempt, lambda chunk: None)
        writer = open_writer(log.directory)
        for _ in range(8):
            writer.write("out", 0.0, b"x" * 500 + b"\n")
        if ended:
            log.close()
        for path in log.directory.iterdir():
            os.utime(path, (1000.0 - ago_s, 1000.0 - ago_s))
        return log.directory

    ancient, old, new = printed("a:0:0", 200.0, True), printed("b:0:0", 50.0, True), printed("c:0:0", 10.0, True)
    living = printed("d:0:0", 500.0, False)
    assert store.sweep(1000.0) <= 10_000
    assert [path.exists() for path in (ancient, old, new, living)] == [False, False, True, True]
    with monkeypatch.context() as patch:
        patch.setattr(logs, "ATTEMPTS_LIMIT", 1)
        store.sweep(1000.0)
        assert [path.exists() for path in (new, living)] == [True, True]  # those that live go first in line, and stay
        patch.setattr(logs, "ATTEMPTS_LIMIT", 0)
        store.sweep(1000.0)
        assert [path.exists() for path in (new, living)] == [False, True]
    new = printed("c:0:0", 10.0, True)
    store.rules = LogRules(total_bytes=2000, age_s=100.0)
    store.sweep(1000.0)
    assert [path.exists() for path in (new, living)] == [False, True]
    assert 0 < len(list(living.glob("log.*"))) < 4


def test_logs_are_private_also_where_an_earlier_version_has_made_the_directory(tmp_path: Path) -> None:
    for made in (False, True):
        root = tmp_path / str(made) / "logs"
        if made:
            root.mkdir(parents=True, mode=0o755)
        LogStore(root, LogRules()).open("j:0:0", lambda chunk: None).close()
        assert root.stat().st_mode & 0o777 == 0o700
        assert [each.stat().st_mode & 0o777 for each in root.iterdir()] == [0o700]
