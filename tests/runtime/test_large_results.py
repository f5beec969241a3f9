"""Results and errors over 8 MiB: through a storage, or a clear error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, InvalidRequest, JobRequest, ResourceConfig
from fray.model.specs import BLOB_LIMIT_BYTES
from tests.support import job_functions

SMALL = ResourceConfig.with_cpu(cpu=0.5, memory="100MB")
LARGE = BLOB_LIMIT_BYTES + 1


class Huge(Exception):
    pass


def fail_hugely(size_bytes: int) -> None:
    raise Huge("x" * size_bytes)


async def big_later(size_bytes: int) -> bytes:
    await trio.lowlevel.checkpoint()
    return b"y" * size_bytes


@pytest.fixture(params=["local", "machine?nodes=1&cpu=2"])
async def cluster(request: Any) -> AsyncIterator[fray.Cluster]:
    async with fray.open_cluster(request.param, logs=False) as cluster:
        yield cluster


def job(fn: Any, *args: Any, storage: str | None = None) -> JobRequest:
    entrypoint = Entrypoint.from_callable(fn, args)
    return JobRequest(name="big", entrypoint=entrypoint, resources=SMALL, result_storage=storage)


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


async def test_a_large_result_goes_through_the_storage_and_only_a_large_one(
    cluster: fray.Cluster, tmp_path: Path
) -> None:
    storage = f"file://{tmp_path}/results"
    small = await cluster.launch(job(job_functions.big, 10, storage=storage))
    assert len(await small) == 10
    assert files_in(tmp_path) == []
    for fn in (job_functions.big, big_later):
        large = await cluster.launch(job(fn, LARGE, storage=storage))
        assert len(await large) == LARGE
        assert len(large.result()) == LARGE
        assert large.info.value is None
        assert large.info.stored is not None
        assert large.info.stored.location == f"{storage}/{cluster.namespace}/{large.id}/0-0.pickle"
    assert len(files_in(tmp_path / "results")) == 2  # they are the user's, and stay


async def test_a_large_result_that_was_changed_or_is_gone_is_no_result(cluster: fray.Cluster, tmp_path: Path) -> None:
    large = await cluster.launch(job(job_functions.big, LARGE, storage=f"file://{tmp_path}"))
    await large.wait_ended()
    (file,) = files_in(tmp_path)
    content = file.read_bytes()
    file.write_bytes(b"z" + content[1:])
    with pytest.raises(fray.FrayError, match="is not what the job wrote"):
        await large
    file.unlink()
    with pytest.raises(fray.FrayError, match=r"8,388,\d+ bytes at file://.* cannot be read here"):
        await large
    file.write_bytes(content)
    assert len(await large) == LARGE


async def test_without_a_storage_the_controller_keeps_it(cluster: fray.Cluster) -> None:
    large = await cluster.launch(job(job_functions.big, LARGE))
    assert len(await large) == LARGE
    found = await cluster.get_job(large.name)
    assert len(await found) == LARGE
    with pytest.raises(fray.FrayError, match="write `await job`"):
        found.result()
    assert len(await trio.to_thread.run_sync(found.result)) == LARGE


async def test_a_storage_that_cannot_be_written_is_the_jobs_error(cluster: fray.Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    large = await cluster.launch(job(job_functions.big, LARGE, storage=f"file://{tmp_path}/file"))
    with pytest.raises(fray.FrayError, match=r"result of job 'big' .* cannot be written to file://"):
        await large


async def test_an_error_too_large_to_travel_comes_by_the_storage_or_in_short(
    cluster: fray.Cluster, tmp_path: Path
) -> None:
    stored = await cluster.launch(job(fail_hugely, LARGE, storage=f"file://{tmp_path}"))
    with pytest.raises(Huge) as whole:
        await stored
    assert len(str(whole.value)) == LARGE
    short = await cluster.launch(job(fail_hugely, LARGE))
    with pytest.raises(fray.RemoteError, match=r"the callee raised .*test_large_results\.Huge: xxx") as cut:
        await short
    assert len(str(cut.value)) < 100_000
    assert "result_storage=" in str(cut.value)
    assert "fail_hugely" in cut.value.__cause__.text
    assert len(short.info.error_message or "") < 100_000


async def test_a_scope_gets_the_whole_error_too(tmp_path: Path) -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        with pytest.raises(ExceptionGroup) as caught:
            async with cluster.open_scope("run") as scope:
                await scope.launch(job(fail_hugely, LARGE, storage=f"file://{tmp_path}"))
    assert isinstance(caught.value.exceptions[0], Huge)


@pytest.mark.parametrize("where", ["", "results", "./results", 5])
def test_a_storage_must_mean_the_same_on_every_machine(where: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"result_storage=.*must be an address"):
        job(job_functions.big, 1, storage=where)
