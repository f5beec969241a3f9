"""Runner of one job: its ledger, its engine, and the answers for which connections wait."""

from __future__ import annotations

import hashlib
from collections import deque
from functools import partial
from typing import Any

import trio

from fray.errors import ActorDied
from fray.tinker.core.ledger import Ledger, LedgerEntry, LedgerFull, Receipt
from fray.tinker.core.limits import limit_text
from fray.tinker.core.training_session import EFFECTS
from fray.tinker.engine import TrainingEngine
from fray.tinker.engine_runner import EnginePlan, EngineRunner, JobCallbacks
from fray.tinker.job_directories import directory_of
from fray.tinker.kept_engine import EngineRestarted
from fray.tinker.store import ServiceJob, ServiceStore, StoreFailed
from fray.tinker.training_runner import EngineAnswer

STEPS_MEASURED = 20
"""Steps from which the end of a job is estimated."""


class JobRunner(EngineRunner):
    """One training job: takes its requests from the beginning, and executes them once its engine has started.

    Args:
        job: the job.
        plan: settings of its engine.
        store: of the service.
        entries: requests of before a restart of the service.
        callbacks: of the job.
    """

    def __init__(
        self,
        job: ServiceJob,
        plan: EnginePlan,
        store: ServiceStore,
        entries: list[LedgerEntry],
        callbacks: JobCallbacks,
    ) -> None:
        super().__init__(job, plan, callbacks)
        self._job, self._store = job, store
        self.ledger = Ledger(entries)
        self._begun_at: float | None = None
        """Time at which the engine was given the request that it executes."""
        self._receiving = trio.Lock()
        self._stored = self.ledger.last
        """Highest number that is on disk."""
        self._changed = trio.Event()
        self.ended = ""
        """Reason why no request is executed any more; empty: the job has not ended."""
        self._snapshot_error = ""
        self.global_steps = 0
        self.is_initialized = False
        self.generation: dict[str, Any] = {}
        self._planned_steps: int | None = None
        self._step_times: deque[float] = deque(maxlen=STEPS_MEASURED)
        """Times at which the latest steps ended, since the service began."""
        for entry in sorted(entries, key=lambda entry: entry.seq):
            self._note(entry)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def receive(self, kind: str, body: bytes, request_id: str = "") -> int:
        """Take a request and return its number, once it is on disk.

        Raises:
            LedgerFull: requests of its user that are not executed have reached their limit.
            LedgerConflict: its id was used with another body, or too many requests wait.
            StoreFailed: it cannot be written; a repetition is received again.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        # One at a time: a request is executed when it is on disk, and in the order in which they were numbered.
        async with self._receiving:
            try:
                receipt: Receipt = self.ledger.receive(
                    kind, digest, request_id=request_id, has_effect=EFFECTS[kind], room=self._callbacks.room()
                )
            except LedgerFull:
                limit = self._plan.limits.queued_requests
                raise LedgerFull(limit_text("too many requests wait", "queued_requests", limit)) from None
            entry = self.ledger.entries[receipt.seq]
            entry.listeners += 1
            if receipt.is_new:
                try:
                    with trio.CancelScope(shield=True):
                        await self._store.call(self._store.add_request, self.job_id, entry, body)
                except StoreFailed:
                    self.ledger.withdraw(receipt.seq)
                    raise
                self._stored = receipt.seq
                self._wake()
        return receipt.seq

    async def answer_of(self, seq: int) -> tuple[int, dict[str, Any]]:
        """Wait for the answer to a request; return the status of HTTP and the body."""
        entry = self.ledger.entries[seq]
        while entry.answer is None:
            if self.ended:
                return 409, {"detail": self.ended}
            await self._changed.wait()
        return entry.answer["http"], entry.answer["body"]

    @property
    def unfinished(self) -> int:
        """Requests that are not executed yet."""
        return self.ledger.last - self.ledger.applied

    @property
    def requests(self) -> int:
        """Requests that were received."""
        return self.ledger.last

    @property
    def executed(self) -> int:
        """Requests that were executed."""
        return self.ledger.applied

    def activity(self) -> str:
        """Return what its engine does, or waits for, in words."""
        restarts = f"; its engine was restarted {self.starts - 1} times" if self.starts > 1 else ""
        restarts += "".join(f"; {each}" for each in (self._snapshot_error, self._store.trouble) if each)
        waiting = self.unfinished
        # A request that was sent to an engine that was lost since waits for the next one.
        if self._begun_at is None or not self.is_up:
            doing = "waits for its client's next request" if not waiting else f"{waiting} requests wait for its engine"
            return f"{doing}; {self.ledger.applied} executed{restarts}"
        entry = self.ledger.entries[self.ledger.applied + 1]
        seconds = trio.current_time() - self._begun_at
        behind = f"; {waiting - 1} wait behind it" if waiting > 1 else ""
        return f"executes request {entry.seq}, {entry.kind}, for {seconds:.1f} s{behind}{restarts}"

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds until its planned steps are done; None: not known."""
        times = self._step_times
        if not self._planned_steps or len(times) < 2:
            return None
        step_s = (times[-1] - times[0]) / (len(times) - 1)
        end = times[-1] + step_s * (self._planned_steps - self.global_steps)
        return max(end - trio.current_time(), 0.0)

    def note_step(self, number: int) -> None:
        """Note that a training step has ended now."""
        self.global_steps = number
        self._step_times.append(trio.current_time())

    async def leave(self, seq: int, *, was_sent: bool) -> None:
        """Note that a connection that waited for an answer has it, or has ended."""
        entry = self.ledger.entries[seq]
        entry.listeners -= 1
        self.see_client()
        if was_sent and not entry.was_sent:
            entry.was_sent = True
            await self._store.attempt(self._store.set_sent, self.job_id, seq)

    def end(self, reason: str) -> None:
        """End the engine; requests that wait are answered with the reason."""
        self.ended = reason
        super().end(reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _note(self, entry: LedgerEntry) -> None:
        """Keep what `status` of the training server shows."""
        if entry.answer is None or entry.answer["http"] != 200:
            return
        body = entry.answer["body"]
        if entry.kind == "init_workers":
            self.is_initialized = True
            self._planned_steps = body.get("result", {}).get("total_steps")
        elif entry.kind in ("train_step", "resume") and "global_steps" in body:
            self.global_steps = body["global_steps"]
        generation = body.get({"set_generation_config": "config", "resume": "generation_config"}.get(entry.kind, ""))
        if generation is not None:
            self.generation = {key: value for key, value in generation.items() if value is not None}

    # Engine -----------------------------------------------------------------------------------------------------------

    async def _create(self, scope: Any) -> Any:
        plan = self._plan
        find = partial(directory_of, plan.directory, self.job_id, is_of_user=plan.on_behalf_of is not None)
        directory = await trio.to_thread.run_sync(find)
        return await self._create_actor(
            scope, TrainingEngine, plan.models, self._job.config, directory, plan.threads, plan.limits
        )

    async def _follow(self) -> None:
        incarnation = 0
        while True:
            incarnation, engine = await self._kept.up(incarnation)
            self._begun_at = None
            try:
                self.ledger.rewind(await engine.begin())
                await self._note_start()
                await self._execute(engine)
            except (ActorDied, EngineRestarted):
                continue  # the next one is there, or comes, or none does

    async def _execute(self, engine: Any) -> None:
        """Execute requests, one after another, each when it is on disk; after a snapshot those since it first."""
        store = self._store
        while True:
            seq = self.ledger.next_seq()
            if seq is None or seq > self._stored:
                await self._changed.wait()
                continue
            entry = self.ledger.entries[seq]
            stored = await store.keep(store.body_of, self.job_id, seq)
            self._begun_at = trio.current_time()
            answer: EngineAnswer = await engine.execute(seq, entry.kind, stored.body, stored.scores)
            self._callbacks.on_use(answer.tokens, trio.current_time() - self._begun_at)
            self._begun_at = None
            result = {"http": answer.status, "body": answer.body}
            if entry.answer is None:
                # On disk before the client, or the next request, sees it.
                if answer.checkpoint:
                    # First: a client that has the path may use it, also if the service is lost between the two.
                    await store.keep(store.add_checkpoint, self.job_id, answer.checkpoint, answer.global_steps)
                await store.keep(store.set_answer, self.job_id, seq, result, answer.scores, not answer.is_failure)
            # A client that reads no answer for long is not gone before it.
            self.see_client()
            if self.ledger.finish(seq, result):
                if answer.is_failure:
                    entry.has_effect = False
                self._note(entry)
                if entry.kind == "train_step" and not answer.is_failure:
                    self.note_step(self.global_steps)
            self._snapshot_error = answer.snapshot_error
            self._wake()
            if answer.snapshot:
                await store.attempt(store.forget_bodies, self.job_id, answer.snapshot)
