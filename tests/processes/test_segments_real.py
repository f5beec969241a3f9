"""Memory shared by processes of one host: who may read it, when it is reused, and what a killed process leaves."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
from attrs import define, evolve

from fray.errors import ActorDied
from fray.model.messages.client import ActorEndpoint
from fray.net.buffers import shared_memory
from fray.net.buffers.mapped_segments import MappedSegments, SharedMemoryOffer
from fray.net.buffers.shared_memory import SegmentPool
from fray.net.codec import from_json, to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.calls.caller import Caller

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MB = 1 << 20


@define
class Lender:
    """The actor in the other process."""

    caller: Caller
    process: subprocess.Popen[bytes]
    endpoint: ActorEndpoint

    async def call(self, method: str, *args: Any) -> Any:
        return await self.caller.route_to(self.endpoint).call(method, args)

    @property
    def shares(self) -> bool:
        binding = self.caller.route_to(self.endpoint).binding
        return binding is not None and binding.connection.transfers.shares


def start(script: str, *args: str, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


async def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return await trio.to_thread.run_sync(process.stdout.readline)


@asynccontextmanager
async def open_lender(directory: Path, wire: str = "unix", **environ: str) -> AsyncIterator[Lender]:
    process = start("buffers_host.py", str(directory), **environ)
    try:
        found = from_json(ActorEndpoint, await line_of(process))
        addresses = tuple(address for address in found.addresses if address.startswith(wire))
        caller = Caller(WebSocketNetwork(), None, session=f"tests-{random.random()}", rng=random.SystemRandom())
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(caller.run)
                yield Lender(caller, process, evolve(found, addresses=addresses))
                nursery.cancel_scope.cancel()
    finally:
        stop(process)


def exists(path: str | bytes) -> bool:
    return os.path.exists(path)


def mine() -> SegmentPool:
    pool = shared_memory.pool()
    assert pool is not None
    return pool


async def until(what: Any) -> None:
    """Poll: there is no event for another process or a garbage collector."""
    with trio.fail_after(10):
        while not await what():  # noqa: ASYNC110
            await trio.sleep(0.01)


# Sharing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["unix", "tcp"])
async def test_large_arrays_go_there_and_back_in_one_segment(wire: str, tmp_path: Path) -> None:
    async with open_lender(tmp_path, wire) as lender:
        array = numpy.arange(MB, dtype="f8")
        held_before = mine().held_bytes  # of earlier tests in this process
        for _ in range(3):
            back = await lender.call("echo", array)
            assert (back == array).all()
            back += 1
            del back
        assert lender.shares
        assert mine().held_bytes - held_before < 2 * array.nbytes
        assert mine().used == 0


async def test_the_actors_array_and_the_callers_result_are_separate(tmp_path: Path) -> None:
    async with open_lender(tmp_path) as lender:
        await lender.call("keep", numpy.ones(MB))
        first = await lender.call("get")
        await lender.call("fill", 2.0)
        second = await lender.call("get")
        assert (first[0], first[-1], second[0], second[-1]) == (1, 1, 2, 2)
        second[:] = 3
        assert await lender.call("ends") == (2, 2)


async def test_no_segment_is_reused_while_an_array_lies_in_it(tmp_path: Path) -> None:
    async with open_lender(tmp_path) as lender:
        kept = [await lender.call("echo", numpy.full(MB, float(number))) for number in range(5)]
        views = [array[::1000] for array in kept]
        del kept
        assert [view[7] for view in views] == [0, 1, 2, 3, 4]
        assert mine().used == 5
        del views
        gc.collect()
        assert mine().used == 0


async def test_lent_segments_come_back_when_the_last_array_is_gone(tmp_path: Path) -> None:
    async with open_lender(tmp_path) as lender:
        await lender.call("keep", numpy.ones(MB))
        arrays = [await lender.call("get") for _ in range(3)]
        assert (await lender.call("pool"))[2] == 3
        del arrays

        async def nothing_lent() -> bool:
            return bool((await lender.call("pool"))[2] == 0)

        await until(nothing_lent)


async def test_idle_segments_go_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine().trim(all_free=True)
    monkeypatch.setattr(shared_memory, "IDLE_S", 0.1)
    monkeypatch.setattr(mine()._allocator, "idle_s", 0.1)
    async with open_lender(tmp_path) as lender:
        await lender.call("echo", numpy.ones(MB))
        assert mine().held_bytes > 0

        async def nothing_held() -> bool:
            return mine().held_bytes == 0

        await until(nothing_held)
        assert (await lender.call("echo", numpy.ones(MB)))[5] == 1


async def test_a_process_that_wants_no_segments_gets_chunks(tmp_path: Path) -> None:
    async with open_lender(tmp_path, FRAY_SEGMENT_POOL_BYTES="0") as lender:
        array = numpy.arange(MB, dtype="f8")
        assert (await lender.call("echo", array) == array).all()
        assert not lender.shares
        assert (await lender.call("pool"))[0] == ""
        assert (await lender.call("make", 16 * MB))[-1] == 2 * MB - 1


async def test_over_the_pools_limit_chunks_carry_the_rest(tmp_path: Path) -> None:
    async with open_lender(tmp_path, FRAY_SEGMENT_POOL_BYTES=str(10 * MB)) as lender:
        await lender.call("keep", numpy.ones(MB))
        arrays = [await lender.call("get") for _ in range(3)]
        assert all(array[-1] == 1 for array in arrays)
        assert (await lender.call("pool"))[1] <= 10 * MB


# Proof ---------------------------------------------------------------------------------------------------------------


def test_the_same_host_is_proven_by_the_nonce_and_nothing_else(tmp_path: Path) -> None:
    pool = mine()
    assert MappedSegments.open(SharedMemoryOffer(pool.directory, pool.nonce)) is not None
    assert MappedSegments.open(SharedMemoryOffer(pool.directory, "0" * 32)) is None
    assert MappedSegments.open(SharedMemoryOffer(pool.directory, "")) is None
    assert (
        MappedSegments.open(SharedMemoryOffer(pool.directory.rpartition("-")[0] + "-" + "0" * 32, pool.nonce)) is None
    )


def test_nothing_outside_the_lenders_own_directory_is_ever_opened(tmp_path: Path) -> None:
    name = Path(mine().directory).name
    imitation = tmp_path / name
    imitation.mkdir(mode=0o700)
    (imitation / "nonce").write_text("abc")
    (imitation / "nonce").chmod(0o600)
    assert MappedSegments.open(SharedMemoryOffer(str(imitation), "abc")) is None
    link = Path("/dev/shm") / ("fray-" + str(os.geteuid()) + "-" + "ab" * 16)
    link.symlink_to(imitation)
    try:
        assert MappedSegments.open(SharedMemoryOffer(str(link), "abc")) is None
    finally:
        link.unlink()
    assert MappedSegments.open(SharedMemoryOffer(mine().directory + "/../" + name, mine().nonce)) is None


def test_a_segment_that_is_a_link_or_too_short_is_refused() -> None:
    pool = SegmentPool(64 * MB)
    try:
        kept = pool.store(memoryview(bytes(MB)))
        assert kept is not None
        borrowed = MappedSegments.open(SharedMemoryOffer(pool.directory, pool.nonce))
        assert borrowed is not None
        os.symlink("/etc/passwd", f"{pool.directory}/77")
        for number, size in ((77, 10), (78, 10), (kept.number, 4 * MB)):
            with pytest.raises(shared_memory.ProtocolMismatch):
                borrowed.lease(1, number, size)
        assert bytes(borrowed.lease(2, kept.number, 10)) == bytes(10)
    finally:
        pool.close()


def test_segments_are_for_this_user_alone() -> None:
    kept = mine().store(memoryview(bytes(MB)))
    assert kept is not None
    directory = mine().directory
    assert os.stat(directory).st_mode & 0o077 == 0
    assert all(os.stat(f"{directory}/{name}").st_mode & 0o077 == 0 for name in os.listdir(directory))


# Deaths --------------------------------------------------------------------------------------------------------------


async def test_segments_of_a_killed_actor_are_removed_and_arrays_here_stay(tmp_path: Path) -> None:
    async with open_lender(tmp_path) as lender:
        await lender.call("keep", numpy.arange(MB, dtype="f8"))
        array = await lender.call("get")
        directory, held, used = await lender.call("pool")
        assert used == 1
        assert held >= array.nbytes
        lender.process.kill()
        lender.process.wait()
        with pytest.raises(ActorDied):
            await lender.call("get")

        async def removed() -> bool:
            return not exists(directory)

        await until(removed)
        assert array[-1] == MB - 1
        array += 1


async def test_segments_of_a_killed_caller_are_removed_and_arrays_of_the_actor_stay(tmp_path: Path) -> None:
    async with open_lender(tmp_path) as lender:
        victim = start("buffers_caller.py")
        try:
            assert victim.stdin is not None
            victim.stdin.write(to_json(lender.endpoint).encode() + b"\n")
            victim.stdin.flush()
            directory, count = (await line_of(victim)).split()
            assert int(count) == 4_000_000
            assert exists(directory)
            assert (await lender.call("pool"))[2] == 1
            victim.kill()
            victim.wait()
        finally:
            stop(victim)
        shared_memory.sweep()
        assert not exists(directory)
        assert await lender.call("ends") == (1, 1)


def test_a_living_owners_directory_is_not_swept_and_a_dead_ones_is() -> None:
    script = (
        "import sys; from fray.net.buffers import shared_memory; pool = shared_memory.pool(); "
        "kept = pool.store(memoryview(bytes(1 << 20))); print(pool.directory, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    directory = process.stdout.readline().decode().strip()
    shared_memory.sweep()
    assert os.path.exists(directory)
    process.kill()
    process.wait()
    shared_memory.sweep()
    assert not os.path.exists(directory)
    stop(process)


def test_an_orderly_end_leaves_nothing_either() -> None:
    script = (
        "from fray.net.buffers.shared_memory import pool; "
        "p = pool(); k = p.store(memoryview(bytes(1 << 20))); print(p.directory)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not os.path.exists(found.stdout.strip())


async def test_a_driver_that_is_killed_leaves_no_segment_of_its_own_or_of_its_actors(tmp_path: Path) -> None:
    """End the controller: its nodes end with it, and sweep as their last step."""
    process = start("buffers_driver.py")
    try:
        directories = (await line_of(process)).split()
        assert len(directories) == 2
        assert all(map(exists, directories))
        process.kill()
        process.wait()

        async def removed() -> bool:
            return not any(map(exists, directories))

        await until(removed)
    finally:
        stop(process)
