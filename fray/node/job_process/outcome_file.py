"""Outcome of an attempt: the record that a job writes of its own end, and the file its shim writes.

On the job's descriptor: ``to_json(outcome)``, a newline, then the bytes of the value if there is one. An outcome that
names its value (SHA-256 of the bytes) or, for a large one, its size, counts only when the bytes are complete: a job
killed half-way through a result has none. In the attempt's directory: ``value``, and ``outcome.json``, which appears
whole or not at all. A large value stays in its file until the node has sent it.

The files are written but not synced: they have to outlive processes, and do so in the kernel's memory; a machine that
fails takes its attempts with it anyway. If the disk is full, the outcome is sent over the shim's socket instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from attrs import define, evolve, field

from fray.errors import FrayError
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.model.specs import BLOB_LIMIT_BYTES, EndReason, Outcome
from fray.net.atomic_file import write_atomically
from fray.net.codec import from_json, to_json

HEADER_LIMIT_BYTES = 1024 * 1024
"""Size of the first line at most: a message with a long traceback fits."""
_OUTCOME = "outcome.json"
_VALUE = "value"


@define
class OutcomeReader:
    """Reader of a record as its bytes arrive; the value goes to disk, never whole into memory."""

    directory: Path
    header: Outcome | None = None
    broken: bool = False
    write_error: str = ""
    """Reason why the value could not be written; empty: none."""
    _line: bytes = b""
    _size: int = 0
    _hash: hashlib._Hash = field(factory=hashlib.sha256)
    _file: int = field(default=-1, alias="_file")

    def feed(self, data: bytes) -> None:
        if self.broken:
            return
        if self.header is None:
            data = self._feed_header(data)
        if data and self.header is not None:
            self._feed_value(data)

    def _feed_header(self, data: bytes) -> bytes:
        self._line += data
        line, newline, rest = self._line.partition(b"\n")
        if newline:
            try:
                self.header = from_json(Outcome, line.decode())
            except (FrayError, ValueError):
                self.broken = True
        elif len(line) > HEADER_LIMIT_BYTES:
            self.broken = True
        return rest

    def _feed_value(self, data: bytes) -> None:
        self._size += len(data)
        # Read on without writing, so that the job is not blocked in its write and the message can name the full size.
        if self._size > self._limit_bytes or self.write_error:
            return
        try:
            self._write_value(data)
        except OSError as error:
            self.write_error = str(error.strerror)

    @property
    def _limit_bytes(self) -> int:
        """Limit of what is written: a job that announces no size has no more than a message carries."""
        announced = self.header.value_bytes if self.header is not None else 0
        return SIZE_LIMIT_BYTES if announced else BLOB_LIMIT_BYTES

    def _write_value(self, data: bytes) -> None:
        if self._file < 0:
            self._file = os.open(self.directory / _VALUE, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        if self.header is not None and not self.header.value_bytes:
            self._hash.update(data)
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> Outcome | None:
        """Return the outcome, with the hash of its value; None if the job wrote none, or not all of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.header is None:
            return None
        if self._size > self._limit_bytes:
            return _too_large(self._size, self._limit_bytes)
        if self.write_error:
            return _not_stored_outcome(self._size, self.write_error)
        if self.header.value_bytes:
            # The node names it when it has read it in parts.
            return evolve(self.header, value=None) if self._size == self.header.value_bytes else None
        blob = self._hash.hexdigest() if self._size else None
        # A job that is killed while it writes its result has not succeeded, although its header says so.
        whole = self.header.value in (None, blob)
        return evolve(self.header, value=blob) if whole else None


def _too_large(size: int, limit: int) -> Outcome:
    # Only of a job that does not use Fray's own code to write its record, which checks this before.
    message = f"the job wrote a result of {size:,} bytes and the limit is {limit:,}"
    return Outcome(cause=EndReason.FAILURE, message=message)


def _not_stored_outcome(size: int, why: str) -> Outcome:
    message = f"the job ended, but its result of {size} bytes could not be stored: {why}"
    return Outcome(cause=EndReason.ENVIRONMENT, message=message, machine_fault=True)


def save(directory: Path, outcome: Outcome) -> None:
    """Write the outcome into the directory, whole or not at all."""
    write_atomically(directory / _OUTCOME, to_json(outcome).encode())


def load(directory: Path, text: str | None = None) -> tuple[Outcome, bytes | Path | None] | None:
    """Return what `save` and `OutcomeReader` wrote, a large value as its path; None if the shim did not get so far.

    Args:
        text: the outcome, from a shim that could not `save` it.
    """
    try:
        outcome = from_json(Outcome, text or (directory / _OUTCOME).read_text())
    except FileNotFoundError:
        return None
    value: bytes | Path | None = None
    if outcome.value_bytes:
        value = directory / _VALUE
    elif outcome.value is not None:
        with contextlib.suppress(FileNotFoundError):
            value = (directory / _VALUE).read_bytes()
    return outcome, value
