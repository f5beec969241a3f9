"""Payloads and results of jobs that are too large for messages.

They are stored by the controller, in parts (`fray.net.large_values`), for as long as it keeps the job's record. A job
with a ``result_storage`` writes large results and errors there. Invariant: the job's record has location, size and hash
once everything is written, so a reader gets exactly what the job wrote, or an error. Files in a ``result_storage``
belong to the user: Fray does not delete them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio
from attrs import evolve

from fray.errors import FrayError, InvalidRequest, MessageTooLarge
from fray.model.ids import split_attempt
from fray.model.messages.large_values import check_size
from fray.model.specs import BLOB_LIMIT_BYTES, AttemptSpec, EndReason, JobState, Outcome, StoredResult
from fray.net import large_values, storage
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.values import LargeValue, Value, loads_value

TEXT_LIMIT_CHARS = 32_000
"""Characters of the traceback that are sent in place of an error that is too large."""


async def upload_payloads(client: ControllerClient, payloads: Sequence[Value]) -> list[bytes]:
    """Upload the large payloads of a launch; return the others, which are attached to it.

    Raises:
        StoreError: the controller has no room.
        FrayError: the session has ended.
    """
    attached = []
    for payload in payloads:
        if isinstance(payload, LargeValue):
            await large_values.upload(client.request_blobs, payload.parts, _reader(payload))
        else:
            attached.append(payload)
    return attached


def _reader(payload: LargeValue) -> large_values.ReadPart:
    async def read(at: int, size: int) -> bytes:
        return payload.read(at, size)

    return read


# In the job's process ------------------------------------------------------------------------------------------------


def write_result(attempt_spec: AttemptSpec, outcome: Outcome, value: Value) -> tuple[Outcome, bytes | None]:
    """Write a value that is too large to send; return the outcome and value to send instead. Blocks; never raises."""
    try:
        return _store(attempt_spec, outcome, value), None
    except Exception as error:  # noqa: BLE001 - storages raise any exception, and it becomes the job's error
        # A result that cannot be delivered is a failure; an error that cannot be delivered is still that error,
        # shortened.
        if outcome.cause is EndReason.SUCCEEDED:
            message = f"{type(error).__name__}: {error}"
            failed = Outcome(cause=EndReason.FAILURE, exit_code=1, raised=True, message=message)
            return failed, errors.dump_error(error)
        return outcome, errors.dump_truncated_error(_bytes_of(value), TEXT_LIMIT_CHARS, str(error))


def _bytes_of(value: Value) -> bytes:
    return bytes(value.join()) if isinstance(value, LargeValue) else value


def _store(attempt_spec: AttemptSpec, outcome: Outcome, value: Value) -> Outcome:
    spec, size = attempt_spec.spec, len(value)
    what = f"the {'result' if outcome.cause is EndReason.SUCCEEDED else 'error'} of job {spec.name!r}"
    if not spec.result_storage:
        check_size(size, what)
        # An error: it is stored with the job's record, and sent to every waiter.
        raise MessageTooLarge(
            f"{what}: {size:,} bytes pickled exceed the limit of an error, {BLOB_LIMIT_BYTES:,}: pass "
            "JobRequest(result_storage='file:///shared/dir' or 'gs://bucket/dir')",
            size_bytes=size,
            limit_bytes=BLOB_LIMIT_BYTES,
        )
    data = _bytes_of(value)
    job_id, generation, member = split_attempt(attempt_spec.attempt_id)
    # Generation and member are in the name, so a retried attempt never overwrites what another one wrote.
    location = f"{spec.result_storage.rstrip('/')}/{spec.namespace}/{job_id}/{generation}-{member}.pickle"
    try:
        storage.write_now(location, data)
    except Exception as error:
        raise FrayError(f"{what} ({size:,} bytes) cannot be written to {location}: {error!r}") from error
    return evolve(outcome, stored=StoredResult(location=location, sha256=pickling.blob_name(data), size_bytes=size))


# Reading -------------------------------------------------------------------------------------------------------------


def is_elsewhere(record: JobRecord) -> bool:
    """Return whether the value of an ended job has to be fetched: from storage, or from the controller."""
    return record.value is None and (record.info.stored is not None or record.info.value is not None)


async def fetch(record: JobRecord) -> None:
    """Load the value of an ended job into its record if it is in storage.

    Raises:
        FrayError: it cannot be read, or is not what the job wrote.
    """
    if record.value is None and record.info.stored is not None:
        record.value = await trio.to_thread.run_sync(read_now, record)


async def fetch_result(client: ControllerClient, record: JobRecord) -> Any:
    """Return the result of a job that has succeeded, from wherever it is. Raises FrayError: it cannot be read."""
    await fetch(record)
    value, info = record.value, record.info
    if value is None and info.value is not None and info.state is JobState.SUCCEEDED:
        try:
            # Not kept: the result is the only user of this memory, and its arrays are not copied.
            content = await large_values.download_to_memory(client.request_blobs, info.value)
        except InvalidRequest as error:
            raise FrayError(f"the result of job {info.job_id} cannot be fetched: {error}") from error
        return loads_value(content, owned=True)
    return None if value is None else loads_value(value)


def read_now(record: JobRecord) -> bytes | None:
    """Return the pickled value of an ended job; blocks if it is in storage. Raises as `fetch`."""
    stored = record.info.stored
    if record.value is not None or stored is None:
        return record.value
    what = f"the value of job {record.info.job_id} ({stored.size_bytes:,} bytes at {stored.location})"
    try:
        data = storage.read_now(stored.location)
    except Exception as error:
        raise FrayError(f"{what} cannot be read here: {error!r}", location=stored.location) from error
    # Anyone may write to the user's storage. Unpickling a changed file would run its code here.
    if len(data) != stored.size_bytes or pickling.blob_name(data) != stored.sha256:
        raise FrayError(f"{what} is not what the job wrote: the file was changed", location=stored.location)
    return data
