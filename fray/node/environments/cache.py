"""The directory of environments that all nodes of a machine share.

Invariants: ``KEY/`` is complete exactly if ``KEY/ready.json`` exists, which is written last and by rename. A process
that builds or removes it holds the exclusive lock on ``KEY.lock``, a process that uses it a shared lock. The kernel
releases the locks of a process that ends, so a crash leaves a directory without its mark, never a lock. An environment
in use is not removed. Environments are built in place, not under another name, because their scripts contain their
path; hence the mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from fray.net.atomic_file import write_atomically

READY_LIMIT_BYTES = 1024 * 1024
_READY = "ready.json"


@frozen(kw_only=True)
class Environment:
    """A complete environment."""

    key: str
    directory: str
    python: str
    size_bytes: int

    @property
    def lock_path(self) -> str:
        return f"{self.directory}.lock"

    @property
    def venv(self) -> str:
        return f"{self.directory}/venv"

    @property
    def interpreter(self) -> str:
        return f"{self.venv}/bin/python"


@define
class EnvironmentLock:
    """Lock on one environment, held while it is open."""

    path: str
    _file: int = field(alias="_file")

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EnvironmentLock:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def write_owner(self) -> None:
        """Write the process that holds it exclusively, for the messages of waiting builders."""
        os.truncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    @staticmethod
    def read_owner(path: str) -> str:
        with contextlib.suppress(OSError):
            return Path(path).read_text() or "unknown"
        return "unknown"


@frozen
class Cache:
    """Environments by key, below ``root``."""

    root: Path

    def directory(self, key: str) -> Path:
        return self.root / key

    def lock_path(self, key: str) -> str:
        return str(self.root / f"{key}.lock")

    def lock(self, key: str, *, exclusive: bool, wait: bool = False, create: bool = True) -> EnvironmentLock | None:
        """Acquire the lock of a key. Return None if another process holds a conflicting lock, unless ``wait`` is set.

        Args:
            create: make its file if there is none. A node does not: a directory of an account is not its own.

        Raises:
            FileNotFoundError: there is none, without ``create``.
            OSError: the directory cannot be written.
        """
        if create:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.lock_path(key)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
        while True:
            file = os.open(path, flags, 0o600)
            try:
                fcntl.flock(file, mode)
            except OSError as error:
                os.close(file)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise
            if os.fstat(file).st_nlink:
                return EnvironmentLock(path, file)
            # The file was removed together with its environment between open and flock: a lock on it means nothing.
            os.close(file)

    def find(self, key: str) -> Environment | None:
        """Return the environment if it is complete."""
        try:
            ready: dict[str, Any] = json.loads(_read_regular(self.directory(key) / _READY))
        except (OSError, ValueError):
            return None
        return Environment(
            key=key, directory=str(self.directory(key)), python=ready["python"], size_bytes=ready["size_bytes"]
        )

    def acquire(self, key: str) -> tuple[Environment, EnvironmentLock] | None:
        """Return a complete environment with a shared lock on it; None if it is missing, or being built or removed."""
        try:
            lock = self.lock(key, exclusive=False, create=False)
        except FileNotFoundError:
            return None  # and no environment
        if lock is None:
            return None
        found = self.find(key)
        if found is None:
            lock.close()
            return None
        with contextlib.suppress(OSError):
            # The time of the last use, by which environments are evicted.
            os.utime(self.directory(key) / _READY, follow_symlinks=False)
        return found, lock

    def mark_ready(self, key: str, python: str, about: str) -> Environment:
        """Mark an environment as complete. Needs the exclusive lock. Everything reaches the disk before the mark does,
        so that a machine that loses power leaves no marked environment with empty files."""
        directory = self.directory(key)
        ready: dict[str, Any] = {"python": python, "size_bytes": size_bytes(directory), "about": about}
        os.sync()
        write_atomically(directory / _READY, json.dumps(ready).encode(), mode=0o644, durable=True)
        return Environment(key=key, directory=str(directory), python=python, size_bytes=ready["size_bytes"])

    def remove(self, key: str) -> bool:
        """Remove an environment, the mark first. Return whether anything was there. Needs the exclusive lock."""
        directory = self.directory(key)
        # The mark first: a removal that is interrupted leaves an unfinished environment and not a damaged one.
        (directory / _READY).unlink(missing_ok=True)
        existed = directory.exists()
        shutil.rmtree(directory, ignore_errors=True)
        return existed

    # Eviction

    def entries(self) -> list[CachedEnvironment]:
        """Return all environments, complete or not, the least recently used first."""
        with contextlib.suppress(FileNotFoundError):
            keys = [path.stem for path in self.root.iterdir() if path.suffix == ".lock"]
            return sorted((self._entry(key) for key in keys), key=lambda entry: entry.used_at)
        return []

    def _entry(self, key: str) -> CachedEnvironment:
        found = self.find(key)
        used_at = 0.0
        with contextlib.suppress(OSError):
            used_at = (self.directory(key) / _READY).stat().st_mtime
        return CachedEnvironment(key=key, used_at=used_at, size_bytes=0 if found is None else found.size_bytes)

    def evict(self, limit_bytes: int, keep_s: float) -> list[str]:
        """Remove the environments that `choose_evictions` selects and that are not in use. Return their keys."""
        return [
            entry.key
            for entry in choose_evictions(self.entries(), limit_bytes, keep_s, time.time())
            if self._evict(entry.key)
        ]

    def _evict(self, key: str) -> bool:
        try:
            lock = self.lock(key, exclusive=True, create=False)
        except OSError:
            return False
        if lock is None:
            return False
        with lock:
            existed = self.remove(key)
            # While the lock is held: a process that has opened the file meanwhile sees that it has no links left, and
            # tries again.
            Path(lock.path).unlink(missing_ok=True)
        return existed


def _read_regular(file: Path) -> bytes:
    """Read a small file, which an account may have replaced by anything. Raises OSError."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        return opened.read(READY_LIMIT_BYTES)


@frozen(kw_only=True)
class CachedEnvironment:
    key: str
    used_at: float
    """Seconds since the epoch; 0 if it is not complete."""
    size_bytes: int


def choose_evictions(
    cached: list[CachedEnvironment], limit_bytes: int, keep_s: float, now: float
) -> list[CachedEnvironment]:
    """Return the environments to remove, in this order: incomplete ones and those not used for ``keep_s``, then the
    least recently used, until the rest fits into ``limit_bytes``."""
    left_bytes, evicted = sum(entry.size_bytes for entry in cached), []
    for entry in sorted(cached, key=lambda entry: entry.used_at):
        if now - entry.used_at > keep_s or left_bytes > limit_bytes:
            evicted.append(entry)
            left_bytes -= entry.size_bytes
    return evicted


def size_bytes(directory: Path) -> int:
    """Return the bytes on disk, counting files that are hard links into uv's cache in full."""
    total, todo = 0, [str(directory)]
    while todo:
        for entry in os.scandir(todo.pop()):
            if entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
            else:
                # Blocks and not lengths: sparse files and small ones differ from what they take on disk.
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk of ``directory``, which need not exist yet."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
