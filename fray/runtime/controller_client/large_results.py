"""Results and errors of jobs that are too large for messages: written to storage by the job, read back by waiters.

Invariant: the job's record has location, size and hash, once everything is written, so a reader gets exactly what
the job wrote, or an error. The files belong to the user: Fray does not delete them.
"""

from __future__ import annotations

import trio
from attrs import evolve

from fray.errors import FrayError, MessageTooLarge
from fray.model.ids import split_attempt
from fray.model.specs import BLOB_LIMIT_BYTES, AttemptSpec, EndReason, Outcome, StoredResult
from fray.net import storage
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.serialization import errors, pickling

TEXT_LIMIT_CHARS = 32_000
"""Characters of the traceback that are sent in place of an error that is too large."""


def write_result(attempt_spec: AttemptSpec, outcome: Outcome, value: bytes) -> tuple[Outcome, bytes | None]:
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
        return outcome, errors.dump_truncated_error(value, TEXT_LIMIT_CHARS, str(error))


def _store(attempt_spec: AttemptSpec, outcome: Outcome, value: bytes) -> Outcome:
    spec, size = attempt_spec.spec, len(value)
    what = f"the {'result' if outcome.cause is EndReason.SUCCEEDED else 'error'} of job {spec.name!r}"
    if not spec.result_storage:
        raise MessageTooLarge(
            f"{what} has {size:,} bytes pickled; at most {BLOB_LIMIT_BYTES:,} can be sent: pass "
            "JobRequest(result_storage='file:///shared/dir' or 'gs://bucket/dir'), or write it to storage and return "
            "its path",
            size_bytes=size,
            limit_bytes=BLOB_LIMIT_BYTES,
        )
    job_id, generation, member = split_attempt(attempt_spec.attempt_id)
    # Generation and member are in the name, so a retried attempt never overwrites what another one wrote.
    location = f"{spec.result_storage.rstrip('/')}/{spec.namespace}/{job_id}/{generation}-{member}.pickle"
    try:
        storage.write_now(location, value)
    except Exception as error:
        raise FrayError(f"{what} ({size:,} bytes) cannot be written to {location}: {error!r}") from error
    return evolve(outcome, stored=StoredResult(location=location, sha256=pickling.blob_name(value), size_bytes=size))


# Reading -------------------------------------------------------------------------------------------------------------


async def fetch(record: JobRecord) -> None:
    """Load the value of an ended job into its record if it is in storage.

    Raises:
        FrayError: it cannot be read, or is not what the job wrote.
    """
    if record.value is None and record.info.stored is not None:
        record.value = await trio.to_thread.run_sync(read_now, record)


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
