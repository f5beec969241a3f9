"""Large payloads and results as files of a node, and how much of a result a shim accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fray.controller.workspaces.bundles import BundleStore
from fray.controller.workspaces.chunks import ChunkDict
from fray.errors import InvalidRequest, StoreError
from fray.model.messages import large_values
from fray.model.specs import BLOB_LIMIT_BYTES, EndReason, Outcome
from fray.net.codec import to_json
from fray.net.large_values import download_to_memory
from fray.node.attempts.values import fetch_to_file, send_from_file
from fray.node.job_process import outcome_file
from fray.node.job_process.outcome_file import OutcomeReader, load, save

SUCCEEDED = Outcome(cause=EndReason.SUCCEEDED, exit_code=0)


def controller() -> Any:
    """Return a function that answers requests of a node from a real store."""
    store = BundleStore(ChunkDict(), set)

    async def request(message: object, blobs: Any = (), /) -> Any:
        return await store.answer(message, blobs)

    return request


def read_record(directory: Path, announced: int, content: bytes) -> Outcome | None:
    reader = OutcomeReader(directory)
    record = to_json(Outcome(cause=EndReason.SUCCEEDED, exit_code=0, value_bytes=announced)).encode() + b"\n" + content
    for at in range(0, len(record), 1 << 20):
        reader.feed(record[at : at + (1 << 20)])
    return reader.close()


async def test_a_result_goes_from_one_file_to_another(tmp_path: Path) -> None:
    size = BLOB_LIMIT_BYTES + 5
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    ended = read_record(tmp_path, size, content)
    assert ended is not None
    assert (ended.value, ended.value_bytes) == (None, size)
    save(tmp_path, ended)
    found = load(tmp_path)
    assert found is not None
    outcome, path = found
    assert isinstance(path, Path)
    request = controller()
    sent = await send_from_file(request, outcome, path)
    assert (sent.cause, sent.value_bytes) == (EndReason.SUCCEEDED, size)
    assert await download_to_memory(request, sent.value or "") == content
    await fetch_to_file(request, sent.value or "", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize("missing", [1, 4_000_000])
def test_a_result_that_was_cut_off_is_none(tmp_path: Path, missing: int) -> None:
    size = BLOB_LIMIT_BYTES + 5
    assert read_record(tmp_path, size, bytes(size - missing)) is None


@pytest.mark.parametrize("announced", [0, 10_000_000])
def test_one_byte_past_the_limit_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: int) -> None:
    monkeypatch.setattr(outcome_file, "SIZE_LIMIT_BYTES", 9_000_000)
    limit = 9_000_000 if announced else BLOB_LIMIT_BYTES
    ended = read_record(tmp_path, announced, bytes(limit + 1))
    assert ended is not None
    assert (ended.cause, ended.message) == (
        EndReason.FAILURE,
        f"the job wrote a result of {limit + 1:,} bytes and the limit is {limit:,}",
    )
    assert (tmp_path / "value").stat().st_size <= limit


async def test_what_cannot_be_fetched_leaves_no_file_and_what_cannot_be_sent_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not stored"):
        await fetch_to_file(controller(), large_values.value_name(1, ["a" * 64]), str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()

    async def full(message: object, blobs: Any = (), /) -> Any:
        raise StoreError("the controller's disk has 1 MB free")

    (tmp_path / "value").write_bytes(b"12345")
    sent = await send_from_file(full, Outcome(cause=EndReason.SUCCEEDED, value_bytes=5), tmp_path / "value")
    assert sent.cause is EndReason.FAILURE
    assert sent.message == (
        "the job ended, but its result of 5 bytes could not be sent: the controller's disk has 1 MB free"
    )
    assert sent.value is None
