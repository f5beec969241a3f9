"""Objects that are put by `fray` and `fray.blocking`: shared memory, in-place publishing, release, owners, hosts."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio

import fray
import fray.blocking
from fray.net.buffers.shared_memory import SegmentPool, known_pool, sweep
from fray.runtime.objects.references import references_of
from fray.runtime.runtime import current

MB = 1 << 20


@pytest.fixture
async def cluster() -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
            yield cluster


def file_of(array: Any) -> tuple[int, str]:
    """Return inode and path of the file in which an array lies."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return int(line.split()[4]), line.split()[-1]
    return 0, ""


def exists(path: str) -> bool:
    return os.path.exists(path)


class Reader:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def read(self, ref: fray.ObjectRef) -> tuple[int, bool, float]:
        array = await ref
        self.kept.append(array)
        return file_of(array)[0], array.flags.writeable, float(array[-1])

    async def put(self, size: int) -> fray.ObjectRef:
        return await fray.put(numpy.ones(size))

    async def pid(self) -> int:
        return os.getpid()

    async def lends(self) -> bool:
        """Return whether this process has an object in a segment of its own."""
        pool = known_pool()
        return pool is not None and pool.used > 0

    async def wait_until_dropped(self) -> None:
        """Wait until this process has no copies for its host."""
        copies = references_of(current())._copies
        assert copies is not None
        while copies._copies:  # noqa: ASYNC110
            await trio.sleep(0.01)


class FarReader(Reader):
    """Reader that shares no segments with processes outside, as on another host."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        os.environ["FRAY_SEGMENT_DIRECTORY"] = directory


class SyncReader:
    def read(self, ref: fray.blocking.ObjectRef) -> tuple[int, float]:
        array = ref.get()
        return file_of(array)[0], float(array[-1])


async def test_processes_of_one_host_map_the_memory_that_the_publisher_has_filled(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        readers = [await scope.create_actor(Reader) for _ in range(2)]
        weights = numpy.frombuffer(await fray.allocate(8 * MB), "f8")
        weights[:] = 7
        inode = file_of(weights)[0]
        async with await fray.put(weights) as ref:
            found = [await reader.read(ref) for reader in readers]
            assert found == [(inode, False, 7.0)] * 2
            mine = await ref
            assert (file_of(mine)[0], mine.flags.writeable) == (inode, False)
        copied = await fray.put(weights)
        assert file_of(await copied)[0] not in (0, inode), "put again, it is another object, and so a copy"


async def test_a_released_object_is_lost_everywhere_and_what_was_read_stays(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        reader = await scope.create_actor(Reader)
        ref = await fray.put(numpy.ones(MB))
        mine = await ref
        assert (await reader.read(ref))[2] == 1
        await ref.release()
        await ref.release()
        for read in (reader.read, lambda ref: ref._value()):
            with pytest.raises(fray.ObjectLost, match="it or all its references were released"):
                await read(ref)
        assert mine.sum() == MB
        theirs = await reader.put(MB)
        assert (await theirs).sum() == MB
        await theirs.release()
        with pytest.raises(fray.ObjectLost):
            await theirs


async def test_with_its_owner_an_object_is_lost_and_no_segment_stays(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        owner = await scope.create_actor(Reader, on_failure="absorb")
        ref = await owner.put(MB)
        array = await ref
        path = file_of(array)[1]
        assert exists(path)
        os.kill(await owner.pid(), 9)
        with pytest.raises(fray.ObjectLost, match="the job or driver that owned it has ended"):
            while True:
                await ref
        while exists(os.path.dirname(path)):  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert array.sum() == MB


async def test_a_reader_that_is_killed_while_it_maps_an_object_leaves_nothing(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        reader = await scope.create_actor(Reader, on_failure="absorb")
        ref = await fray.put(numpy.ones(MB))
        path = file_of(await ref)[1]
        await reader.read(ref)
        os.kill(await reader.pid(), 9)
        with pytest.raises(fray.ActorDied):
            while True:
                await reader.pid()
        assert (await ref).sum() == MB
        del ref
        # The segment is removed with the object, or stays in the pool of this process for other objects.
        pool = known_pool()
        assert pool is not None
        while pool.used:  # noqa: ASYNC110
            await trio.sleep(0.01)
        pool.trim(all_free=True)
        assert not exists(path)


@pytest.fixture
def other_host() -> Iterator[str]:
    """Return a directory for the segments of processes that are as on another host."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory
        # The directory of a killed process is removed by the next that looks; there is none of a process that lives.
        sweep((directory,))
        assert not os.listdir(directory)


async def test_another_host_receives_an_object_once_and_again_when_the_process_that_has_it_was_killed(
    other_host: str, cluster: fray.Cluster
) -> None:
    async with cluster.open_scope("run") as scope:
        readers = [await scope.create_actor(FarReader, other_host, on_failure="absorb") for _ in range(3)]
        ref = await fray.put(numpy.ones(MB))
        inodes = {}

        async def read(reader: Any) -> None:
            inodes[reader], is_writable, last = await reader.read(ref)
            assert (is_writable, last) == (False, 1.0)

        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(read, reader)
        assert len(set(inodes.values())) == 1, "all map one segment"
        assert file_of(await ref)[0] not in inodes.values()
        stats = await ref.stats()
        assert (stats.copies, stats.transfers, stats.size_bytes > 8 * MB) == (1, 1, True)

        owners = [reader for reader in readers if await reader.lends()]
        assert len(owners) == 1
        os.kill(await owners[0].pid(), 9)
        rest = [reader for reader in readers if reader is not owners[0]]
        await read(rest[0])
        await read(rest[1])
        assert inodes[rest[0]] == inodes[rest[1]]
        assert (await ref.stats()).transfers == 2
        await ref.release()
        with pytest.raises(fray.ObjectLost):
            await rest[0].read(ref)
        await rest[0].wait_until_dropped()


def test_sync_code_puts_and_reads_by_the_same_code() -> None:
    with fray.blocking.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
        reader = cluster.create_actor(SyncReader)
        weights = numpy.frombuffer(fray.blocking.allocate(8 * MB), "f8")
        weights[:] = 3
        inode = file_of(weights)[0]
        with fray.blocking.put(weights) as ref:
            assert reader.read(ref) == (inode, 3.0)
            assert ref.get(timeout=10)[0] == 3
        with pytest.raises(fray.ObjectLost):
            ref.get()


async def test_values_of_any_kind_are_put_in_one_process() -> None:
    async with fray.open_cluster("local", logs=False):
        for value in (b"x" * MB, {"a": [1, 2]}, None):
            assert await (await fray.put(value)) == value
        read = await (await fray.put(memoryview(b"abc")))
        assert (bytes(read), read.readonly) == (b"abc", True)
        ref = await fray.put(5)
        assert pickle.loads(pickle.dumps(ref)) == ref
        with pytest.raises(fray.InvalidRequest, match="at least 1"):
            await fray.allocate(0)


async def test_memory_that_is_not_free_is_refused_with_the_limit() -> None:
    with pytest.raises(MemoryError, match=r"limit of this process: [\d,]+ bytes, [\d,]+ in use"):
        await fray.allocate(1 << 50)


def test_allocated_memory_is_free_again_when_it_is_neither_put_nor_used() -> None:
    pool = SegmentPool(64 * MB)
    try:
        view = pool.allocate(MB)
        assert view is not None
        assert pool.used == 1
        del view
        assert (pool.used, len(pool._unsealed)) == (0, 0)
    finally:
        pool.close()


def test_without_a_cluster_nothing_can_be_put() -> None:
    with pytest.raises(fray.FrayError, match="no cluster here"):
        trio.run(fray.put, 1)
