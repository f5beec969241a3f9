"""Requests of one model: numbered by its client, executed in order, each once."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from fray.errors import ActorDied
from fray.rl.train.datums import ServiceLoss
from fray.rl.train.lora import LoRA
from fray.tinker.api_store import TinkerCheckpoint, TinkerModel, TinkerStore
from fray.tinker.core.adapter_operations import (
    AdapterOperation,
    ForwardPass,
    LoadWeights,
    OperationResult,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from fray.tinker.core.ledger import Ledger, LedgerEntry
from fray.tinker.kept_engine import EngineFailed, EngineRestarted
from fray.tinker.store import StoreFailed
from fray.tinker.tinker_api.base_engine import BaseEngine
from fray.tinker.wire.tinker_json import Fields, adam_of
from fray.tinker.wire.tinker_proto import ForwardRequest, WireError, decode_forward_request

CREATE = "create_model"
SMALL_BYTES = 1 << 16
"""Size up to which a model's latest request is kept in memory, too, with its answer, and decoded in the event loop: to
read them back, or a thread, would take longer."""

log = logging.getLogger("fray.tinker")


class UserError(Exception):
    """Request that cannot be executed, for a reason of its own."""


def failed(text: str, category: str = "user") -> dict[str, Any]:
    """Return the answer to a request that failed."""
    return {"error": text, "category": category}


async def decoded_forward_request(body: bytes) -> ForwardRequest:
    """Return the request of a body. Raises WireError as `decode_forward_request`."""
    if len(body) <= SMALL_BYTES:
        return decode_forward_request(body)
    # In a thread: others wait for their answers.
    return await trio.to_thread.run_sync(decode_forward_request, body)


def engine_name(model_id: str) -> str:
    """Return the name of a model for its engine."""
    return model_id.replace(":", ".")


class ModelRun:
    """Model of a session that has not ended.

    Args:
        model: its record.
        store: of the API.
        entries: requests of before a restart of the service.
        engine: that trains it.
        find_checkpoint: returns the checkpoint of a path that the user may load; raises UserError.
        has_checkpoint: returns whether there is a checkpoint of a path.
        on_saved: called with what an operation saved, before its answer is kept.
        on_answer: called with the number of each request that has its answer.
        on_tokens: called with the number of tokens of each forward pass.
    """

    def __init__(
        self,
        model: TinkerModel,
        store: TinkerStore,
        entries: list[LedgerEntry],
        engine: BaseEngine,
        find_checkpoint: Callable[[str], TinkerCheckpoint],
        has_checkpoint: Callable[[str], bool],
        on_saved: Callable[[ModelRun, Fields, OperationResult, AdapterOperation, int], Awaitable[dict[str, Any]]],
        on_answer: Callable[[int], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        self.model, self._store, self.engine = model, store, engine
        self.ledger = Ledger(entries, first=0)
        self._find_checkpoint, self._has_checkpoint = find_checkpoint, has_checkpoint
        self._on_saved, self._on_answer, self._on_tokens = on_saved, on_answer, on_tokens
        self._writing: set[int] = set()
        self._small_body: tuple[int, bytes] = (-1, b"")
        """Latest small request."""
        self.small_answer: tuple[int, dict[str, Any]] = (-1, {})
        """Number of the small request that was executed last, and its answer, which is on disk."""
        self._changed = trio.Event()
        self.scope = trio.CancelScope()
        self.failure = ""
        self._snapshot_error = ""
        self.target: BaseEngine | None = None
        """Engine that trains it from its next request on; None: the same."""
        self.move_error = ""
        """Reason for which it could not move."""
        self.worked_at = -math.inf
        """Time at which its last request was executed, in seconds of Trio's clock."""

    async def receive(self, kind: str, seq: int, body: bytes, digest: str, has_effect: bool) -> bool:
        """Take a request; return whether it is new. Returns once it is on disk.

        Raises:
            LedgerConflict: its number was used with another body, or too many requests wait.
            StoreFailed: it cannot be written; a repetition is received again.
        """
        while seq in self._writing:
            # A repetition: if the first cannot be written, it takes its place.
            await self._changed.wait()
        receipt = self.ledger.receive(kind, digest, seq=seq, has_effect=has_effect)
        if receipt.is_new:
            # It is executed when it is on disk.
            self._writing.add(seq)
            try:
                with trio.CancelScope(shield=True):
                    await self._store.call(self._store.add, self.model.id, self.ledger.entries[seq], body)
                if len(body) <= SMALL_BYTES:
                    self._small_body = (seq, body)
            except StoreFailed:
                self.ledger.withdraw(seq)
                raise
            finally:
                self._writing.discard(seq)
                self._wake()
        return receipt.is_new

    def waits_because(self, seq: int) -> tuple[str, str]:
        """Return the state of the queue and the reason for which a request has no answer yet."""
        gap = self.ledger.waits_for(seq)
        if gap is not None:
            return "active", f"request {seq} waits for request {gap}, which has not come"
        if self._store.trouble:
            return "paused_capacity", self._store.trouble
        state, reason = self.engine.queue_state(self.model.user_id)
        return state, reason or f"{seq - self.ledger.applied - 1} requests of this model are before it"

    @property
    def has_work(self) -> bool:
        """Return whether a request is executed or waits for the engine."""
        return self.ledger.next_seq() is not None

    def move_to(self, engine: BaseEngine) -> None:
        """Have another engine train the model: between two requests, with a snapshot, or when its engine is lost."""
        self.target = engine
        engine.models.add(self.model.id)
        self._wake()

    @property
    def executed(self) -> int:
        """Requests that were executed, the creation of the model not counted."""
        return max(self.ledger.applied, 0)

    def activity(self) -> str:
        """Return what the model waits for, in words."""
        if self.failure:
            return self.failure
        waiting = sorted(seq for seq in self.ledger.entries if seq > self.ledger.applied)
        trouble = "".join(f"; {each}" for each in (self._snapshot_error, self._store.trouble) if each)
        if not waiting:
            return f"waits for its client's next request; {self.executed} executed{trouble}"
        behind = (f"; {len(waiting) - 1} wait behind it" if len(waiting) > 1 else "") + trouble
        if waiting[0] != self.ledger.applied + 1 or not self.engine.is_up:
            return f"{self.waits_because(waiting[0])[1]}{behind}"
        return (
            f"request {waiting[0]}, {self.ledger.entries[waiting[0]].kind}, is executed or waits for its turn{behind}"
        )

    async def run(self) -> None:
        """Execute requests until the model ends; after a loss of its engine those since its snapshot again."""
        with self.scope:
            incarnation = 0
            while True:
                try:
                    if self.target is not None:
                        self._leave_for(self.target)
                        incarnation = 0
                    incarnation, engine = await self.engine.up(incarnation)
                    lora = LoRA(**self.model.lora)
                    applied = await engine.create_adapter(engine_name(self.model.id), self.model.user_id, lora)
                    self.ledger.rewind(applied)
                    await self._execute(engine)
                    continue
                except (ActorDied, EngineRestarted):
                    continue
                except EngineFailed as error:
                    self.failure = str(error)
                except Exception as error:  # whatever fails ends this model, and not the service with the others
                    log.exception("model %s failed", self.model.id)
                    self.failure = f"{type(error).__name__}: {error}"
                break
        if self.target is not None:
            self.target.models.discard(self.model.id)
        for seq, entry in self.ledger.entries.items():
            if entry.answer is None:
                self._on_answer(seq)

    def _leave_for(self, target: BaseEngine) -> None:
        self.engine.models.discard(self.model.id)
        self.engine, self.target = target, None

    async def _release(self, engine: Any, target: BaseEngine) -> bool:
        """Have the engine write a snapshot and forget the model; False: it keeps the model."""
        self.move_error = await engine.release_adapter(engine_name(self.model.id))
        if self.move_error:
            target.models.discard(self.model.id)
            self.target = None
        return not self.move_error

    async def _execute(self, engine: Any) -> None:
        """Execute requests until the model moves to another engine."""
        store, forgotten = self._store, -1
        while True:
            if self.target is not None and await self._release(engine, self.target):
                return
            seq = self.ledger.next_seq()
            if seq is None or seq in self._writing:
                await self._changed.wait()
                continue
            entry = self.ledger.entries[seq]
            answer, snapshot = await self._answer(engine, entry)
            has_effect = "error" not in answer
            if entry.answer is None:
                # On disk before the client, or the next request, sees it.
                await store.keep(store.set_answer, self.model.id, seq, answer, entry.has_effect and has_effect)
                if self._small_body[0] == seq:
                    self.small_answer = (seq, answer)
            self.worked_at = trio.current_time()
            if self.ledger.finish(seq, True):
                entry.has_effect = entry.has_effect and has_effect
                self._on_answer(seq)
            # Not for each request: it goes through all of the model.
            if snapshot > forgotten:
                await store.attempt(store.forget_bodies, self.model.id, snapshot)
                forgotten = snapshot

    async def _answer(self, engine: Any, entry: LedgerEntry) -> tuple[dict[str, Any], int]:
        """Execute a request; return its answer, and the number up to which a snapshot has all, -1 without one."""
        if entry.kind == CREATE:
            return {"type": CREATE, "model_id": self.model.id}, -1
        seq, body = self._small_body
        if seq != entry.seq:
            body = await self._store.keep(self._store.body, self.model.id, entry.seq)
        try:
            fields, operation = await self._operation(entry, body)
        except (UserError, ValueError) as error:
            return failed(str(error)), -1
        result: OperationResult = await engine.execute(engine_name(self.model.id), entry.seq, operation)
        self._snapshot_error = result.snapshot_error
        if result.error:
            return failed(result.error), result.snapshot
        if isinstance(operation, ForwardPass):
            self._on_tokens(sum(len(each.tokens) for each in operation.data))
            outputs = {"logprobs": result.logprobs, "elementwise_loss": result.losses}
            return {
                "outputs": {name: [[float(each) for each in row] for row in rows] for name, rows in outputs.items()},
                "metrics": {f"{name}:{'sum' if name == 'loss' else 'mean'}": x for name, x in result.metrics.items()},
            }, result.snapshot
        if isinstance(operation, OptimStep):
            return {"metrics": dict(result.metrics)}, result.snapshot
        if isinstance(operation, LoadWeights):
            path = fields.get("path", "str")
            return {"type": "load_weights", "path": path, "model_id": self.model.id}, result.snapshot
        return await self._on_saved(self, fields, result, operation, entry.seq), result.snapshot

    async def _operation(self, entry: LedgerEntry, body: bytes) -> tuple[Fields, AdapterOperation]:
        if entry.kind == "forward_backward":
            request = await decoded_forward_request(body)
            return Fields({}), ForwardPass(request.data, ServiceLoss(request.loss, request.config), request.backward)
        fields = Fields.of_body(body)
        if entry.kind == "optim_step":
            return fields, OptimStep(adam_of(fields))
        if entry.kind == "load_weights":
            if entry.seq > 1:
                raise UserError(
                    "load_weights: allowed only as a model's first request; create a model from the checkpoint: "
                    "create_training_client_from_state(path)"
                )
            checkpoint = self._find_checkpoint(fields.get("path", "str"))
            return fields, LoadWeights(checkpoint.weights, fields.get("optimizer", "bool", False))
        if entry.kind == "save_weights":
            name = fields.get("path", "str", f"{entry.seq:06d}")
            path = f"tinker://{self.model.id}/weights/{name}"
            overwrite = fields.get("overwrite", "bool", False)
            if not overwrite and self._has_checkpoint(path):
                raise UserError(f"{path} exists; with overwrite=True it is replaced")
            return fields, SaveWeights(name, overwrite)
        if entry.kind == "save_weights_external":
            if fields.value.get("age_encryption_recipients"):
                raise WireError("age_encryption_recipients: files are not encrypted here; expected null")
            return fields, SaveWeightsForSampler(fields.get("path", "str"), is_external=True)
        name = fields.get("path", "str", f"ephemeral-{entry.seq:06d}")
        if fields.get("kind", "str", "snapshot") != "snapshot":
            raise WireError(f"kind: {fields.value['kind']!r} is not supported; expected 'snapshot'")
        return fields, SaveWeightsForSampler(name)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
