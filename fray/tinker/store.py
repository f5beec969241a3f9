"""Store of the service: users, jobs and requests in SQLite, beside the run directory.

What was accepted is on disk before its client gets an answer. Keys are kept as hashes. One service at a time.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from fray.errors import InvalidRequest
from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.keys import ServiceUser
from fray.tinker.core.ledger import LedgerEntry
from fray.tinker.core.usage import DayUsage

STORE_RETRY_S = 1.0
"""Pause before what has happened is written again."""
SCHEMA = 3
"""Version of the tables."""
_TABLES = """
    CREATE TABLE users (user_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, key_hash TEXT NOT NULL,
        created_at REAL NOT NULL, is_admin INTEGER NOT NULL);
    CREATE TABLE jobs (job_id TEXT PRIMARY KEY, secret TEXT NOT NULL, user_id TEXT NOT NULL, config TEXT NOT NULL,
        gpus INTEGER NOT NULL, gpu_ids TEXT NOT NULL, state TEXT NOT NULL, error TEXT NOT NULL,
        created_at REAL NOT NULL, started_at REAL, completed_at REAL, is_inference INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE requests (job_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL,
        request_id TEXT NOT NULL, has_effect INTEGER NOT NULL, body BLOB, answer TEXT, scores TEXT,
        was_sent INTEGER NOT NULL, PRIMARY KEY (job_id, seq)) WITHOUT ROWID;
    CREATE TABLE checkpoints (job_id TEXT NOT NULL, path TEXT NOT NULL, step INTEGER NOT NULL,
        PRIMARY KEY (job_id, path));
"""
_USAGE_TABLE = """
    CREATE TABLE usage (day TEXT NOT NULL, user_id TEXT NOT NULL, tokens INTEGER NOT NULL, busy_s REAL NOT NULL,
        PRIMARY KEY (day, user_id)) WITHOUT ROWID;
"""
_STEPS = (
    _TABLES + _USAGE_TABLE,
    "ALTER TABLE jobs ADD COLUMN is_inference INTEGER NOT NULL DEFAULT 0;" + _USAGE_TABLE,
    _USAGE_TABLE,
)
"""Statements that bring tables of version 0 (none yet), 1, … to the present one."""


log = logging.getLogger("fray.tinker")


class StoreFailed(Exception):
    """Failure of the database, such as a full disk; what was to be written is not there."""


@frozen
class ServiceJob:
    """A job of the service.

    Attributes:
        job_id: its id.
        secret: part of its address, which is the key of its training server.
        user_id: whose it is.
        config: as it was submitted.
        gpus: accelerators that it needs.
        gpu_ids: those that it has.
        state: where it is in its life.
        error: why it failed; empty: it did not.
        created_at: Unix time.
        started_at: Unix time of its first engine.
        completed_at: Unix time of its end.
        is_inference: it answers OpenAI's requests, and trains nothing.
    """

    job_id: str
    secret: str
    user_id: str
    config: dict[str, Any]
    gpus: int
    created_at: float
    gpu_ids: tuple[int, ...] = ()
    state: ServiceJobState = ServiceJobState.QUEUED
    error: str = ""
    started_at: float | None = None
    completed_at: float | None = None
    is_inference: bool = False


@frozen
class StoredBody:
    """Body of a request, and what was decided when it was executed first."""

    body: bytes
    scores: tuple[Any, ...] | None
    """Rewards, or answers of environments, of a step that was executed: they count again when it is repeated."""


class SqliteStore:
    """Database of the service. Its methods take the disk's time; `call` runs one in a thread, one at a time.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        # Of its owner alone, whatever the umask is, and so are the files that SQLite makes beside it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        # An answer that was given is never forgotten, not even when the machine loses power.
        self._db.execute("PRAGMA synchronous = FULL")
        self._name, self._one = path.name, trio.CapacityLimiter(1)
        self.trouble = ""
        """Reason for which what `keep` was given is not on disk yet; empty: all of it is."""

    def close(self) -> None:
        """Close the files."""
        self._db.close()

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method in a thread. A cancelled caller waits until it has returned: what was begun is written.

        Raises:
            StoreFailed: the database fails.
        """
        try:
            return await trio.to_thread.run_sync(method, *arguments, limiter=self._one)
        except sqlite3.Error as error:
            raise StoreFailed(f"the service cannot use its store {self._name}: {error}") from error

    async def keep(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method until the database does not fail: for what has happened, and cannot be refused any more.

        A caller that is cancelled leaves when the method has returned, or between two tries.
        """
        while True:
            try:
                with trio.CancelScope(shield=True):
                    result = await self.call(method, *arguments)
            except StoreFailed as error:
                if not self.trouble:
                    log.error("%s; tried again each %g s", error, STORE_RETRY_S)
                self.trouble = str(error)
                await trio.sleep(STORE_RETRY_S)
            else:
                self.trouble = ""
                return result

    async def attempt(self, method: Callable[..., Any], *arguments: Any) -> bool:
        """Call a method whose failure does no harm; return False, and log, if the database fails."""
        try:
            with trio.CancelScope(shield=True):
                await self.call(method, *arguments)
        except StoreFailed as error:
            log.warning("%s", error)
            return False
        return True

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # Else no transaction could begin any more. On a full disk SQLite may have rolled back by itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


class ServiceStore(SqliteStore):
    """Files of the service.

    Args:
        directory: made if needed, readable by its owner alone.

    Raises:
        InvalidRequest: another service uses it, it is of another version, or of another account below a directory where
            all accounts may make one.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = directory.stat().st_uid
        if owner not in (0, os.geteuid()) and directory.parent.stat().st_mode & 0o002:
            # Its owner could read what is written here; all accounts may make one there beforehand.
            raise InvalidRequest(
                f"{directory} belongs to another account (uid {owner}; this process has {os.geteuid()}): remove it, or "
                "choose another directory"
            )
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidRequest(f"another service uses {directory}: choose another directory") from None
        super().__init__(directory / "service.sqlite")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= version <= SCHEMA:
            raise InvalidRequest(f"{directory} is of version {version} of the service's store; this one reads {SCHEMA}")
        if version < SCHEMA:
            self._db.executescript(f"BEGIN; {_STEPS[version]} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._lock.close()

    # Users

    def users(self) -> list[ServiceUser]:
        """Return all users, oldest first."""
        rows = self._db.execute("SELECT user_id, name, key_hash, created_at, is_admin FROM users ORDER BY created_at")
        return [ServiceUser(user, name, key, at, bool(admin)) for user, name, key, at, admin in rows]

    def add_user(self, user: ServiceUser) -> bool:
        """Write a user; return False if the name is taken."""
        row = (user.user_id, user.name, user.key_hash, user.created_at, int(user.is_admin))
        return self._db.execute("INSERT OR IGNORE INTO users VALUES (?, ?, ?, ?, ?)", row).rowcount == 1

    def set_key(self, user_id: str, key_hash: str) -> None:
        """Write the hash of a user's key; empty: the user has none any more."""
        self._db.execute("UPDATE users SET key_hash = ? WHERE user_id = ?", (key_hash, user_id))

    # Jobs

    def jobs(self) -> list[ServiceJob]:
        """Return all jobs, oldest first."""
        rows = self._db.execute(
            "SELECT job_id, secret, user_id, config, gpus, created_at, gpu_ids, state, error, started_at, completed_at,"
            " is_inference FROM jobs ORDER BY created_at, job_id"
        )
        return [
            ServiceJob(
                *(job_id, secret, user_id, json.loads(config), gpus, at, tuple(json.loads(gpu_ids))),
                *(ServiceJobState(state), error, started, completed, bool(inference)),
            )
            for job_id, secret, user_id, config, gpus, at, gpu_ids, state, error, started, completed, inference in rows
        ]

    def put_job(self, job: ServiceJob) -> None:
        """Write a job, new or changed."""
        self._db.execute(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(job.job_id, job.secret, job.user_id, json.dumps(job.config), job.gpus, json.dumps(job.gpu_ids)),
                *(job.state.value, job.error, job.created_at, job.started_at, job.completed_at),
                int(job.is_inference),
            ),
        )

    # Requests

    def entries(self, job_id: str) -> list[LedgerEntry]:
        """Return the requests of a job, for its ledger."""
        rows = self._db.execute(
            "SELECT seq, kind, digest, request_id, has_effect, answer, was_sent FROM requests WHERE job_id = ?",
            (job_id,),
        )
        return [
            LedgerEntry(seq, kind, digest, name, bool(effect), None if text is None else json.loads(text), bool(sent))
            for seq, kind, digest, name, effect, text, sent in rows
        ]

    def add_request(self, job_id: str, entry: LedgerEntry, body: bytes) -> None:
        """Write a request that was received."""
        self._db.execute(
            "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, 0)",
            (job_id, entry.seq, entry.kind, entry.digest, entry.request_id, int(entry.has_effect), body),
        )

    def set_answer(
        self, job_id: str, seq: int, answer: Any, scores: Sequence[Any] | None, has_effect: bool = True
    ) -> None:
        """Write the answer to a request; with ``has_effect=False`` it is not executed again after a snapshot."""
        text = None if scores is None else json.dumps(list(scores))
        self._db.execute(
            "UPDATE requests SET answer = ?, scores = ?, has_effect = min(has_effect, ?)"
            " WHERE job_id = ? AND seq = ? AND answer IS NULL",
            (json.dumps(answer), text, int(has_effect), job_id, seq),
        )

    def set_sent(self, job_id: str, seq: int) -> None:
        """Note that the answer was sent."""
        self._db.execute("UPDATE requests SET was_sent = 1 WHERE job_id = ? AND seq = ?", (job_id, seq))

    def body_of(self, job_id: str, seq: int) -> StoredBody:
        """Return the body of a request. Raises LookupError if a snapshot has it, so that it was removed."""
        row = self._db.execute(
            "SELECT body, scores FROM requests WHERE job_id = ? AND seq = ?", (job_id, seq)
        ).fetchone()
        if row is None or row[0] is None:
            raise LookupError(f"request {seq} of job {job_id} has no body any more")
        return StoredBody(row[0], None if row[1] is None else tuple(json.loads(row[1])))

    def forget_bodies(self, job_id: str, until: int) -> None:
        """Remove the bodies of requests whose effect a snapshot has; their answers stay."""
        self._db.execute(
            "UPDATE requests SET body = NULL, scores = NULL WHERE job_id = ? AND seq <= ? AND body IS NOT NULL",
            (job_id, until),
        )

    # Checkpoints

    def add_checkpoint(self, job_id: str, path: str, step: int) -> None:
        """Note a checkpoint that a client has saved."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (job_id, path, step))

    def checkpoints(self, job_id: str) -> list[tuple[str, int]]:
        """Return the paths and steps of the checkpoints of a job, oldest first."""
        rows = self._db.execute("SELECT path, step FROM checkpoints WHERE job_id = ? ORDER BY step", (job_id,))
        return [(path, step) for path, step in rows]

    # Use

    def add_usage(self, used: Sequence[DayUsage], oldest: str) -> None:
        """Add to the use by day and user, and remove that of days before ``oldest``."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO usage VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens,"
                " busy_s = busy_s + excluded.busy_s",
                [(each.day, each.user_id, each.tokens, each.busy_s) for each in used],
            )
            self._db.execute("DELETE FROM usage WHERE day < ?", (oldest,))

    def usage_since(self, day: str) -> list[DayUsage]:
        """Return the use by day and user from ``day`` on, oldest first."""
        rows = self._db.execute(
            "SELECT day, user_id, tokens, busy_s FROM usage WHERE day >= ? ORDER BY day, user_id", (day,)
        )
        return [DayUsage(*row) for row in rows]


def with_state(job: ServiceJob, state: ServiceJobState, now: float, error: str = "") -> ServiceJob:
    """Return a job with another state, and the time of it."""
    changes: dict[str, Any] = {"state": state, "error": error}
    if state is ServiceJobState.RUNNING and job.started_at is None:
        changes["started_at"] = now
    if state.is_final:
        changes |= {"completed_at": now, "gpu_ids": ()}
    return evolve(job, **changes)
