"""Saves that fail, as on a full disk: one error in words, and nothing is left of what was written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SaveFailed(OSError):
    """Save that failed; the message says of what, why, and how much is free on the disk."""


@contextmanager
def saving(what: str, directory: Path) -> Iterator[None]:
    """Write a directory within the block; if that fails, whatever was written there is removed.

    Args:
        what: is saved, for the message.
        directory: that is written.

    Raises:
        SaveFailed: for whatever fails within the block: safetensors, torch and SQLite have errors of their own for a
            full disk.
    """
    try:
        yield
    except Exception as error:
        # Also so that there is room for the answer that says so.
        shutil.rmtree(directory, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        free = shutil.disk_usage(directory.parent).free
        raise SaveFailed(
            f"{what} was not saved: {reason}; {free / 1e6:.1f} MB are free at {directory.parent}"
        ) from error
