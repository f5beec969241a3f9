"""Audit log: who did what to whom, from where, with what outcome. JSON lines in the controller's state directory.

Invariants: lines are only appended, and rotated by size, so that a log has at most `FILES` files of `FILE_LIMIT_BYTES`.
A line contains no payloads, variables, secrets or keys, and no control characters. What was refused to peers without a
key is limited by rate, so that strangers cannot push the other lines out.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, define, evolve, field

from fray.errors import ProtocolMismatch, StoreError
from fray.model.messages.people import AuditRecord, ReadAudit
from fray.net.codec import from_json, to_json

FILE = "audit.jsonl"
FILE_LIMIT_BYTES = 16 * 1024 * 1024
FILES = 8
"""Files that are kept: ``audit.jsonl`` is written, ``audit.1.jsonl`` is the one before it."""
TEXT_LIMIT = 500
"""Characters of one field."""
MEMORY_LIMIT = 1_000
"""Records that a controller without a state directory keeps."""
READ_LIMIT = 10_000
"""Records in one answer."""
STRANGERS_PER_MINUTE = 60
"""Refusals of peers without a key that are recorded in a minute, of all machines together."""
ORIGINS_LIMIT = 1_000
"""Machines, and keys on them, for which refusals are counted at a time."""

_log = logging.getLogger("fray.controller.audit")


@define
class _Refusals:
    """Refusals of one kind in a minute: the first, which is recorded, and the number of the others."""

    first: AuditRecord
    left_out: int = 0

    def report(self, now: float) -> AuditRecord:
        return evolve(self.first, at=now, outcome=f"{self.first.outcome} ({self.left_out} more in that minute)")


@define(eq=False)
class AuditLog:
    """Writer and reader of one audit log.

    Args:
        directory: of the store; None: the last records are kept in memory.
    """

    directory: Path | None
    limit_bytes: int = FILE_LIMIT_BYTES
    _recent: deque[AuditRecord] = field(factory=lambda: deque(maxlen=MEMORY_LIMIT), repr=False)
    _descriptor: int = field(default=-1, repr=False)
    _size_bytes: int = field(default=0, repr=False)
    _refused: dict[tuple[str, str], _Refusals] = field(factory=dict, repr=False)
    _minute: float = field(default=0.0, repr=False)
    _strangers: int = field(default=0, repr=False)

    def write(self, record: AuditRecord) -> None:
        """Append a record. If it cannot be written, the log of the controller says so."""
        record = _printable(record)
        self._recent.append(record)
        if self.directory is None:
            return
        line = to_json(record).encode() + b"\n"
        try:
            if self._descriptor < 0 or self._size_bytes + len(line) > self.limit_bytes:
                self._open(len(line))
            # One write to a descriptor with O_APPEND: a crash leaves whole lines, and perhaps the beginning of one.
            self._size_bytes += os.write(self._descriptor, line)
        except OSError as error:
            # No error for the client: what it did is done. A full disk ends the controller at its next decision.
            _log.error("the audit log %s cannot be written: %s; lost: %s", self._path(0), error, to_json(record))

    def write_stranger(self, record: AuditRecord, about: str = "") -> None:
        """Append the refusal of a peer that has proven no key: one in a minute for its machine and ``about``, and not
        many in all. What is left out is counted.
        """
        origin = (_machine_of(record.remote), about)
        known = self._refused.get(origin)
        if known is not None and 0 <= record.at - known.first.at < 60:
            known.left_out += 1
            return
        if known is None and len(self._refused) >= ORIGINS_LIMIT:
            self._report_left_out(record.at)
            self._refused.clear()
        if known is not None and known.left_out:
            self._write_limited(known.report(record.at))
        self._refused[origin] = _Refusals(record)
        self._write_limited(record)

    def _report_left_out(self, now: float) -> None:
        """Append what was left out in minutes that have passed."""
        for origin, known in list(self._refused.items()):
            if not 0 <= now - known.first.at < 60:
                del self._refused[origin]
                if known.left_out:
                    self._write_limited(known.report(now))

    def _write_limited(self, record: AuditRecord) -> None:
        if not 0 <= record.at - self._minute < 60:
            if self._strangers > STRANGERS_PER_MINUTE:
                left_out = self._strangers - STRANGERS_PER_MINUTE
                self.write(evolve(record, outcome=f"refused: {left_out} more attempts in a minute", remote="", key=""))
            self._minute, self._strangers = record.at, 0
        self._strangers += 1
        if self._strangers <= STRANGERS_PER_MINUTE:
            self.write(record)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, next_bytes: int) -> None:
        self.close()
        path = self._path(0)
        if path.exists() and path.stat().st_size + next_bytes > self.limit_bytes:
            for number in range(FILES - 1, 0, -1):
                if (before := self._path(number - 1)).exists():
                    before.replace(self._path(number))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._descriptor).st_size

    def _path(self, number: int) -> Path:
        assert self.directory is not None
        return self.directory / (f"audit.{number}.jsonl" if number else FILE)

    # Reading

    async def read(self, message: ReadAudit, now: float) -> tuple[AuditRecord, ...]:
        """Return the newest records, oldest first.

        Raises:
            StoreError: the files cannot be read.
        """
        # Here, as no task is needed then: only a reader can miss it.
        self._report_left_out(now)
        since = 0.0 if message.since_s is None else now - message.since_s
        limit = min(max(0, message.limit), READ_LIMIT)
        if self.directory is None:
            found = [record for record in self._recent if record.at >= since]
            return tuple(found[-limit:] if limit else ())
        return await trio.to_thread.run_sync(self._read_files, since, limit)

    def _read_files(self, since: float, limit: int) -> tuple[AuditRecord, ...]:
        found: deque[AuditRecord] = deque(maxlen=limit)
        try:
            for number in range(FILES - 1, -1, -1):
                if self._path(number).exists():
                    found.extend(record for record in self._records(number) if record.at >= since)
        except OSError as error:
            raise StoreError(f"the audit log in {self.directory} cannot be read: {error}") from error
        return tuple(found)

    def _records(self, number: int) -> Iterator[AuditRecord]:
        with self._path(number).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    yield from_json(AuditRecord, line)
                except ProtocolMismatch:
                    _log.warning("a line of the audit log cannot be read", extra={"file": str(self._path(number))})


def _machine_of(remote: str) -> str:
    """Return the origin of a connection without its port or process."""
    return remote.rpartition(":")[0] if remote.startswith("tcp:") else remote.partition("pid=")[0]


def _printable(record: AuditRecord) -> AuditRecord:
    """Return the record with texts that a terminal shows as they are."""
    texts: dict[str, Any] = {key: printable(value) for key, value in asdict(record).items() if isinstance(value, str)}
    return evolve(record, **texts)


def printable(text: str) -> str:
    """Return a text with escapes in place of control characters and half surrogates, not longer than `TEXT_LIMIT`."""
    if len(text) > TEXT_LIMIT:
        text = f"{text[:TEXT_LIMIT]}…"
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"
