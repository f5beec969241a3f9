"""Large payloads and results: sent in parts, stored by the controller, removed when nothing names them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleRetention, BundleStore
from fray.controller.workspaces.chunks import ChunkDirectory
from fray.errors import InvalidRequest, MessageTooLarge
from fray.model.messages import large_values as messages
from fray.model.messages.bundles import FetchValue, OfferValue
from fray.model.messages.client import Launch
from fray.model.messages.large_values import PART_BYTES, SIZE_LIMIT_BYTES, check_parts, check_size, value_name
from fray.model.specs import EndReason, Outcome
from fray.net import large_values
from fray.net.large_values import PartList, download_to_memory, list_parts, upload
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.controller import Peer, spec, stage

SMALL_PART = 1_000


def parts_of(content: bytes) -> PartList:
    size = large_values.PART_BYTES
    return list_parts(len(content), [content[at : at + size] for at in range(0, len(content), size)])


async def send(peer: Any, content: bytes) -> str:
    """Upload a value; return its name."""
    value = parts_of(content)

    async def read(at: int, size: int) -> bytes:
        return content[at : at + size]

    await upload(peer.ask_blobs, value, read)
    return value.name


# The limit -----------------------------------------------------------------------------------------------------------


def test_one_byte_past_the_limit_says_what_to_do_instead() -> None:
    check_size(SIZE_LIMIT_BYTES, "the call of a.f()")
    with pytest.raises(MessageTooLarge) as caught:
        check_size(SIZE_LIMIT_BYTES + 1, "the call of a.f()")
    assert str(caught.value) == (
        "the call of a.f(): 4,294,967,297 bytes pickled exceed the limit of 4,294,967,296: "
        "write the data to storage and send the path, or split it"
    )
    assert caught.value.details["limit_bytes"] == SIZE_LIMIT_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "count", "said"),
    [
        (PART_BYTES, 1, None),
        (PART_BYTES + 1, 2, None),
        (PART_BYTES + 1, 1, "in parts of"),
        (0, 0, "in parts of"),
        (SIZE_LIMIT_BYTES, SIZE_LIMIT_BYTES // PART_BYTES, None),
        (SIZE_LIMIT_BYTES + 1, SIZE_LIMIT_BYTES // PART_BYTES + 1, "in parts of"),
    ],
)
def test_a_list_of_parts_is_checked_before_anything_is_allocated(size_bytes: int, count: int, said: str | None) -> None:
    parts = ["a" * 64] * count
    name = value_name(size_bytes, parts)
    if said is None:
        check_parts(name, size_bytes, parts)
        with pytest.raises(InvalidRequest, match="not the parts"):
            check_parts("b" * 64, size_bytes, parts)
    else:
        with pytest.raises(InvalidRequest, match=said):
            check_parts(name, size_bytes, parts)


# Transfer with losses ------------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 12 * SMALL_PART),
    is_uniform=st.booleans(),
    losses=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["drop", "restart", "lose chunks"])), max_size=4),
)
def test_a_value_arrives_whole_whatever_is_lost_on_the_way(
    size: int, is_uniform: bool, losses: list[tuple[int, str]]
) -> None:
    content = bytes(size) if is_uniform else os.urandom(size)
    plan = dict(losses)

    async def main() -> None:
        store = Store.memory()
        async with stage(store) as cluster:
            driver, node = await cluster.client(), await cluster.node()
            count, put, one_at_a_time = 0, [], trio.Lock()

            async def interfere() -> None:
                nonlocal count
                count += 1
                what = plan.pop(count, "")
                if what == "drop":
                    cluster.network.drop("controller")
                elif what:
                    # Requests are under way side by side, and there is one controller to restart.
                    async with one_at_a_time:
                        await restart(what)

            async def restart(what: str) -> None:
                await cluster.crash()
                if what == "lose chunks":
                    # An upload that the controller has not completed may have gone with its disk's cache.
                    complete = set(store.chunks.bundles())
                    if not complete:
                        store.chunks.drop(list(store.chunks.ages()))
                await cluster.start()

            def meddled(peer: Peer) -> Any:
                async def ask(message: object, blobs: Any = (), /) -> Any:
                    await interfere()
                    if blobs:
                        put.append(message)
                    return await peer.ask_blobs(message, blobs)

                return ask

            async def read(at: int, length: int) -> bytes:
                return content[at : at + length]

            value = parts_of(content)
            await upload(meddled(driver), value, read)
            assert await download_to_memory(meddled(node), value.name) == content
            # Equal parts are sent once, and none again once the value is complete.
            if not losses:
                assert len(put) == len(set(value.parts))
            sent = len(put)
            await upload(driver.ask_blobs, value, read)
            assert len(put) == sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "PART_BYTES", SMALL_PART)
        patch.setattr(large_values, "PART_BYTES", SMALL_PART)
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_value_with_a_damaged_part_is_refused(autojump_clock: Any) -> None:
    store = Store.memory()
    async with stage(store) as cluster:
        driver = await cluster.client()
        name = await send(driver, b"x" * 3 * PART_BYTES)
        store.chunks.drop(list(store.chunks.ages()))
        with pytest.raises(InvalidRequest, match="damaged or missing"):
            await download_to_memory(driver.ask_blobs, name)
        with pytest.raises(InvalidRequest, match="not stored"):
            await download_to_memory(driver.ask_blobs, name)
        assert await send(driver, b"x" * 3 * PART_BYTES) == name  # asked for again
        assert await download_to_memory(driver.ask_blobs, name) == b"x" * 3 * PART_BYTES


async def test_an_offer_of_other_parts_is_refused(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        with pytest.raises(InvalidRequest, match="not the parts of the value"):
            await driver.ask(OfferValue(value="b" * 64, size_bytes=5, parts=("a" * 64,)))


# Jobs ----------------------------------------------------------------------------------------------------------------


async def test_a_job_is_launched_and_ends_with_large_values_that_go_with_it(autojump_clock: Any) -> None:
    size = 2 * PART_BYTES
    async with stage(rules=SchedulerConfig(results_limit_bytes=size)) as cluster:
        driver, node = await cluster.client(), await cluster.node()
        payload = await send(driver, b"p" * size)
        with pytest.raises(InvalidRequest, match="is not attached"):
            await driver.ask(Launch(jobs=(evolve(spec(), payload="c" * 64),)))
        (info,) = (await driver.ask(Launch(jobs=(evolve(spec(), payload=payload),)))).jobs
        desired = await node.wait_desired(f"{info.job_id}:0:0")
        assert node.payloads == {}
        assert await download_to_memory(node.ask_blobs, desired.spec.payload or "") == b"p" * size
        result = await send(node, b"r" * size)
        outcome = Outcome(cause=EndReason.SUCCEEDED, exit_code=0, value=result, value_bytes=size)
        node.end(f"{info.job_id}:0:0", outcome)
        ended, blobs = await driver.job_ended(info.job_id)
        assert (ended.value, blobs) == (result, [])
        assert await download_to_memory(driver.ask_blobs, result) == b"r" * size
        # The payload goes with the job's end, the result when another one needs its place.
        await trio.sleep(200)
        with pytest.raises(InvalidRequest, match="not stored"):
            await driver.ask(FetchValue(value=payload))
        (other,) = await driver.launch(spec("other"))
        await node.wait_desired(f"{other.job_id}:0:0")
        node.succeed(f"{other.job_id}:0:0")
        await driver.job_ended(other.job_id)
        await trio.sleep(200)
        with pytest.raises(InvalidRequest, match="not stored"):
            await driver.ask(FetchValue(value=result))


async def test_a_value_that_no_job_ever_named_goes_after_an_hour(tmp_path: Path) -> None:
    chunks, needed = ChunkDirectory(tmp_path), set[str]()
    store = BundleStore(chunks, lambda: needed, BundleRetention(limit_bytes=1))

    async def ask(message: object, blobs: Any = (), /) -> Any:
        return await store.answer(message, blobs)

    class Asker:
        ask_blobs = staticmethod(ask)

    kept, dropped = await send(Asker, b"k" * 10), await send(Asker, b"d" * 10)
    needed.add(kept)
    assert await store.sweep() == 0
    for name in (kept, dropped):
        os.utime(tmp_path / "complete" / name, (0, 0))
    assert await store.sweep() == 1
    assert (store.has(kept), store.has(dropped)) == (True, False)
    assert len(chunks.ages()) == 1
    # Another controller on the same directory finds it.
    assert BundleStore(ChunkDirectory(tmp_path), set).has(kept)
    store.release(kept)
    assert await store.sweep() == 0, "a row names it"
    needed.clear()
    await send(Asker, b"k" * 10)
    assert await store.sweep() == 0, "offered just now"
    store._offered.clear()
    assert await store.sweep() == 1
