"""File with the journal of a run: entries are appended before their effects are visible, and read after a loss.

A record is its length and checksum, and the pickle of a list of entries; the last one may be incomplete. The samples
that were accepted are in it with their trajectories: it is also what `fray.rl` shows of a step.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from fray.errors import InvalidRequest
from fray.net.atomic_file import write_atomically
from fray.rl.core.journal import BatchTrained, Entry
from fray.rl.core.run_record import RunPlan, RunRecord
from fray.rl.core.run_state import RunState
from fray.runtime.serialization.pickling import dumps_plain, loads

_HEAD = struct.Struct("<II")
FAILURES_FILE = "failures.jsonl"
FAILURES_LIMIT_BYTES = 64 << 20
"""Length of the file of failures, after which no more are noted: their reasons are counted all the same."""
START_NAME = "owner"
"""File with the name of the last start of the run."""
REQUESTS_NAME = "requests.json"
"""File with the requests that hold until the run ends, and the name of the start that they are for."""
RECORD_LIMIT_BYTES = 1 << 30
"""Length beyond which a record is taken for damaged."""


@frozen
class KeptRequests:
    """Requests of users that hold until the run ends, whichever of its processes is lost meanwhile."""

    is_stopping: bool = False
    """True: the run ends after the update under way."""
    servers: int | None = None
    """Servers that the run shall have; None: those of its settings."""


class JournalFile:
    """File that is appended to.

    What is appended survives the end of this process at once, the end of its machine when the system has written it.

    Args:
        path: of the file, which is made, or continued after its last complete record.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, sum(_HEAD.size + len(content) for content in _records(path)))

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries. Raises OSError if they cannot be written, all or in part."""
        if not entries:
            return
        content = dumps_plain(list(entries))
        record = memoryview(_HEAD.pack(len(content), zlib.crc32(content)) + content)
        while record:
            record = record[os.write(self._fd, record) :]

    @property
    def size(self) -> int:
        """Length of the file, bytes."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def claim_journal(directory: Path, start: str) -> None:
    """Make a start of a run the last one, for its journal; to be called by the process that has the run's lock."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / START_NAME, start.encode())


class RunJournal:
    """Journal of a run: the record that it began with, and a file for each update.

    The file ``step_N`` has what was decided from the end of update N - 1 to the end of update N, so the samples of that
    update are in it, or, if they were rolled out before, in those just before it.

    One state has the journal at a time: the one that began last, of the last start of the run. A process that lives on
    behind a cut, while the run has been started elsewhere, cannot write to it any more.

    Args:
        directory: for the files; made if missing.
        start: name of the start of the run, as `claim_journal` has written it. Default: that is not compared.
    """

    def __init__(self, directory: Path, start: str = "") -> None:
        self._directory, self._start = directory, start
        directory.mkdir(parents=True, exist_ok=True)
        self._starts = os.open(directory / "starts", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        """File with a byte for each state that has begun."""
        self._incarnation = 0
        self._file: JournalFile | None = None
        self._step = -1

    def recover(self, plan: RunPlan) -> RunState:
        """Return the state that was written last; a new one if there is none.

        Raises:
            InvalidRequest: the journal is that of a later start of the run.
        """
        with self._locked():
            self._check(is_current=self._is_last_start)
            return self._recover(plan, self._begin_state())

    def _recover(self, plan: RunPlan, incarnation: int) -> RunState:
        base = self._directory / "base"
        record, first, offset = loads(base.read_bytes()) if base.exists() else (RunRecord.new(plan), 0, 0)
        record.continue_with(plan)
        entries: list[Entry] = []
        for step in sorted(self._steps()):
            if step >= first:
                entries += read_journal(self._path(step), offset if step == first else 0)
        return RunState.recover(record, entries, incarnation)

    def next_incarnation(self) -> int:
        """Return a number for a state, which none before it had: its leases have numbers of their own.

        Raises:
            InvalidRequest: the journal is that of another process by now.
        """
        with self.own():
            return self._begin_state()

    def _begin_state(self) -> int:
        os.write(self._starts, b".")
        # The place behind what was written, also if another process writes at this moment.
        self._incarnation = os.lseek(self._starts, 0, os.SEEK_CUR)
        return self._incarnation

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A file system without locks: a state that begins between a check and what is written then is not noticed.
        with suppress(OSError):
            fcntl.flock(self._starts, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._starts, fcntl.LOCK_UN)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Keep other states from beginning, for the time of the block. Raises InvalidRequest if one has begun."""
        with self._locked():
            self._check(is_current=self._is_last_start and os.fstat(self._starts).st_size == self._incarnation)
            yield

    @property
    def _is_last_start(self) -> bool:
        # The process of a start that was lost may be started again after that of the next one.
        return not self._start or (self._directory / START_NAME).read_text(encoding="utf-8") == self._start

    def _check(self, *, is_current: bool) -> None:
        if not is_current:
            raise InvalidRequest(f"another process has taken over the run whose journal is in {self._directory}")

    def append(self, entries: Sequence[Entry], number: int) -> None:
        """Append entries.

        Args:
            number: of updates done, after them.

        Raises:
            InvalidRequest: the journal is that of another process by now.
        """
        with self.own():
            self._append(entries, number)

    def _append(self, entries: Sequence[Entry], number: int) -> None:
        if self._file is None:
            self._open(number + 1 - any(isinstance(entry, BatchTrained) for entry in entries))
        assert self._file is not None
        self._file.append(entries)
        if number >= self._step:
            self._open(number + 1)

    def begin(self, record: RunRecord) -> None:
        """Let recovery begin with a record, which has all that was appended. Raises InvalidRequest as `append`."""
        with self.own():
            self._begin(record)

    def _begin(self, record: RunRecord) -> None:
        if self._file is None:
            self._open(record.weights.line.number + 1)
        assert self._file is not None
        unfinished = self._directory / "base.unfinished"
        unfinished.write_bytes(dumps_plain((record, self._step, self._file.size)))
        unfinished.rename(self._directory / "base")

    def rewind(self, record: RunRecord) -> None:
        """Remove what was written after the update that a record ends with, and begin with that record.

        Raises:
            InvalidRequest: as `append`.
        """
        number = record.weights.line.number
        with self.own():
            for step in self._steps():
                if step > number:
                    self._path(step).unlink()
            self._open(number + 1)
            self._begin(record)

    def keep_requests(self, requests: KeptRequests) -> None:
        """Write requests, for the next state of this start of the run. Raises InvalidRequest as `append`."""
        with self.own():
            content = json.dumps({"start": self._start, **asdict(requests)})
            write_atomically(self._directory / REQUESTS_NAME, content.encode())

    def kept_requests(self) -> KeptRequests:
        """Return the requests that were written last; none if they were for an earlier start of the run."""
        path = self._directory / REQUESTS_NAME
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"start": None}
        return KeptRequests(**found) if found.pop("start") == self._start else KeptRequests()

    def files(self, first: int, last: int) -> list[Path]:
        """Return the files of updates that are done, from one number to another, and that of failures."""
        wanted = [self._path(step) for step in range(first, last + 1)]
        return [path for path in [*wanted, self._directory / FAILURES_FILE] if path.exists()]

    def note_failure(self, number: int, task_id: str, reason: str, detail: str) -> None:
        """Note an attempt that failed, for those who look; recovery does without it.

        Args:
            number: of the update for which it was rolled out.
        """
        with (self._directory / FAILURES_FILE).open("a", encoding="utf-8") as file:
            if file.tell() < FAILURES_LIMIT_BYTES:
                file.write(json.dumps({"step": number, "task": task_id, "reason": reason, "detail": detail}) + "\n")

    def _open(self, step: int) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._step = JournalFile(self._path(step)), step

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def _steps(self) -> list[int]:
        return [int(path.name[5:]) for path in self._directory.glob("step_*") if path.name[5:].isdigit()]


def read_journal(path: Path, offset: int = 0) -> list[Entry]:
    """Return the entries of a file, in order; none if there is no such file.

    They end before the first record that is incomplete or damaged.

    Args:
        offset: byte at which a record begins; those before it are left out.
    """
    return [entry for content in _records(path, offset) for entry in loads(content)]


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """Return the failures in a directory, as `RunJournal.note_failure` wrote them."""
    path = directory / FAILURES_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _records(path: Path, offset: int = 0) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if length > RECORD_LIMIT_BYTES:
                return
            content = file.read(length)
            if len(content) < length or zlib.crc32(content) != checksum:
                return
            yield content
