"""Checkpoints of a run in a directory that its machines share, or at a URL of a storage.

A storage has no rename, and does not say whether a file that is missing is still being written. So each attempt has a
name of its own, ``global_step_N-XXXXXXXX``, and its last file, ``complete.json``, makes it count; when it is removed,
that file goes first. All methods block.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from attrs import frozen

from fray.errors import InvalidRequest
from fray.net import storage
from fray.rl import checkpoint as in_directory
from fray.rl.checkpoint import MODEL_DIRECTORY, STATE_FILE, RunCheckpoint

Location = Path | str
"""A directory, or a URL of a storage."""
COMPLETE_FILE, START_FILE = "complete.json", "journal_start"
_ATTEMPT = re.compile(r"global_step_(\d+)-[0-9a-f]{8}")


@frozen
class CheckpointAtUrl:
    """A complete checkpoint in a storage."""

    path: str
    step: int
    """Number of updates done."""
    state: dict[str, Any]
    """Facts about the run, as of `RunCheckpoint`."""

    @property
    def model(self) -> str:
        """URL of the model and what the trainer needs to continue."""
        return f"{self.path}/{MODEL_DIRECTORY}"


class CheckpointStore(Protocol):
    """The checkpoints of a run."""

    def begin(self, step: int) -> Location:
        """Return a new location to write a checkpoint to; what earlier attempts left unfinished is removed."""

    def finish(self, unfinished: Any, step: int) -> Location:
        """Make a checkpoint that is written count, in place of one of the same step; return its location."""

    def remove_older(self, keep: Any) -> None:
        """Remove all complete checkpoints but one."""

    def latest(self) -> RunCheckpoint | CheckpointAtUrl | None:
        """Return the checkpoint with the most updates; None if there is none that is complete."""

    def unfinished(self) -> list[str]:
        """Return what was left half-written by a process that was lost."""


class DirectoryCheckpoints:
    """Checkpoints in a directory that the machines of a run share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, step: int) -> Path:
        return in_directory.begin_checkpoint(self._directory, step)

    def finish(self, unfinished: Path, step: int) -> Path:
        return in_directory.finish_checkpoint(unfinished, step)

    def remove_older(self, keep: Path) -> None:
        in_directory.remove_older(self._directory, keep)

    def latest(self) -> RunCheckpoint | None:
        return in_directory.latest_checkpoint(self._directory)

    def unfinished(self) -> list[str]:
        return [str(path) for path in in_directory.unfinished_checkpoints(self._directory)]


class StoredCheckpoints:
    """Checkpoints at a URL of a storage."""

    def __init__(self, url: str) -> None:
        self._url = url

    def begin(self, step: int) -> str:
        self._remove(path for path in self._attempts() if not self._is_complete(path))
        return f"{self._url}/global_step_{step}-{secrets.token_hex(4)}"

    def finish(self, unfinished: str, step: int) -> str:
        content = json.dumps({"step": step, "finished_at": time.time()}).encode()
        storage.write_now(f"{unfinished}/{COMPLETE_FILE}", content)
        # Of a line that was lost, or the one from which this run continued.
        self._remove(path for path, of in self._attempts().items() if of == step and path != unfinished)
        return unfinished

    def remove_older(self, keep: str) -> None:
        self._remove(path for path in self._attempts() if path != keep and self._is_complete(path))

    def latest(self) -> CheckpointAtUrl | None:
        complete = [(step, path) for path, step in self._attempts().items() if self._is_complete(path)]
        step = max((step for step, _ in complete), default=0)
        # Two of one step: the process that wrote the second was lost before it had removed the first.
        path = max((path for of, path in complete if of == step), key=self._finished_at, default=None)
        return None if path is None else CheckpointAtUrl(path, step, _read_json(f"{path}/{STATE_FILE}"))

    def unfinished(self) -> list[str]:
        return sorted(path for path in self._attempts() if not self._is_complete(path))

    def _attempts(self) -> dict[str, int]:
        found = ((name, _ATTEMPT.fullmatch(name)) for name in storage.names_now(self._url))
        return {f"{self._url}/{name}": int(match[1]) for name, match in found if match}

    def _is_complete(self, path: str) -> bool:
        return COMPLETE_FILE in storage.names_now(path)

    def _finished_at(self, path: str) -> float:
        at: float = _read_json(f"{path}/{COMPLETE_FILE}")["finished_at"]
        return at

    def _remove(self, paths: Iterable[str]) -> None:
        for path in list(paths):
            storage.remove_now(f"{path}/{COMPLETE_FILE}")
            storage.remove_now(path)


def below(location: Location, name: str) -> Location:
    """Return the location of a file or directory in another."""
    return location / name if isinstance(location, Path) else f"{location}/{name}"


@contextmanager
def directory_to_write(location: Location) -> Iterator[Path]:
    """Give a directory whose files are at the location when the block has ended.

    For a URL it is one for temporary files (``TMPDIR``), which are uploaded.
    """
    if isinstance(location, Path):
        yield location
        return
    with TemporaryDirectory(prefix="fray-rl-") as name:
        yield Path(name)
        storage.upload_now(Path(name), location)


@contextmanager
def directory_to_read(location: Location) -> Iterator[Path]:
    """Give a directory with the files of the location, for the time of the block."""
    if isinstance(location, Path):
        yield location
        return
    with TemporaryDirectory(prefix="fray-rl-") as name:
        storage.download_now(location, Path(name))
        yield Path(name)


@frozen
class JournalCopy:
    """Copies of the journal of a run, whose directory is on one machine, in a storage.

    Args:
        url: of the copies.
        start: name of this start of the run.
    """

    url: str
    start: str

    def claim(self, directory: Path) -> None:
        """Empty a directory for the journal of this start, or leave it as it is if it has that already.

        Raises:
            InvalidRequest: this start had a journal on a machine that is lost.
        """
        own, stored = directory / START_FILE, f"{self.url}/{START_FILE}"
        if own.is_file() and own.read_text(encoding="utf-8") == self.start:
            return
        if START_FILE in storage.names_now(self.url) and storage.read_now(stored).decode() == self.start:
            raise InvalidRequest(
                "the machine with the journal of this run was lost, and its output is at a URL, which has the journal"
                " up to the last checkpoint; start the run again to continue from there"
            )
        # Of earlier starts of the run, perhaps with other data: this one begins with a checkpoint.
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        storage.write_now(stored, self.start.encode())
        own.write_text(self.start, encoding="utf-8")

    def upload(self, paths: Iterable[Path]) -> None:
        """Copy files of the journal."""
        for path in paths:
            storage.upload_file_now(path, f"{self.url}/{path.name}")


def _read_json(location: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(storage.read_now(location))
    return found
