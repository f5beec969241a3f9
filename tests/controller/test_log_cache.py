"""Log cache of the controller: rings, holes and terminals of different speed."""

from hypothesis import given
from hypothesis import strategies as st

from fray.controller.log_cache import LogCache, LogCursor, LogRing
from fray.model.log_records import LogChunk, record, unpack

COST = 300


def chunk(first: int, *texts: str) -> LogChunk:
    return LogChunk(
        first, first + len(texts), record("out", first, 1.0, "".join(f"{text}\n" for text in texts).encode())
    )


def texts(found: LogChunk | None) -> list[str]:
    return [text for _, _, _, texts in unpack(found.data) for text in texts] if found is not None else ["-"]


def test_a_ring_gives_what_it_has_and_says_what_it_has_not() -> None:
    ring = LogRing()
    ring.append(chunk(5, "five", "six"))
    ring.append(chunk(7, "seven"))
    assert texts(ring.read(5, 1000)) == ["five", "six", "seven"]
    assert texts(ring.read(6, 1000)) == ["five", "six", "seven"]  # whole chunks
    assert texts(ring.read(7, 1000)) == ["seven"]
    assert texts(ring.read(5, 1)) == ["five", "six"]
    assert ring.read(8, 1000) == LogChunk(8, 8)
    assert ring.read(4, 1000) is None
    assert ring.next_after(0) == 5


def test_a_hole_is_read_up_to_and_not_over() -> None:
    ring = LogRing()
    ring.append(chunk(0, "zero"))
    ring.append(chunk(5, "five"))
    ring.append(LogChunk(9, 9))
    assert texts(ring.read(0, 1000)) == ["zero"]
    assert ring.read(1, 1000) is None
    assert texts(ring.read(5, 1000)) == ["five"]
    assert ring.read(6, 1000) is None
    assert (ring.next_after(1), ring.next_after(6), ring.end) == (5, 9, 9)


def test_what_comes_twice_is_kept_once() -> None:
    ring = LogRing()
    ring.append(chunk(0, "zero", "one"))
    ring.append(chunk(0, "zero", "one"))
    assert texts(ring.read(0, 1000)) == ["zero", "one"]


def test_a_terminal_gets_every_line_once_and_in_order() -> None:
    log_cache = LogCache()
    follower = LogCursor(log_cache)
    log_cache.add("a:0:0", chunk(0, "one", "two"))
    follower.mark_pending("a:0:0")
    assert texts(follower.read("a:0:0", 1000)[0]) == ["one", "two"]
    assert not follower.pending
    log_cache.add("a:0:0", chunk(2, "three"))
    follower.mark_pending("a:0:0")
    assert texts(follower.read("a:0:0", 1000)[0]) == ["three"]
    assert follower.read("a:0:0", 1000) == (LogChunk(3, 3), 0)


def test_a_slow_terminal_gets_the_number_of_lines_it_skips() -> None:
    log_cache = LogCache(ring_limit_bytes=3 * (COST + 60))
    follower = LogCursor(log_cache)
    log_cache.add("a:0:0", chunk(0, "first"))
    follower.mark_pending("a:0:0")
    follower.read("a:0:0", 1000)
    for number in range(1, 11):
        log_cache.add("a:0:0", chunk(number, str(number)))
    follower.mark_pending("a:0:0")
    found, skipped = follower.read("a:0:0", 10_000)
    assert (texts(found), skipped) == (["8", "9", "10"], 7)


def test_who_is_behind_takes_turns() -> None:
    log_cache = LogCache()
    follower = LogCursor(log_cache)
    for number in range(3):
        log_cache.add("noisy:0:0", chunk(number, "x"))
    log_cache.add("calm:0:0", chunk(0, "y"))
    follower.mark_pending("noisy:0:0")
    follower.mark_pending("calm:0:0")
    follower.read("noisy:0:0", 1)
    assert list(follower.pending) == ["calm:0:0", "noisy:0:0"]


def test_the_attempt_that_is_quiet_longest_makes_room() -> None:
    log_cache = LogCache(cache_limit_bytes=3 * COST)
    log_cache.add("quiet:0:0", chunk(0, "hush"))
    log_cache.add("loud:0:0", chunk(0, "x"))
    assert log_cache.ring("quiet:0:0") is None
    assert log_cache.ring("loud:0:0") is not None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans(), st.booleans()), max_size=60))
def test_lines_read_and_lines_skipped_add_up_to_all_that_was_printed(
    script: list[tuple[int, int, bool, bool]],
) -> None:
    log_cache = LogCache(ring_limit_bytes=1200, cache_limit_bytes=1_000_000)
    follower = LogCursor(log_cache)
    printed, heard, pushed = (dict.fromkeys(range(3), 0) for _ in range(3))

    def read(which: int) -> None:
        found, skipped = follower.read(f"j:0:{which}", 100)
        heard[which] += skipped + len(texts(found))

    for which, count, is_pushed, reads in script:
        first = printed[which]
        printed[which] += count
        if is_pushed:
            log_cache.add(f"j:0:{which}", chunk(first, *["x"] * count))
            follower.mark_pending(f"j:0:{which}")
            pushed[which] = printed[which]
        if reads:
            read(which)
    for which in range(3):
        while f"j:0:{which}" in follower.pending:
            read(which)
    assert heard == pushed
