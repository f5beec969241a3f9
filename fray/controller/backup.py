"""Backups of a store: one tar file, made while the controller runs, and a store made from one."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import tempfile
import time
from contextlib import closing
from pathlib import Path

from fray.controller.restore import restore_state
from fray.controller.store import Store, copy_database
from fray.errors import InvalidRequest, StoreError
from fray.scheduler.jobs.retention import skip_generations

DATABASE = "fray.db"
LEFT_OUT = ("fray.db", "lock", "machines", "backup-")
"""Beginnings of the names in a store that are not copied as files: the database, and what is of this machine alone."""
TRIES = 5


def back_up(store: Path, file: Path) -> int:
    """Write a backup of a store; return its size in bytes. The controller may run and is not stopped.

    Args:
        file: must not exist. It gets the mode 0600, since it contains the key from which all others are derived.

    Raises:
        StoreError: there is no store, it cannot be read, or it changes too fast.
        InvalidRequest: the file exists.
        OSError: it cannot be written.
    """
    if file.exists():
        raise InvalidRequest(f"{file} exists: pass the name of a new file")
    # In the store itself: files are kept by hard links, which costs no space and no time.
    with tempfile.TemporaryDirectory(prefix="backup-", dir=store if store.is_dir() else None) as place:
        _collect(store, Path(place))
        draft = file.with_name(f"{file.name}.new")
        draft.unlink(missing_ok=True)
        with (
            open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out,
            tarfile.open(fileobj=out, mode="w") as archive,
        ):
            archive.add(place, arcname=".")
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        # Under its final name only when it is complete.
        draft.rename(file)
    return file.stat().st_size


def _collect(store: Path, place: Path) -> None:
    """Collect a database and all files to which it refers."""
    for _ in range(TRIES):
        # Files before and after the database: what it refers to was written before it and is deleted after it.
        _link_contents(store, place)
        (place / DATABASE).unlink(missing_ok=True)
        copy_database(store, place / DATABASE)
        _link_contents(store, place)
        # One that was written and deleted between is missing: then all of it once more.
        if not _missing(place):
            return
    raise StoreError(f"the store {store} changes too fast for a backup: repeat it")


def _link_contents(store: Path, place: Path) -> None:
    """Link all files of the store that are not linked yet: blobs, chunks, the cluster's token and certificates."""
    for directory, below, files in os.walk(store):
        if Path(directory) == store:
            below[:] = [name for name in below if not name.startswith(LEFT_OUT)]
            files = [name for name in files if not name.startswith(LEFT_OUT)]
        target = place / Path(directory).relative_to(store)
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in files:
            source = Path(directory, name)
            # No drafts, sockets and links.
            if not name.endswith(".new") and not (target / name).exists() and _is_file(source):
                _link(source, target / name)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        pass  # deleted meanwhile
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _missing(place: Path) -> set[str]:
    """Return the payloads and results to which the copied database refers, and which are not there."""
    # To open a database of an earlier release migrates it. The backup stays one that this release can start on, since
    # it is what an operator goes back to.
    kept = place / f"{DATABASE}.kept"
    shutil.copy2(place / DATABASE, kept)
    with closing(Store(place, synchronous="OFF")) as copy:
        state = restore_state(copy, copy.load(), 0.0, None)
        missing = {blob for blob in state.blob_refs if not copy.has_blob(blob) and not _has_chunks(copy, blob)}
    (place / "lock").unlink()
    for opened in place.glob(f"{DATABASE}*"):
        if opened != kept:
            opened.unlink()
    kept.rename(place / DATABASE)
    return missing


def _has_chunks(copy: Store, blob: str) -> bool:
    """Return whether a large value is complete."""
    record = copy.chunks.record(blob)
    return record is not None and all(map(copy.chunks.has, record.parts))


def restore(file: Path, store: Path) -> None:
    """Make a store from a backup.

    Args:
        store: an empty or new directory.

    Raises:
        InvalidRequest: the directory is not empty, or the file is not a backup.
        StoreError: the database in it is damaged, or of a later version of Fray.
        OSError: it cannot be read or written.
    """
    if store.exists() and any(store.iterdir()):
        raise InvalidRequest(f"{store} is not empty: pass a new directory, or move what is there away")
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    store.chmod(0o700)
    try:
        with tarfile.open(file) as archive:
            archive.extractall(store, filter="data")
    except tarfile.TarError as error:
        raise InvalidRequest(f"{file} is not a backup of a store: {error}") from None
    if not (store / DATABASE).exists():
        raise InvalidRequest(f"{file} is not a backup of a store: it has no {DATABASE}")
    with closing(Store(store)) as restored:
        supersede(restored, time.time())


def supersede(restored: Store, now: float) -> None:
    """Let nothing that was numbered since the backup be numbered a second time.

    Args:
        now: seconds since the epoch, of the wall.

    Raises:
        StoreError: the store cannot be written, or a row in it cannot be read.
    """
    loaded = restored.load()
    state = restore_state(restored, loaded, 0.0, None)
    skip_generations(state)
    upserts, deletes = state.take_dirty()
    # Nodes ignore orders of an earlier epoch than the last they have seen, and the controller of the backup may have
    # been started many times since. The clock is ahead of any count of starts.
    restored.save(upserts, deletes, meta={"epoch": max(loaded.meta.get("epoch", 0), int(now))})
