"""Persistent state of the controller: what has been decided is on disk before any peer is notified.

Invariants: one batch of the loop is one transaction. Payloads and results are opaque blobs beside the database, named
by their SHA-256; a blob that belongs to a batch is on disk before the transaction that refers to it commits. One
controller at a time: a second one is refused at once. A store that cannot be trusted is refused and left unchanged.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import trio
from attrs import frozen

from fray.controller.blobs import BlobDict, BlobDirectory, Blobs, flush
from fray.controller.history.capacity import CapacityTable
from fray.controller.history.tables import HISTORY_LIMIT, WINDOW, HistoryRecord, HistoryTables, append_rows
from fray.controller.workspaces.chunks import ChunkDict, ChunkDirectory, ChunkStore
from fray.errors import MessageTooLarge, StoreError
from fray.model.ids import BlobId, JobId
from fray.model.messages.client import Event as LogEvent
from fray.model.messages.history import CapacitySample
from fray.model.messages.session import VERSION
from fray.model.specs import BLOB_LIMIT_BYTES
from fray.model.text import encodable
from fray.net.codec import to_json
from fray.net.transport import Bytes

EVENTS_LIMIT = 200_000
"""Lines of the event log; the oldest are deleted, 1,000 at a time."""

Row: TypeAlias = tuple[str, str, str]
"""A row: table, key, JSON."""

T = TypeVar("T")
READERS = 2
"""Threads that read at a time."""

_log = logging.getLogger("fray.controller.store")

_APPLICATION = 0x46726179  # "Fray"
_HEADER_BYTES = 100
_FREE_PAGES = 2_000
"""Pages (of 4 KiB) that may be free in the file."""
_PAGES_AT_ONCE = 500
_LOG_BYTES = 16 * 1024 * 1024
"""Size to which the write-ahead log is truncated after a large transaction."""

SCHEMA_VERSION = 5
"""Version of the tables and of the rows in them. To be raised, with a step in `MIGRATIONS`, with every change of rows
since the previous release: an older controller would lose what it does not know, and so has to refuse the store."""


def _record_release(db: sqlite3.Connection) -> None:
    """Change nothing: from schema 3 on the controller writes its release when it starts."""


def _allow_notices(db: sqlite3.Connection) -> None:
    """Change nothing: from schema 4 on the configuration of an actor may have a notice of its preemption."""


def _allow_owner_jobs(db: sqlite3.Connection) -> None:
    """Change nothing: from schema 5 on the owner of a job may be another job as a whole."""


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    2: _record_release,
    3: _allow_notices,
    4: _allow_owner_jobs,
}
"""Steps from a version to the next one, by the earlier version; each changes tables and rows within a transaction."""
RELEASE = "release"
"""Key in ``meta`` of the release of the controller that has started on the store last."""
_SCHEMA = """
    CREATE TABLE rows (tbl TEXT NOT NULL, key TEXT NOT NULL, json TEXT NOT NULL, UNIQUE (tbl, key));
    CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL NOT NULL, job TEXT NOT NULL, what TEXT NOT NULL, text TEXT);
    CREATE INDEX events_of_job ON events (job, id);
    CREATE TABLE meta (key TEXT PRIMARY KEY, json TEXT NOT NULL);
"""


@frozen
class Loaded:
    """Content of a store: rows in the order in which they were first saved, and the meta values."""

    rows: tuple[Row, ...]
    meta: dict[str, Any]


class Store:
    """Decisions in SQLite, with blobs beside it.

    Args:
        path: the directory; made (mode 0700) if it does not exist.
        synchronous: as in SQLite. ``FULL`` survives a power cut; ``NORMAL`` and ``OFF`` only the end of the process.
        history_limit: ended attempts and reservations, machines that are gone, and rows of capacity on record, each;
            the oldest are deleted.

    Raises:
        StoreError: in use by another controller, damaged, of another version of Fray, or not writable.
    """

    def __init__(
        self,
        path: str | Path,
        synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL",
        history_limit: int = HISTORY_LIMIT,
    ) -> None:
        self.path: Path | None = Path(path)
        self._readers = trio.CapacityLimiter(READERS)
        self._lock: int | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Before the database is opened: to open it may change files of a controller that still runs.
            self._lock = _lock_directory(self.path)
            self._db = _open(self.path / "fray.db", synchronous)
            self._blobs: Blobs = BlobDirectory(self.path / "blobs")
            self.chunks: ChunkStore = ChunkDirectory(self.path / "workspaces")
            """Chunks of workspaces and large values; not part of the transactions."""
            self.history = HistoryTables(self._db, self._select, history_limit)
            self.capacity = CapacityTable(self._db, self._select, history_limit)
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise StoreError(f"store {self.path} cannot be used: {error}") from error
        except StoreError:
            self._unlock()
            raise

    @classmethod
    def memory(cls, workspaces: Path | None = None) -> Store:
        """Return a store in memory, for embedded clusters and simulation; it lives as long as the object.

        Args:
            workspaces: directory for the chunks of workspaces and large values. Default: in memory, too.
        """
        # Around `__init__`, which would make directories and take the lock.
        store = cls.__new__(cls)
        store.path = None
        store._lock = None
        store._blobs = BlobDict()
        # Nothing of this cluster outlives its driver, so nothing is flushed.
        store.chunks = ChunkDict() if workspaces is None else ChunkDirectory(workspaces, durable=False)
        store._db = _create_tables(_connect(":memory:"))
        store.history = HistoryTables(store._db, store._select)
        store.capacity = CapacityTable(store._db, store._select, HISTORY_LIMIT)
        return store

    def __repr__(self) -> str:
        return f"<Store {self.path or 'in memory'}>"

    def close(self) -> None:
        """Close the database and unlock the directory. A store in memory stays as it is, for the next controller."""
        if self.path is not None:
            self._db.close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Decisions

    def load(self) -> Loaded:
        """Return everything but events and blobs."""
        rows = self._select("SELECT tbl, key, json FROM rows ORDER BY rowid")
        meta = self._select("SELECT key, json FROM meta")
        try:
            return Loaded(tuple(rows), {key: json.loads(text) for key, text in meta})
        except ValueError as error:
            raise _damaged(self.path, f"unreadable meta data ({error})") from error

    def save(
        self,
        upserts: Iterable[tuple[str, str, Any]] = (),
        deletes: Iterable[tuple[str, str]] = (),
        events: Sequence[LogEvent] = (),
        meta: Mapping[str, Any] | None = None,
        history: Sequence[HistoryRecord] = (),
        capacity: Sequence[CapacitySample] = (),
    ) -> None:
        """Save in one transaction: all of it is on disk when this returns, or none of it.

        Blobs put since the last call are flushed first. A meta value that is None is deleted.

        Raises:
            StoreError: the disk is full or gone. The controller must stop: it may not announce what it could not save.
            UnicodeEncodeError, sqlite3.DataError, sqlite3.IntegrityError: a value cannot be stored; nothing was saved.
        """
        # Serialized before the transaction begins: a row that cannot be written as JSON changes nothing.
        rows = [(table, key, to_json(value)) for table, key, value in upserts]
        try:
            # Blobs first: a crash between the two leaves blobs without a row, which the next start deletes; the other
            # order would leave rows without their payloads.
            self._blobs.commit()
            # IMMEDIATE takes the write lock now, so a conflict shows before the first row is written and not in the
            # middle.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._write(rows, deletes, events, meta or {})
                self.history.add(history)
                self.capacity.add(capacity)
                self._db.execute("COMMIT")
            except BaseException:
                # On a full disk SQLite may have rolled back by itself, and ROLLBACK without a transaction is an error.
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.IntegrityError):
            raise  # of the values, and not of the store
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"store {self.path} cannot be written: {error}") from error

    def _write(
        self,
        rows: Sequence[Row],
        deletes: Iterable[tuple[str, str]],
        events: Sequence[LogEvent],
        meta: Mapping[str, Any],
    ) -> None:
        # An update keeps the row's rowid, so that `load` gives rows in the order in which they were first saved.
        self._db.executemany(
            "INSERT INTO rows (tbl, key, json) VALUES (?, ?, ?) "
            "ON CONFLICT (tbl, key) DO UPDATE SET json = excluded.json",
            rows,
        )
        self._db.executemany("DELETE FROM rows WHERE tbl = ? AND key = ?", deletes)
        self._db.executemany(
            "INSERT INTO meta (key, json) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET json = excluded.json",
            [(key, json.dumps(value)) for key, value in meta.items() if value is not None],
        )
        # A missing row, not a JSON null: `load` must not give a value that was deleted.
        self._db.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key, value in meta.items() if value is None])
        self._log(events)

    def _log(self, events: Sequence[LogEvent]) -> None:
        rows = [(event.time, encodable(event.job), encodable(event.what), encodable(event.text)) for event in events]
        if append_rows(self._db, "events", ("time", "job", "what", "text"), rows, EVENTS_LIMIT):
            self._shrink()

    def _shrink(self) -> None:
        """Return some free pages to the disk if there are many; the others will be reused soon."""
        # Not VACUUM, which writes the whole file again while the loop waits. 500 pages are 2 MB.
        if self._db.execute("PRAGMA freelist_count").fetchone()[0] > _FREE_PAGES:
            # `fetchall`, since SQLite frees one page for each step of the statement; without it only the first is
            # freed.
            self._db.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})").fetchall()

    def events(self, job: JobId, limit: int = 1_000) -> tuple[LogEvent, ...]:
        """Return the last ``limit`` events of a job, oldest first."""
        rows = self._select(
            # The newest ones by the index, then turned round: a job in a crash loop has many more than are shown.
            "SELECT time, job, what, text FROM events WHERE job = ? ORDER BY id DESC LIMIT ?",
            job,
            limit,
        )
        return tuple(LogEvent(time=t, job=j, what=what, text=text) for t, j, what, text in reversed(rows))

    def all_events(self, after: int, since: float) -> tuple[tuple[LogEvent, ...], int]:
        """Return the next `WINDOW` events, and the row after which to continue; 0 if these were the last.

        Args:
            after: row of the page before; 0: begin with the first event since ``since``.
        """
        start = after or self.history.first_since("events", "time", since) - 1
        rows = self._select(
            "SELECT time, job, what, text FROM events WHERE id > ? AND id <= ? ORDER BY id", start, start + WINDOW
        )
        end = self._select("SELECT max(id) FROM events")[0][0] or 0
        found = tuple(LogEvent(time=t, job=j, what=what, text=text) for t, j, what, text in rows)
        return found, 0 if start + WINDOW >= end else start + WINDOW

    async def read_apart(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function with a connection that may only read, in a thread; over a store in memory, at once.

        Raises:
            StoreError: the store cannot be read.
        """
        if self.path is None:
            return self._reading(function, self._db)
        return await trio.to_thread.run_sync(self._read_file, function, limiter=self._readers)

    def _read_file(self, function: Callable[[sqlite3.Connection], T]) -> T:
        assert self.path is not None
        db = _connect(f"file:{_uri_path(self.path / 'fray.db')}?mode=ro", uri=True)
        try:
            db.execute("PRAGMA temp_store = MEMORY")
            return self._reading(function, db)
        finally:
            db.close()

    def _reading(self, function: Callable[[sqlite3.Connection], T], db: sqlite3.Connection) -> T:
        try:
            return function(db)
        except sqlite3.Error as error:
            raise StoreError(f"store {self.path} cannot be read: {error}") from error

    def _select(self, query: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"store {self.path} cannot be read: {error}") from error

    # Blobs

    def put_blob(self, data: Bytes) -> BlobId:
        """Store ``data``; it is readable at once and on disk when the next `save` returns.

        Raises:
            MessageTooLarge: over 8 MiB.
        """
        # Blobs are written to the disk by the loop itself, so one of a gigabyte would stop all scheduling for seconds.
        size_bytes = len(data)
        if size_bytes > BLOB_LIMIT_BYTES:
            raise MessageTooLarge(
                f"a payload or result of {size_bytes} bytes exceeds the limit of {BLOB_LIMIT_BYTES}: "
                "write it to storage and pass its path",
                size_bytes=size_bytes,
                limit_bytes=BLOB_LIMIT_BYTES,
            )
        # A copy: a view would keep the whole received message in memory until the blob is written.
        return self._blobs.put(bytes(data))

    def has_blob(self, blob: BlobId) -> bool:
        return self._blobs.has(blob)

    def blob(self, blob: BlobId) -> bytes | None:
        """Return the content; None if it is not stored or its file is damaged."""
        return self._blobs.get(blob)

    def delete_blobs(self, blobs: Iterable[BlobId]) -> None:
        """Delete these blobs; unknown ones are ignored."""
        for blob in blobs:
            self._blobs.forget(blob)

    def blobs(self) -> set[BlobId]:
        """Return the ids of all blobs."""
        return self._blobs.all()


# The database --------------------------------------------------------------------------------------------------------


def _connect(name: str, **options: Any) -> sqlite3.Connection:
    # `isolation_level=None`: transactions are only those of `save`. By default the module would begin one at the first
    # change by itself, and leave it open.
    db: sqlite3.Connection = sqlite3.connect(name, isolation_level=None, check_same_thread=False, **options)
    return db


def _open(file: Path, synchronous: str) -> sqlite3.Connection:
    if not file.exists():
        # A new database beside an old log would silently be another, empty cluster, and nodes would end all that they
        # run for the old one.
        if Path(f"{file}-wal").exists():
            raise _damaged(file, "the file is missing, but its write-ahead log exists")
        _create(file)
    version = _check(file)
    if version != SCHEMA_VERSION:
        _migrate(file, version)
    db = _connect(str(file))
    # WAL: a commit is a sequential write and one fsync; a rollback journal needs several.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    return db


def _create(file: Path) -> None:
    """Create the database under another name and rename it: a file under the final name is complete or damaged, never
    half made."""
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    # Rows contain variables of jobs, and `meta` the secret of which all keys are derived: readable by the owner only,
    # before SQLite writes the first byte.
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    _create_tables(_connect(str(draft))).close()
    # Content before the rename, directory after it: otherwise a power cut may leave the final name with an empty file.
    flush(draft)
    draft.rename(file)
    flush(file.parent)


def _migrate(file: Path, version: int) -> None:
    """Bring a store of an earlier version to this one, in one transaction; a copy from before it stays beside it."""
    kept = file.with_name(f"{file.name}.schema-{version}")
    # Written again if it is there: an earlier attempt may have been killed while it wrote.
    kept.unlink(missing_ok=True)
    _copy(file, kept)
    db = _connect(str(file))
    try:
        db.execute("BEGIN IMMEDIATE")
        for step in range(version, SCHEMA_VERSION):
            MIGRATIONS[step](db)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    finally:
        # Without the commit, closing rolls back.
        db.close()
    _log.info("store %s migrated from schema %d to %d; its copy is %s", file, version, SCHEMA_VERSION, kept)


def _copy(file: Path, into: Path) -> None:
    """Copy a database that may be in use into a new file of mode 0600."""
    os.close(os.open(into, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    source, target = _connect(f"file:{_uri_path(file)}?mode=ro", uri=True), _connect(str(into))
    try:
        # All pages in one step: in several, each transaction of the controller would begin it again.
        source.backup(target)
        # The header says WAL; without a side file the copy is one file.
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        source.close()
        target.close()
    flush(into)


def copy_database(store: Path, into: Path) -> None:
    """Copy the database of a store, also while its controller runs: all of a transaction, or nothing of it.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    file = store / "fray.db"
    if not file.exists():
        raise StoreError(f"there is no store in {store}: pass the directory of fray-controller --store")
    try:
        _copy(file, into)
        _check(into)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"store {store} cannot be copied: {error}") from error


def _check(file: Path) -> int:
    """Check that this is a sound store of this version or of one that can be migrated, without writing; return its
    version.

    Raises:
        StoreError: the file is not a store, of another version, or damaged.
    """
    # `immutable` makes no side files, but ignores a write-ahead log, so it is only for stores that have none.
    mode = "mode=ro" if Path(f"{file}-wal").exists() else "immutable=1"
    try:
        if (size_bytes := file.stat().st_size) < _HEADER_BYTES:  # SQLite would treat it as a new database
            raise _damaged(file, f"the file has {size_bytes} bytes")
        db = _connect(f"file:{_uri_path(file)}?{mode}", uri=True)
        try:
            # `quick_check` leaves out the comparison of indexes with their tables, so that a large store still opens
            # soon.
            application, version, health = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version", "quick_check")
            )
            release = _release(db) if version > SCHEMA_VERSION else ""
        finally:
            db.close()
    except sqlite3.Error as error:
        raise _damaged(file, str(error)) from error
    if application != _APPLICATION:
        raise StoreError(f"{file} is not a Fray store; nothing was changed. Pass another --store directory")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"store {file} was written by a later version of Fray ({release}schema {version}; this is fray {VERSION}, "
            f"schema {SCHEMA_VERSION}); nothing was changed. Start that version again, restore a backup from before "
            f"the upgrade (fray backup --restore; {file.name}.schema-{SCHEMA_VERSION} beside it is the database of "
            "then), or pass another --store directory"
        )
    if not all(step in MIGRATIONS for step in range(version, SCHEMA_VERSION)):
        raise StoreError(
            f"store {file} was written by an earlier version of Fray (schema {version}), from which this one (schema "
            f"{SCHEMA_VERSION}) cannot migrate; nothing was changed. Upgrade by way of a version between them, or pass "
            "another --store directory"
        )
    if health != "ok":
        raise _damaged(file, health)
    return int(version)


def _release(db: sqlite3.Connection) -> str:
    """Return the release that has opened a store of a later version last, for a message; empty if it does not say."""
    try:
        found = db.execute("SELECT json FROM meta WHERE key = ?", (RELEASE,)).fetchone()
        return f"fray {json.loads(found[0])}, " if found is not None else ""
    except (sqlite3.Error, ValueError):
        return ""


def _uri_path(file: Path) -> str:
    # In a URI, SQLite decodes %xx, and ? and # end the path.
    return str(file.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _create_tables(db: sqlite3.Connection) -> sqlite3.Connection:
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only possible before the first table
    db.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )
    return db


def _damaged(file: Path | None, how: str) -> StoreError:
    return StoreError(
        f"store {file} is damaged: {how}. Nothing was changed. Restore a copy of the directory, or pass another "
        "--store directory to start a new cluster (nodes then end what they run for this one)"
    )


# The lock ------------------------------------------------------------------------------------------------------------


def _lock_directory(directory: Path) -> int:
    """Lock the directory; return the descriptor with the lock, which the kernel releases when this process ends."""
    file = directory / "lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A kernel lock and not a file whose existence counts: `kill -9` leaves nothing that an operator has to remove.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # The content is only for this message, and may be of a holder that has not written it yet.
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(
            f"store {directory} is in use by another controller ({holder}): stop that one first, "
            "or pass another --store directory",
            holder=holder,
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
