"""Rings, gaps and readers of different speed."""

from hypothesis import given
from hypothesis import strategies as st

from fray.controller.logs import LINE_LIMIT_CHARS, Follower, Line, LogBook, Ring


def line(text: str, time: float = 1.0) -> Line:
    return ("out", time, text)


def texts(lines: tuple[Line, ...]) -> list[str]:
    return [text for _, _, text in lines]


def test_a_follower_gets_every_line_once_and_in_order() -> None:
    book = LogBook()
    follower = Follower(book)
    book.add("a:0:0", [line("one"), line("two")])
    follower.poke("a:0:0")
    assert texts(follower.read("a:0:0", 1000)) == ["one", "two"]
    assert follower.behind() == ()
    book.add("a:0:0", [line("three")])
    follower.poke("a:0:0")
    assert texts(follower.read("a:0:0", 1000)) == ["three"]
    assert follower.read("a:0:0", 1000) == ()


def test_a_late_follower_starts_with_the_first_line_kept() -> None:
    book = LogBook()
    book.add("a:0:0", [line("early")])
    follower = Follower(book)
    follower.poke("a:0:0")
    assert texts(follower.read("a:0:0", 1000)) == ["early"]


def test_a_slow_follower_is_told_how_many_lines_it_lost() -> None:
    book = LogBook(ring_limit_bytes=3 * 110)
    follower = Follower(book)
    book.add("a:0:0", [line("first")])
    follower.poke("a:0:0")
    follower.read("a:0:0", 1000)
    book.add("a:0:0", [line(str(number)) for number in range(10)])
    follower.poke("a:0:0")
    read = texts(follower.read("a:0:0", 10_000))
    assert "7 lines not kept" in read[0]
    assert read[1:] == ["7", "8", "9"]


def test_reading_is_bounded_and_goes_on_where_it_stopped() -> None:
    book = LogBook()
    follower = Follower(book)
    book.add("a:0:0", [line(str(number)) for number in range(5)])
    follower.poke("a:0:0")
    assert texts(follower.read("a:0:0", 1)) == ["0"]
    assert follower.behind() == ("a:0:0",)
    assert texts(follower.read("a:0:0", 10_000)) == ["1", "2", "3", "4"]


def test_the_attempt_that_is_quiet_longest_makes_room_and_its_reader_is_told() -> None:
    book = LogBook(book_limit_bytes=300)
    follower = Follower(book)
    book.add("quiet:0:0", [line("hush")])
    follower.poke("quiet:0:0")
    book.add("loud:0:0", [line(str(number)) for number in range(3)])
    assert "1 line not kept" in texts(follower.read("quiet:0:0", 1000))[0]
    assert follower.behind() == ()
    book.add("quiet:0:0", [line("again")])
    follower.poke("quiet:0:0")
    assert texts(follower.read("quiet:0:0", 1000)) == ["again"]


def test_a_line_without_end_is_cut_and_says_so() -> None:
    ring = Ring()
    ring.add([line("x" * (LINE_LIMIT_CHARS + 5))])
    assert ring.lines[0][2].endswith("(5 more characters cut)")


def test_one_who_leaves_is_behind_no_more() -> None:
    book = LogBook()
    follower = Follower(book)
    book.add("a:0:0", [line("one")])
    follower.poke("a:0:0")
    follower.leave("a:0:0")
    assert follower.behind() == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=60))
def test_what_is_read_and_what_is_reported_lost_add_up_to_all_that_was_printed(
    script: list[tuple[int, int, bool]],
) -> None:
    book = LogBook(ring_limit_bytes=400, book_limit_bytes=900)
    follower = Follower(book)
    printed = dict.fromkeys(range(3), 0)
    heard = dict.fromkeys(range(3), 0)

    def read(which: int, most_bytes: int) -> None:
        for text in texts(follower.read(f"j:0:{which}", most_bytes)):
            heard[which] += int(text.split()[1]) if text.startswith("…") else 1

    for which, count, reads in script:
        book.add(f"j:0:{which}", [line("x")] * count)
        follower.poke(f"j:0:{which}")
        printed[which] += count
        assert book.statistics()["size_bytes"] <= 900
        if reads:
            read(which, 150)
    for which in range(3):
        while f"j:0:{which}" in follower.behind():
            read(which, 150)
    assert heard == printed
