"""Checkpoints of a run: directories ``global_step_N`` with the model after N updates and the record of the run.

One is written beside and renamed when it is complete. What was left half-written by a process that was lost is ignored.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from fray.errors import InvalidRequest
from fray.rl.core.run_record import RunRecord
from fray.runtime.serialization.pickling import dumps_plain, loads

STATE_FILE, RECORD_FILE, MODEL_DIRECTORY = "state.json", "run_record.pickle", "model"
# With the ending in a copy of a storage: see fray/rl/checkpoint_store.py.
_NAME = re.compile(r"global_step_(\d+)(?:-[0-9a-f]{8})?")


@frozen
class RunCheckpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of updates done."""
    state: dict[str, Any]
    """Facts about the run, to be read by people and to be compared with the run that resumes."""

    @property
    def model(self) -> Path:
        """Directory with the model and what the trainer needs to continue."""
        return self.path / MODEL_DIRECTORY


class SavedRun(Protocol):
    """A checkpoint, wherever it is."""

    @property
    def path(self) -> Path | str: ...
    @property
    def state(self) -> dict[str, Any]: ...


def load_record(directory: Path) -> RunRecord:
    """Return the record of the run of a checkpoint."""
    record: RunRecord = loads((directory / RECORD_FILE).read_bytes())
    return record


def write_state(directory: Path, record: RunRecord, facts: Mapping[str, Any]) -> None:
    """Write the record of a run and facts about it into a directory that is to become a checkpoint."""
    (directory / RECORD_FILE).write_bytes(dumps_plain(record))
    line, counts = record.weights.line, record.counts
    state = {
        "step": line.number,
        "version": str(line.current),
        "batches_loaded": record.loaded,
        "samples": {
            "issued": counts.issued,
            "trained": counts.trained,
            "validated": counts.validated,
            "dropped": dict(counts.dropped),
            "repeated": dict(counts.repeated),
        },
        **facts,
    }
    (directory / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def begin_checkpoint(directory: Path, step: int) -> Path:
    """Return a new directory to write a checkpoint into; those of earlier attempts are removed."""
    for path in directory.glob(".global_step_*.unfinished*"):
        shutil.rmtree(path, ignore_errors=True)
    # Of this attempt alone: a process that is taken for lost, and lives behind a cut, may still write into the last.
    unfinished = directory / f".global_step_{step}.unfinished-{secrets.token_hex(4)}"
    unfinished.mkdir(parents=True)
    return unfinished


def unfinished_checkpoints(directory: Path) -> list[Path]:
    """Return what was left half-written by a process that was lost."""
    incomplete = [path for path, _ in checkpoint_directories(directory) if not _is_complete(path)]
    return sorted([*directory.glob(".global_step_*.unfinished*"), *incomplete])


def finish_checkpoint(unfinished: Path, step: int) -> Path:
    """Rename a complete directory to its name and return that; one that is there is replaced."""
    for path in unfinished.rglob("*"):
        if path.is_file():
            _sync(path)
    path = unfinished.parent / f"global_step_{step}"
    replaced = unfinished.parent / f".global_step_{step}.replaced"
    if path.exists():
        # Of a line that was lost, or the one from which this run continued: it is kept until the new one is in place.
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    unfinished.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def remove_older(directory: Path, keep: Path) -> None:
    """Remove all complete checkpoints but one."""
    for path, _ in checkpoint_directories(directory):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_directories(directory: Path) -> list[tuple[Path, int]]:
    """Return the directories with the name of a checkpoint, and their numbers; they may be incomplete."""
    if not directory.is_dir():
        return []
    for replaced in directory.glob(".global_step_*.replaced"):
        path = replaced.with_name(replaced.name[1 : -len(".replaced")])
        # The process that replaced it was lost before the new one was in place.
        if not path.exists():
            replaced.rename(path)
    found = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    return [(path, int(match[1])) for path, match in found if match]


def latest_checkpoint(directory: Path) -> RunCheckpoint | None:
    """Return the checkpoint with the most updates; None if there is none that is complete."""
    return next(reversed(complete_checkpoints(directory)), None)


def complete_checkpoints(directory: Path) -> list[RunCheckpoint]:
    """Return the complete checkpoints, in the order of their updates."""
    return [
        RunCheckpoint(path, step, json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
        for path, step in sorted(checkpoint_directories(directory), key=lambda one: one[1])
        if _is_complete(path)
    ]


def check_resumable(checkpoint: SavedRun, facts: Mapping[str, Any]) -> None:
    """Compare a checkpoint with the run that shall continue from it.

    Args:
        facts: those that must be equal.

    Raises:
        InvalidRequest: they differ; the message has each difference.
    """
    differences = [
        f"{name} is {value!r}, and was {checkpoint.state.get(name)!r}"
        for name, value in facts.items()
        if checkpoint.state.get(name) != value
    ]
    if differences:
        raise InvalidRequest(
            f"this run cannot continue from {checkpoint.path}: {'; '.join(differences)};"
            " choose another output directory"
        )


def _is_complete(path: Path) -> bool:
    return (path / STATE_FILE).is_file() and (path / RECORD_FILE).is_file()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
