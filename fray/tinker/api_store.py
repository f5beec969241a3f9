"""Store of the Tinker API in SQLite, beside that of the jobs: sessions, models, samplers, checkpoints and futures.

What was accepted is on disk before its client gets an answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import asdict, field, frozen

from fray.tinker.core.ledger import LedgerEntry
from fray.tinker.store import SqliteStore

_TABLES = """
    CREATE TABLE IF NOT EXISTS records (kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL,
        PRIMARY KEY (kind, id)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS futures (owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
        digest TEXT NOT NULL, has_effect INTEGER NOT NULL, body BLOB, answer TEXT, PRIMARY KEY (owner, seq));
"""


@frozen
class TinkerSession:
    """Session of a client: what it made ends when it sends no heartbeats."""

    id: str
    user_id: str
    created_at: float
    metadata: dict[str, Any] = field(factory=dict)


@frozen
class TinkerModel:
    """Model that is trained: an adapter of a base model.

    Attributes:
        id: ``SESSION:train:NUMBER``; also the training run of its checkpoints.
        user_id: whose it is.
        session_id: empty: its session has ended, or it was unloaded; its checkpoints stay.
        base_model: by the name under which it is served.
        lora: settings of `fray.rl.LoRA`.
        created_at: Unix time.
        metadata: of its client.
    """

    id: str
    user_id: str
    session_id: str
    base_model: str
    lora: dict[str, Any]
    created_at: float
    metadata: dict[str, Any] | None = None


@frozen
class TinkerSampler:
    """Sampler: a base model, or saved weights that do not change.

    Attributes:
        id: ``SESSION:sample:NUMBER``.
        user_id: whose it is.
        session_id: of its client.
        base_model: its base model.
        weights: path of saved weights, for the engine; None: the base model.
        model_path: as clients see them.
    """

    id: str
    user_id: str
    session_id: str
    base_model: str
    weights: str | None = None
    model_path: str | None = None


@frozen
class TinkerCheckpoint:
    """Saved weights.

    Attributes:
        id: path as clients see it: ``tinker://MODEL/weights/NAME`` or ``tinker://MODEL/sampler_weights/NAME``.
        user_id: whose they are.
        model_id: that was saved.
        base_model: of the model.
        lora: settings of its adapter.
        weights: path for the engine.
        size: bytes.
        created_at: Unix time.
        expires_at: Unix time; None: never.
        is_public: other users may load them.
        metadata: of its client.
    """

    id: str
    user_id: str
    model_id: str
    base_model: str
    lora: dict[str, Any]
    weights: str
    size: int
    created_at: float
    expires_at: float | None = None
    is_public: bool = False
    metadata: dict[str, Any] | None = None


R = TypeVar("R", TinkerSession, TinkerModel, TinkerSampler, TinkerCheckpoint)


class TinkerStore(SqliteStore):
    """Files of the Tinker API.

    Args:
        directory: of the service, whose store holds the lock.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "tinker.sqlite")
        self._db.executescript(_TABLES)

    # Records

    def load(self, kind: type[R]) -> dict[str, R]:
        """Return all records of a kind by id."""
        rows = self._db.execute("SELECT id, value FROM records WHERE kind = ?", (kind.__name__,))
        return {name: kind(**json.loads(text)) for name, text in rows}

    def put(self, *records: TinkerSession | TinkerModel | TinkerSampler | TinkerCheckpoint) -> None:
        """Write records, new or changed, all or none."""
        rows = [(type(record).__name__, record.id, json.dumps(asdict(record))) for record in records]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)

    def remove(self, *records: TinkerSession | TinkerModel | TinkerSampler | TinkerCheckpoint) -> None:
        """Remove records, with the futures of their ids."""
        with self._transaction():
            for record in records:
                self._db.execute("DELETE FROM records WHERE kind = ? AND id = ?", (type(record).__name__, record.id))
                self._db.execute("DELETE FROM futures WHERE owner = ?", (record.id,))

    # Futures

    def entries(self, owner: str) -> list[LedgerEntry]:
        """Return the requests of a model or a sampler; their answers are True, and read by `answer`."""
        rows = self._db.execute(
            "SELECT seq, kind, digest, has_effect, answer IS NOT NULL FROM futures WHERE owner = ?", (owner,)
        )
        return [
            LedgerEntry(seq, kind, digest, has_effect=bool(effect), answer=True if is_done else None)
            for seq, kind, digest, effect, is_done in rows
        ]

    def add(self, owner: str, entry: LedgerEntry, body: bytes) -> None:
        """Write a request that was received."""
        self._db.execute(
            "INSERT INTO futures VALUES (?, ?, ?, ?, ?, ?, NULL)",
            (owner, entry.seq, entry.kind, entry.digest, int(entry.has_effect), body),
        )

    def body(self, owner: str, seq: int) -> bytes:
        """Return the body of a request. Raises LookupError if it was removed."""
        row = self._db.execute("SELECT body FROM futures WHERE owner = ? AND seq = ?", (owner, seq)).fetchone()
        if row is None or row[0] is None:
            raise LookupError(f"request {seq} of {owner} has no body any more")
        return bytes(row[0])

    def set_answer(self, owner: str, seq: int, answer: dict[str, Any], has_effect: bool) -> None:
        """Write the answer to a request; with ``has_effect=False`` it is not executed again, and has no body more."""
        self._db.execute(
            "UPDATE futures SET answer = ?1, has_effect = min(has_effect, ?2),"
            " body = iif(min(has_effect, ?2), body, NULL)"
            " WHERE owner = ?3 AND seq = ?4 AND answer IS NULL",
            (json.dumps(answer), int(has_effect), owner, seq),
        )

    def answer(self, owner: str, seq: int) -> dict[str, Any] | None:
        """Return the answer to a request, None if there is none yet. Raises LookupError if there is no such request."""
        row = self._db.execute("SELECT answer FROM futures WHERE owner = ? AND seq = ?", (owner, seq)).fetchone()
        if row is None:
            raise LookupError(f"no request {seq} of {owner}")
        answer: dict[str, Any] | None = None if row[0] is None else json.loads(row[0])
        return answer

    def forget_requests(self, owner: str, numbers: Sequence[int]) -> None:
        """Remove requests with their answers, all or none."""
        with self._transaction():
            self._db.executemany(
                "DELETE FROM futures WHERE owner = ? AND seq = ?", [(owner, number) for number in numbers]
            )

    def forget_bodies(self, owner: str, until: int) -> None:
        """Remove the bodies of requests whose effect a snapshot has; their answers stay."""
        self._db.execute(
            "UPDATE futures SET body = NULL WHERE owner = ? AND seq <= ? AND body IS NOT NULL", (owner, until)
        )
