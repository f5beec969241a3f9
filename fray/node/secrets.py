"""Secrets that an operator gives a node: a directory with one file each, named as the secret is."""

from __future__ import annotations

import os
from pathlib import Path

from fray.errors import InvalidRequest

LIMIT_BYTES = 64 * 1024


def check_directory(path: str) -> str:
    """Return the absolute path.

    Raises:
        InvalidRequest: it is not a directory, or others can read it or a file in it.
    """
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise InvalidRequest(f"--secrets {path}: not a directory")
    for one in (directory, *_files(directory)):
        if one.stat().st_mode & 0o077:
            raise InvalidRequest(f"{one} can be read by others: chmod {'700' if one.is_dir() else '600'} {one}")
    return str(directory)


def names(directory: str) -> tuple[str, ...]:
    """Return the names of the secrets that are there now."""
    return tuple(sorted(file.name for file in _files(Path(directory)))) if directory else ()


def read(directory: str, name: str) -> str | None:
    """Return the secret of this name as it is now, without a trailing newline; None if it cannot be read."""
    # The name comes from a job: it must not lead out of the directory.
    if not directory or os.sep in name or name.startswith("."):
        return None
    try:
        return (Path(directory) / name).read_bytes()[:LIMIT_BYTES].decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return None


def _files(directory: Path) -> list[Path]:
    try:
        return [file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")]
    except OSError:
        return []
