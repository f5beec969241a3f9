"""Objects that were put: the books, beside a twin that only counts; and the store of one process at its limits."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import MessageTooLarge, NotPicklable, ObjectLost
from fray.job import FrayContext, ObjectRef, get_default_job_ctx
from fray.model.messages import large_values
from fray.runtime.objects.refcount import EARLY_LIMIT, TRANSIT_S, ReferenceCounts
from fray.runtime.objects.store import object_store_of

# The books -----------------------------------------------------------------------------------------------------------

HOLDERS = ("a", "b", "c")


@define
class Twin:
    """Model of holders and references in transit, as an observer would write them down."""

    books: ReferenceCounts = field(factory=lambda: ReferenceCounts(limit_bytes=10))
    has: set[tuple[str, int]] = field(factory=set)
    in_transit: dict[str, int] = field(factory=dict)
    reported: set[str] = field(factory=set)
    """Tokens whose arrival came before their departure."""
    gone: set[int] = field(factory=set)
    sizes: dict[int, int] = field(factory=dict)

    def living(self) -> set[int]:
        return {number for _, number in self.has} | set(self.in_transit.values())

    def check(self, before: set[int], ended: list[int]) -> None:
        after = self.living()
        assert set(ended) == before - after
        self.gone |= set(ended)
        assert set(self.books.entries) == after
        assert self.books.memory_bytes == sum(
            self.sizes[number] for number, entry in self.books.entries.items() if entry.in_memory
        )


@given(st.data())
def test_an_object_lives_as_long_as_it_has_a_holder_or_is_in_transit(data: st.DataObject) -> None:
    twin, tokens = Twin(), iter(range(10_000))
    for step in range(data.draw(st.integers(1, 30))):
        before, ended = twin.living(), list[int]()
        word = data.draw(st.sampled_from(["put", "give", "drop", "leave", "early", "spill"]))
        known = sorted(before)
        if word == "put":
            twin.sizes[step] = data.draw(st.integers(0, 6))
            twin.books.add(step, twin.sizes[step])
            twin.books.hold(step, "a")
            twin.has.add(("a", step))
        elif word == "give" and known:  # a reference leaves; perhaps it arrives
            number, token = data.draw(st.sampled_from(known)), str(next(tokens))
            twin.books.add_token(number, token, now=0.0)
            twin.in_transit[token] = number
            if data.draw(st.booleans()):
                holder = data.draw(st.sampled_from(HOLDERS))
                assert twin.books.hold(number, holder)
                twin.has.add((holder, number))
                del twin.in_transit[token]
                ended = twin.books.remove_token(number, token)
        elif word == "early" and known:  # its arrival is heard of before its departure
            number, token = data.draw(st.sampled_from(known)), str(next(tokens))
            ended = twin.books.remove_token(number, token)
            twin.books.add_token(number, token, now=0.0)
        elif word == "drop" and twin.has:
            holder, number = data.draw(st.sampled_from(sorted(twin.has)))
            twin.has.discard((holder, number))
            ended = twin.books.release(number, holder)
        elif word == "leave":
            holder = data.draw(st.sampled_from(HOLDERS))
            twin.has = {pair for pair in twin.has if pair[0] != holder}
            ended = twin.books.remove_holder(holder)
        elif word == "spill" and (number := twin.books.next_to_spill()) is not None:
            twin.books.mark_spilled(number)
        twin.check(before, ended)
    twin.in_transit.clear()
    assert set(twin.books.expire(TRANSIT_S)) == {n for n in twin.sizes if n not in twin.gone} - twin.living()
    for holder in HOLDERS:
        twin.books.remove_holder(holder)
    assert (len(twin.books), twin.books.memory_bytes) == (0, 0)


def test_a_reference_that_is_never_unpickled_counts_for_an_hour_and_no_longer() -> None:
    books = ReferenceCounts(limit_bytes=10)
    books.add(1, 5)
    books.add_token(1, "t", now=100.0)
    assert books.expire(100.0 + TRANSIT_S - 0.001) == []
    assert books.expire(100.0 + TRANSIT_S) == [1]
    assert not books.hold(1, "late")


def test_the_least_recently_used_object_is_spilled_at_one_byte_past_the_limit() -> None:
    books = ReferenceCounts(limit_bytes=10)
    for number in (1, 2):
        books.add(number, 5)
        books.hold(number, "a")
    assert books.next_to_spill() is None
    books.touch(1)
    assert books.next_to_spill(1) == 2
    books.mark_spilled(2)
    assert (books.memory_bytes, books.next_to_spill(5), books.next_to_spill(6)) == (5, None, 1)


def test_tokens_that_are_never_reported_are_dropped_one_past_their_limit() -> None:
    books = ReferenceCounts(limit_bytes=10)
    books.add(1, 1)
    books.hold(1, "a")
    for number in range(EARLY_LIMIT + 1):
        books.remove_token(1, str(number))
    books.add_token(1, "1", now=0.0)  # known to have arrived
    assert books.release(1, "a") == [1]
    books.add(2, 1)
    books.hold(2, "a")
    books.add_token(2, "0", now=0.0)  # forgotten
    assert books.release(2, "a") == []


# One process ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctx() -> Iterator[FrayContext]:
    with FrayContext("local", num_workers=1, object_memory=1_000_000) as ctx:
        yield ctx


def until(done: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 10
    while not done():
        gc.collect()
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def kept(ctx: FrayContext) -> tuple[int, int]:
    return ctx._objects.stats()


def test_an_object_goes_with_its_last_reference_here(ctx: FrayContext) -> None:
    refs = [ctx.put(bytes(1_000)) for _ in range(3)]
    again = pickle.loads(pickle.dumps(refs[0]))
    assert again == refs[0]
    assert len({again, *refs}) == 3
    until(lambda: kept(ctx)[0] == 3)
    del refs[0]
    assert ctx.get(again) == bytes(1_000)
    until(lambda: kept(ctx)[0] == 3)
    del again
    until(lambda: kept(ctx)[0] == 2)
    refs.clear()
    until(lambda: kept(ctx) == (0, 0))


def test_arrays_of_an_object_are_read_only_and_the_owners_own_memory(ctx: FrayContext) -> None:
    array = numpy.arange(100_000)
    ref = ctx.put({"weights": array, "step": 1})
    array[0] = 7
    one, other = ctx.get(ref)["weights"], ctx.get(ref)["weights"]
    assert one[0] == 0
    assert numpy.shares_memory(one, other)
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1


def spilled(ctx: FrayContext) -> list[Path]:
    room = object_store_of(ctx.cluster._runtime)._directory
    return [] if room is None else [path for path in Path(room).iterdir() if path.name.isdigit()]


def test_objects_past_the_limit_lie_in_a_directory_that_goes_with_its_owner(ctx: FrayContext) -> None:
    halves = [ctx.put(bytes(500_000 - len(pickle.dumps(b""))))]
    until(lambda: kept(ctx)[0] == 1)
    size = kept(ctx)[1]
    object_store_of(ctx.cluster._runtime).refcounts.limit_bytes = 2 * size
    halves.append(ctx.put(ctx.get(halves[0])))
    until(lambda: kept(ctx) == (2, 2 * size))
    assert spilled(ctx) == []
    more = ctx.put(1)
    until(lambda: len(spilled(ctx)) == 1)
    assert kept(ctx)[1] < 2 * size
    assert ctx.get(halves[0]) == ctx.get(halves[1]) == bytes(len(ctx.get(halves[0])))
    assert (spilled(ctx)[0].stat().st_mode & 0o777, ctx.get(more)) == (0o600, 1)
    large = ctx.put(numpy.ones(200_000))  # larger than all of it
    assert ctx.get(large).sum() == 200_000
    assert len(spilled(ctx)) >= 3
    room = spilled(ctx)[0].parent
    del halves
    until(lambda: len(spilled(ctx)) <= 2)
    ctx.shutdown()
    until(lambda: not room.exists())


def test_a_storage_of_the_users_has_nothing_left_when_objects_are_gone(tmp_path: Path) -> None:
    for address in (f"{tmp_path}/plain", f"file://{tmp_path}/fsspec"):
        with FrayContext("local", num_workers=1, object_memory=0, object_storage=address) as ctx:
            refs = [ctx.put({"n": n, "block": bytes(100_000)}) for n in range(3)]
            until(lambda ctx=ctx: kept(ctx) == (3, 0))  # type: ignore[misc]
            files = [path for path in tmp_path.rglob("*.object") if path.is_file()]
            assert len(files) == 3
            assert [ctx.get(ref)["n"] for ref in refs] == [0, 1, 2]
            files[0].unlink()
            with pytest.raises(ObjectLost, match="cannot be read"):
                ctx.get(refs)
            refs.clear()
            until(lambda: not [path for path in tmp_path.rglob("*.object") if path.is_file()])


def test_a_storage_of_the_users_has_nothing_left_when_the_owner_has_ended(tmp_path: Path) -> None:
    for address in (f"{tmp_path}/plain", f"file://{tmp_path}/fsspec"):
        with FrayContext("local", num_workers=1, object_memory=0, object_storage=address) as ctx:
            refs = [ctx.put(bytes(100_000)) for _ in range(3)]
            until(lambda ctx=ctx: kept(ctx) == (3, 0))  # type: ignore[misc]
            refs.append(ctx.put(bytes(100_000)))  # perhaps it is still being written at the end
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        del refs


def test_an_object_that_cannot_be_put_is_refused_with_a_reason(
    ctx: FrayContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotPicklable, match="the object"):
        ctx.put(iter(int, 1).__next__ for _ in ())
    monkeypatch.setattr(large_values, "SIZE_LIMIT_BYTES", 800_000)
    assert ctx.get(ctx.put(numpy.ones(100_000))).size == 100_000
    with pytest.raises(MessageTooLarge):
        ctx.put(numpy.ones(100_001))
    until(lambda: kept(ctx) == (0, 0))
    with pytest.raises(ValueError, match="memory_limit"):
        FrayContext("local", object_memory="much")


def keep(refs: list[ObjectRef]) -> Any:
    """Task whose default context is that of the code that submitted it."""
    ctx = get_default_job_ctx()
    return ctx.get(refs[0]), ctx.put(len(refs))


def test_references_inside_arguments_results_and_closures_arrive_and_leave_nothing(ctx: FrayContext) -> None:
    ref = ctx.put("inner")
    value, made = ctx.get(ctx.run(keep, [ref, ref]))
    assert (value, ctx.get(made)) == ("inner", 2)
    assert ctx.get(ctx.run(lambda: get_default_job_ctx().get(ref))) == "inner"
    ref = made = None
    until(lambda: kept(ctx) == (0, 0))


def test_a_context_that_is_gone_takes_its_objects_along() -> None:
    with FrayContext("local", num_workers=1) as ctx:
        ref = ctx.put("x")
        assert ctx.get(ref) == "x"
    with pytest.raises(ObjectLost):
        ref.get()
