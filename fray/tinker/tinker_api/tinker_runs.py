"""Sessions, models, samplers, checkpoints and futures of the Tinker API; `run` owns their tasks."""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import trio
from attrs import asdict, evolve

from fray.api.cluster import Cluster
from fray.errors import ActorDied
from fray.tinker.api_store import TinkerCheckpoint, TinkerModel, TinkerSampler, TinkerSession, TinkerStore
from fray.tinker.core.adapter_operations import AdapterOperation, OperationResult, name_of_saved
from fray.tinker.core.keys import ServiceUser
from fray.tinker.core.ledger import LedgerEntry
from fray.tinker.core.limits import DEFAULT_LIMITS, UserLimits, limit_text
from fray.tinker.core.sample_ledger import ANSWER_S, ANSWERS_LIMIT, SampleLedger
from fray.tinker.kept_engine import EngineFailed
from fray.tinker.store import StoreFailed
from fray.tinker.tinker_api.base_engine import AdapterPlan, BaseEngine
from fray.tinker.tinker_api.engine_group import EngineGroup, SamplingEngine
from fray.tinker.tinker_api.model_run import CREATE, ModelRun, UserError, engine_name, failed
from fray.tinker.tinker_api.refusals import Expired, NotFound, TooMany
from fray.tinker.wire.tinker_json import Fields, SampleBody, check_optimizer, lora_of, sample_of, stored_samples
from fray.tinker.wire.tinker_proto import WireError

SWEEP_S = 5.0
"""Pause between two looks for sessions and checkpoints that have expired."""
DIRECT = "direct-"
"""Beginning of the ids of samplers without a session."""
UNLOAD = "unload"
"""End of the id of the future of a model that was unloaded, in the place of a number."""

log = logging.getLogger("fray.tinker")


class TinkerRuns:
    """State of the Tinker API.

    Args:
        store: of the API.
        plan: settings of engines.
        on_use: called with a user, tokens that were trained or generated, and seconds of an engine.
        limits: of each user.
        weights: returns the weights of users' shares of engines; those that are missing have 1.
    """

    def __init__(
        self,
        store: TinkerStore,
        plan: AdapterPlan,
        on_use: Callable[[str, int, float], None] = lambda user_id, tokens, seconds: None,
        limits: UserLimits = DEFAULT_LIMITS,
        weights: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._store, self.plan, self.on_use, self._limits, self._weights = store, plan, on_use, limits, weights
        self.sessions: dict[str, TinkerSession] = {}
        self.models: dict[str, TinkerModel] = {}
        self.samplers: dict[str, TinkerSampler] = {}
        self.checkpoints: dict[str, TinkerCheckpoint] = {}
        self._runs: dict[str, ModelRun] = {}
        self._samples: dict[str, SampleLedger] = {}
        self._direct: dict[tuple[str, str, str | None], str] = {}
        """Sampler of each user, base model and weights for requests that name no sampler."""
        self.groups: dict[str, EngineGroup] = {}
        self._seen: dict[str, float] = {}
        self._listening: Counter[str] = Counter()
        """Connections of each session that wait for an answer: their client is there."""
        self._pending: dict[str, trio.Event] = {}
        self._waiting: Counter[str] = Counter()
        """Requests for samples that wait, by user."""
        self._waiting_samples: Counter[str] = Counter()
        """Samples that these requests ask for."""
        self._nursery: trio.Nursery | None = None
        self._cluster: Cluster | None = None

    async def run(self, cluster: Cluster, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run models and samples until cancelled, those of before a restart first.

        Reports `started` when all are known.
        """
        store = self._store
        self.sessions = await store.call(store.load, TinkerSession)
        self.models = await store.call(store.load, TinkerModel)
        self.samplers = await store.call(store.load, TinkerSampler)
        self.checkpoints = await store.call(store.load, TinkerCheckpoint)
        try:
            await trio.to_thread.run_sync(self.plan.write_tokenizers)
        except OSError as error:
            log.warning("clients find no tokenizer of characters: %s", error)
        # A session has its whole time again: the service may have been away.
        self._seen = dict.fromkeys(self.sessions, trio.current_time())
        async with trio.open_nursery() as self._nursery:
            self._cluster = cluster
            for model in self.models.values():
                # The end of a session may be on disk in part: see `end_session`.
                if model.session_id in self.sessions:
                    self._start_model(model, await store.call(store.entries, model.id))
            for sampler in list(self.samplers.values()):
                if sampler.session_id and sampler.session_id not in self.sessions:
                    del self.samplers[sampler.id]
                    await store.attempt(store.remove, sampler)
                    continue
                entries = await store.call(store.entries, sampler.id)
                self._samples[sampler.id] = SampleLedger(entries, trio.current_time())
                for entry in entries:
                    if entry.answer is None:
                        self._start_sample(sampler, entry.seq, 1)  # so that their bodies need not be read first
            self._nursery.start_soon(self._sweep)
            task_status.started()
            await trio.sleep_forever()

    # Sessions ---------------------------------------------------------------------------------------------------------

    async def create_session(self, user: ServiceUser, fields: Fields) -> TinkerSession:
        """Begin a session. Raises TooMany."""
        mine = sum(session.user_id == user.user_id for session in self.sessions.values())
        if mine >= self._limits.sessions:
            raise TooMany(limit_text(f"{mine} sessions of yours have not ended", "sessions", self._limits.sessions))
        metadata = fields.get("user_metadata", "dict", {})
        session = TinkerSession(f"s{secrets.token_hex(8)}", user.user_id, time.time(), metadata)
        await self._put(session)
        self.sessions[session.id], self._seen[session.id] = session, trio.current_time()
        return session

    def session(self, user: ServiceUser, session_id: str) -> TinkerSession:
        """Return a session that has not ended, and note that its client is there. Raises Expired or NotFound."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Expired(
                f"session {session_id!r:.100} has ended: there was no heartbeat for {self.plan.session_s:g} s, "
                "or it is of another service"
            )
        if session.user_id != user.user_id:
            raise NotFound(f"you have no session {session_id!r:.100}")
        self._seen[session_id] = trio.current_time()
        return session

    async def end_session(self, session: TinkerSession) -> None:
        """End a session: its models and samplers end; its checkpoints stay.

        On a full disk it ends all the same; after a restart it has its time again, and ends again.
        """
        self.sessions.pop(session.id, None)
        self._seen.pop(session.id, None)
        for model in [each for each in self.models.values() if each.session_id == session.id]:
            await self.unload(model)
        for sampler in [each for each in self.samplers.values() if each.session_id == session.id]:
            await self.end_sampler(sampler)
        await self._store.attempt(self._store.remove, session)

    async def end_sampler(self, sampler: TinkerSampler) -> None:
        """End a sampler: its requests are not answered any more."""
        self.samplers.pop(sampler.id, None)
        self._samples.pop(sampler.id, None)
        key = (sampler.user_id, sampler.base_model, sampler.weights)
        # After a restart another one is in its place.
        if self._direct.get(key) == sampler.id:
            del self._direct[key]
        await self._store.attempt(self._store.remove, sampler)
        if sampler.weights is not None:
            # Those saved for it alone, and those of a checkpoint that was removed or replaced meanwhile.
            await self._remove_unused(sampler.base_model, sampler.weights)

    async def _sweep(self) -> None:
        """End sessions without heartbeats, remove checkpoints that have expired, forget old samples."""
        while True:
            await trio.sleep(min(SWEEP_S, self.plan.session_s))
            limit = trio.current_time() - self.plan.session_s
            late = [each for each in self.sessions.values() if self._seen[each.id] < limit]
            for session in [each for each in late if not self._listening[each.id]]:
                log.info("session %s has ended: no heartbeat for %g s", session.id, self.plan.session_s)
                await self.end_session(session)
            now = time.time()
            for checkpoint in list(self.checkpoints.values()):
                if checkpoint.expires_at is not None and checkpoint.expires_at <= now:
                    try:
                        await self.delete_checkpoint(checkpoint)
                    except StoreFailed as error:
                        log.warning("checkpoint %s has expired: %s", checkpoint.id, error)
            await self.forget_samples(trio.current_time())

    # Models -----------------------------------------------------------------------------------------------------------

    async def create_model(self, user: ServiceUser, fields: Fields, body: bytes, kind: str) -> str:
        """Create a model, new (`CREATE`) or of a checkpoint (``load_weights``); return the id of its future.

        Raises:
            WireError: the base model is not served, or a setting is wrong.
            NotFound: there is no such session or checkpoint.
            Expired: the session has ended.
            UserError: the checkpoint may not be loaded.
            TooMany: the user has too many models.
            LedgerConflict: the number was used with another body.
        """
        session = self.session(user, fields.get("session_id", "str"))
        number = fields.get("model_seq_id", "int")
        model_id = f"{session.id}:train:{number}"
        model = self.models.get(model_id)
        if model is None:
            mine = [each for each in self.models.values() if each.user_id == user.user_id and each.session_id]
            if len(mine) >= self._limits.models:
                raise TooMany(limit_text(f"{len(mine)} models of yours are there", "models", self._limits.models))
            check_optimizer(fields)
            if kind == CREATE:
                base_model = self.plan.base_model_of(fields.get("base_model", "str"))
                lora = asdict(lora_of(fields, int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4], "big")))
            else:
                checkpoint = self.find_checkpoint(user.user_id, fields.get("path", "str"))
                base_model, lora = checkpoint.base_model, checkpoint.lora
                if self.plan.base_model_of(fields.get("base_model", "str", base_model)) != base_model:
                    raise WireError(f"base_model: the checkpoint is of {base_model!r}")
            metadata = fields.get("user_metadata", "dict", None)
            model = TinkerModel(model_id, user.user_id, session.id, base_model, lora, time.time(), metadata)
            # Before the first await: a repetition finds it, and its run.
            self.models[model_id] = model
            self._start_model(model, [])
            try:
                await self._put(model)
            except StoreFailed:
                del self.models[model_id]
                self._runs.pop(model_id).scope.cancel()
                raise
        return await self.submit(user, kind, model_id, 0, body)

    def check_datums(self, count: int) -> None:
        """Raise WireError if a request has more datums than a user may send at once."""
        if count > self._limits.datums:
            raise WireError(limit_text(f"data: {count} datums", "datums", self._limits.datums))

    def model(self, user: ServiceUser, model_id: str) -> TinkerModel:
        """Return a model, whose session may have ended. Raises NotFound."""
        model = self.models.get(model_id)
        if model is None or model.user_id != user.user_id:
            raise NotFound(f"you have no model {model_id!r:.100}")
        return model

    @property
    def engines(self) -> Mapping[str, Sequence[BaseEngine]]:
        """Engines that were needed, by base model."""
        return {base_model: group.engines for base_model, group in self.groups.items()}

    def run_of(self, model_id: str) -> ModelRun | None:
        """Return the requests of a model; None: its session has ended."""
        return self._runs.get(model_id)

    def waiting_of(self, sampler_id: str) -> int:
        """Return how many requests for samples of a sampler wait."""
        ledger = self._samples.get(sampler_id)
        return 0 if ledger is None else sum(entry.answer is None for entry in ledger.entries.values())

    def waiting_by_user(self) -> dict[str, int]:
        """Return how many requests for samples of each user wait, those without a future included."""
        return {user_id: count for user_id, count in self._waiting.items() if count}

    def shown_models(self) -> list[dict[str, Any]]:
        """Return facts about the models whose sessions have not ended."""
        return [
            {
                "model_id": model_id,
                "user_id": run.model.user_id,
                "base_model": run.model.base_model,
                "rank": run.model.lora["rank"],
                "requests": run.ledger.last + 1,
                "executed": run.ledger.applied + 1,
                "error": run.failure,
            }
            for model_id, run in self._runs.items()
        ]

    async def submit(
        self, user: ServiceUser, kind: str, model_id: str, seq: int, body: bytes, *, has_effect: bool = True
    ) -> str:
        """Take a request of a model and return the id of its future.

        Raises:
            NotFound: there is no such model.
            Expired: its session has ended.
            LedgerConflict: the number was used with another body, or too many requests wait.
        """
        model, run = self.model(user, model_id), self._runs.get(model_id)
        if run is None:
            raise Expired(f"model {model_id} was unloaded, or its session has ended; its checkpoints can be loaded")
        self.session(user, model.session_id)
        request_id = f"{model_id}:{seq}"
        digest = hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        if seq not in run.ledger.entries:
            self._pending.setdefault(request_id, trio.Event())
        try:
            await run.receive(kind, seq, body, digest, has_effect)
        except BaseException:
            if seq not in run.ledger.entries:
                self._pending.pop(request_id, None)
            raise
        return request_id

    async def unload(self, model: TinkerModel) -> None:
        """End a model; its checkpoints stay."""
        run = self._runs.pop(model.id, None)
        self.models[model.id] = evolve(model, session_id="")
        await self._store.attempt(self._store.put, self.models[model.id])
        if run is not None:
            run.scope.cancel()
            # Its answers stay; nothing is executed again.
            await self._store.attempt(self._store.forget_bodies, model.id, run.ledger.last)
            assert self._nursery is not None
            self._nursery.start_soon(self._remove_adapter, model, run.engine)

    async def _remove_adapter(self, model: TinkerModel, trained_by: BaseEngine) -> None:
        incarnation = 0
        while True:
            try:
                incarnation, engine = await trained_by.up(incarnation)
                await engine.remove_adapter(engine_name(model.id))
            except ActorDied:
                continue
            except EngineFailed:
                pass  # with all that it had in memory
            except Exception as error:  # noqa: BLE001 (it leaves memory when another one needs its place)
                log.warning("model %s is not removed from its engine: %s", model.id, error)
            # Not before: an engine without models may end.
            trained_by.models.discard(model.id)
            return

    def _engines_of(self, base_model: str) -> EngineGroup:
        """Return the engines of a base model; they are started if they were not, or have failed."""
        if base_model not in self.groups:
            assert self._nursery is not None
            self.groups[base_model] = EngineGroup(base_model, self.plan, self._start_engine, self._runs.values)
            self._nursery.start_soon(self.groups[base_model].scale)
        self.groups[base_model].renew()
        return self.groups[base_model]

    def _start_engine(self, engine: BaseEngine) -> None:
        assert self._nursery is not None
        assert self._cluster is not None
        on_use = lambda user_id, seconds: self.on_use(user_id, 0, seconds)  # noqa: E731
        self._nursery.start_soon(engine.keep, self._cluster, on_use, self._weights)

    def _start_model(self, model: TinkerModel, entries: list[LedgerEntry]) -> None:
        run = ModelRun(
            model,
            self._store,
            entries,
            self._engines_of(model.base_model).place(model.id),
            lambda path: self.find_checkpoint(model.user_id, path),
            lambda path: path in self.checkpoints,
            self._saved,
            lambda seq: self._answered(f"{model.id}:{seq}"),
            lambda tokens: self.on_use(model.user_id, tokens, 0.0),
        )
        self._runs[model.id] = run
        for entry in entries:
            if entry.answer is None:
                self._pending[f"{model.id}:{entry.seq}"] = trio.Event()
        assert self._nursery is not None
        self._nursery.start_soon(run.run)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    async def _saved(
        self, run: ModelRun, fields: Fields, result: OperationResult, operation: AdapterOperation, seq: int
    ) -> dict[str, Any]:
        """Keep what an operation has saved; return the answer."""
        model = run.model
        folder, name = name_of_saved(result.path)
        number = None if folder != "sampler_weights" else fields.get("sampling_session_seq_id", "int", None)
        if number is not None and fields.value.get("path") is None:
            sampler_id = f"{model.session_id}:sample:{number}"
            sampler = TinkerSampler(sampler_id, model.user_id, model.session_id, model.base_model, result.path)
            self._add_sampler(sampler)
            await self._store.keep(self._store.put, sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}
        ttl = fields.get("ttl_seconds", "int", None)
        now = time.time()
        checkpoint = TinkerCheckpoint(
            f"tinker://{model.id}/{folder}/{name}",
            *(model.user_id, model.id, model.base_model, model.lora, result.path, result.size, now),
            expires_at=None if ttl is None else now + ttl,
            metadata=fields.get("user_metadata", "dict", None),
        )
        # The files are there: the answer waits until the store has them, too.
        await self._store.keep(self._store.put, checkpoint)
        replaced = self.checkpoints.get(checkpoint.id, checkpoint)
        self.checkpoints[checkpoint.id] = checkpoint
        if replaced.weights != checkpoint.weights:
            await self._remove_unused(replaced.base_model, replaced.weights)
        kinds = {"weights": "save_weights", "external_weights": "save_weights_external"}
        return {"type": kinds.get(folder, "save_weights_for_sampler"), "path": checkpoint.id}

    def find_checkpoint(self, user_id: str, path: str) -> TinkerCheckpoint:
        """Return a checkpoint that a user may load. Raises UserError."""
        checkpoint = self.checkpoints.get(path)
        if checkpoint is None or (checkpoint.user_id != user_id and not checkpoint.is_public):
            raise UserError(f"path: there is no checkpoint {path!r:.200} that you may load")
        return checkpoint

    async def put_checkpoint(self, checkpoint: TinkerCheckpoint) -> None:
        """Write a changed checkpoint. Raises StoreFailed: it has not changed."""
        await self._put(checkpoint)
        self.checkpoints[checkpoint.id] = checkpoint

    async def delete_checkpoint(self, checkpoint: TinkerCheckpoint) -> None:
        """Remove a checkpoint with its files, unless a sampler of a session that has not ended has them.

        Raises:
            StoreFailed: its record cannot be removed; the files are, if they may be, and it can be deleted again.
        """
        self.checkpoints.pop(checkpoint.id, None)
        is_removed = await self._store.attempt(self._store.remove, checkpoint)
        await self._remove_unused(checkpoint.base_model, checkpoint.weights)
        if not is_removed:
            # SQLite needs room to remove a row, which there may be now.
            try:
                await self._store.call(self._store.remove, checkpoint)
            except StoreFailed:
                self.checkpoints.setdefault(checkpoint.id, checkpoint)
                raise

    async def _remove_unused(self, base_model: str, weights: str) -> None:
        """Remove saved weights, unless a checkpoint or a sampler has them."""
        used = {each.weights for each in self.samplers.values()} | {each.weights for each in self.checkpoints.values()}
        if weights in used:
            return
        for engine in self.engines.get(base_model, ()):
            if engine.is_up:
                with suppress(ActorDied, EngineFailed):  # it has nothing in memory any more
                    await engine.unless_lost((await engine.up())[1].remove_saved, weights)
        path = self.plan.directory_of(base_model) / weights
        await trio.to_thread.run_sync(lambda: shutil.rmtree(path, ignore_errors=True))

    # Samples ----------------------------------------------------------------------------------------------------------

    async def create_sampler(self, user: ServiceUser, fields: Fields) -> TinkerSampler:
        """Create a sampler of a base model or a checkpoint.

        Raises:
            WireError: there is neither, or the base model is not served.
            Expired: the session has ended.
            NotFound: it is another user's.
            UserError: the checkpoint may not be used.
        """
        session = self.session(user, fields.get("session_id", "str"))
        sampler_id = f"{session.id}:sample:{fields.get('sampling_session_seq_id', 'int')}"
        if sampler_id not in self.samplers:
            base_model, weights, path = self._weights_of(user, fields)
            await self._put_sampler(TinkerSampler(sampler_id, user.user_id, session.id, base_model, weights, path))
        return self.samplers[sampler_id]

    def _weights_of(self, user: ServiceUser, fields: Fields) -> tuple[str, str | None, str | None]:
        """Return base model, path for the engine and path for clients of the weights that a body asks for."""
        path = fields.get("model_path", "str", None)
        if path is not None:
            checkpoint = self.find_checkpoint(user.user_id, path)
            return checkpoint.base_model, checkpoint.weights, path
        return self.plan.base_model_of(fields.get("base_model", "str")), None, None

    def _add_sampler(self, sampler: TinkerSampler) -> None:
        self.samplers[sampler.id] = sampler
        self._samples.setdefault(sampler.id, SampleLedger())

    async def _put_sampler(self, sampler: TinkerSampler) -> None:
        """Add a sampler and write it. Raises StoreFailed: it is not there."""
        self._add_sampler(sampler)
        try:
            await self._put(sampler)
        except StoreFailed:
            del self.samplers[sampler.id], self._samples[sampler.id]
            raise

    def sampler(self, user: ServiceUser, sampler_id: str) -> TinkerSampler:
        """Return a sampler. Raises NotFound if there is none, or its session has ended."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.user_id != user.user_id:
            raise NotFound(f"you have no sampler {sampler_id!r:.100}, or its session has ended")
        return sampler

    async def submit_sample(self, user: ServiceUser, fields: Fields, body: bytes) -> tuple[str, int]:
        """Take a request for samples; return the id of its future and the number of samples.

        Raises:
            WireError: the request is wrong.
            NotFound: there is no such sampler.
            UserError: the checkpoint may not be used.
            TooMany: too many requests of the user wait.
            LedgerConflict: the number was used with another body.
        """
        wanted = sample_of(fields)
        sampler = await self._sampler_of(user, fields, wanted)
        ledger = self._samples[sampler.id]
        seq = wanted.seq_id if wanted.sampling_session_id else ledger.next_seq
        digest = hashlib.sha256(body).hexdigest()
        count = wanted.request.num_samples
        if count > self._limits.samples:
            raise WireError(limit_text(f"num_samples: {count}", "samples", self._limits.samples))
        if seq not in ledger.entries:
            self._check_room(user.user_id, 1, count)
        if ledger.receive(seq, "asample", digest):
            self._pending[f"{sampler.id}:{seq}"] = trio.Event()
            try:
                with trio.CancelScope(shield=True):
                    await self._store.call(self._store.add, sampler.id, ledger.entries[seq], body)
            except StoreFailed:
                # A repetition is received again.
                ledger.withdraw(seq)
                self._answered(f"{sampler.id}:{seq}")
                raise
            self._start_sample(sampler, seq, count)
        return f"{sampler.id}:{seq}", count

    def _check_room(self, user_id: str, requests: int, samples: int = 0) -> None:
        for name, waiting, more, what in (
            ("sample_requests", self._waiting, requests, "requests for samples"),
            ("samples", self._waiting_samples, samples, "samples"),
        ):
            limit = getattr(self._limits, name)
            if waiting[user_id] + more > limit:
                raise TooMany(limit_text(f"{waiting[user_id]} {what} of yours wait, and these are {more}", name, limit))

    @contextmanager
    def waiting_samples(self, user_id: str, count: int) -> Iterator[None]:
        """Count requests for samples that have no future as waiting. Raises TooMany."""
        self._check_room(user_id, count)
        self._waiting[user_id] += count
        try:
            yield
        finally:
            self._waiting[user_id] -= count

    async def engine_up(
        self, base_model: str, after: int = 0, weights: str | None = None
    ) -> tuple[int, SamplingEngine]:
        """Wait until an engine for samples is ready, as `EngineGroup.up`. Raises EngineFailed."""
        return await self._engines_of(base_model).up(after, weights)

    async def _sampler_of(self, user: ServiceUser, fields: Fields, wanted: SampleBody) -> TinkerSampler:
        if wanted.sampling_session_id:
            sampler = self.sampler(user, wanted.sampling_session_id)
            self.session(user, sampler.session_id)
            return sampler
        base_model, weights, path = self._weights_of(user, fields)
        # Requests without a sampler have one for each of their weights, which ends when its answers are forgotten.
        key = (user.user_id, base_model, weights)
        if (sampler_id := self._direct.get(key)) is None:
            sampler_id = self._direct[key] = f"{DIRECT}{secrets.token_hex(8)}:sample:0"
            try:
                await self._put_sampler(TinkerSampler(sampler_id, user.user_id, "", base_model, weights, path))
            except StoreFailed:
                del self._direct[key]
                raise
        return self.samplers[sampler_id]

    async def forget_samples(self, now: float) -> None:
        """Forget answers that are old or too many, and samplers without a session that have none any more.

        Args:
            now: seconds of Trio's clock.
        """
        for sampler in [each for each in self.samplers.values() if self._samples[each.id].has_old(now)]:
            if (ledger := self._samples.get(sampler.id)) is None:
                continue  # its session has ended meanwhile
            old = ledger.forget(now)
            # What cannot be removed is forgotten again after a restart.
            if sampler.session_id or ledger.entries:
                await self._store.attempt(self._store.forget_requests, sampler.id, old)
                continue
            await self.end_sampler(sampler)

    def _start_sample(self, sampler: TinkerSampler, seq: int, count: int) -> None:
        assert self._nursery is not None
        self._pending.setdefault(f"{sampler.id}:{seq}", trio.Event())
        self._waiting[sampler.user_id] += 1
        self._waiting_samples[sampler.user_id] += count
        self._nursery.start_soon(self._sample, sampler, seq, count)

    async def _sample(self, sampler: TinkerSampler, seq: int, count: int) -> None:
        """Have one request answered; on another engine if the first is lost, with the same seed."""
        store, request_id = self._store, f"{sampler.id}:{seq}"
        try:
            # The same after a restart, so that the answer does not depend on how often it is computed.
            seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:6], "big")
            fields = Fields.of_body(await store.keep(store.body, sampler.id, seq))
            wanted = sample_of(fields, sampler.weights, seed)
            incarnation = 0
            while True:
                try:
                    incarnation, engine = await self.engine_up(sampler.base_model, incarnation, sampler.weights)
                    result = await engine.sample(sampler.user_id, wanted.request)
                    answer = stored_samples(result, wanted)
                    self.on_use(sampler.user_id, sum(len(each.tokens) for each in result.sequences), 0.0)
                except ActorDied:
                    continue
                except EngineFailed as error:
                    answer = failed(str(error), "server")
                except (ValueError, FileNotFoundError, LookupError) as error:
                    answer = failed(str(error))
                except Exception as error:  # whatever fails ends this request, and not the service with the others
                    log.exception("request %s failed", request_id)
                    answer = failed(f"{type(error).__name__}: {error}", "server")
                break
            await store.keep(store.set_answer, sampler.id, seq, answer, False)
            if (ledger := self._samples.get(sampler.id)) is not None:
                ledger.finish(seq, trio.current_time())
        except LookupError:
            log.info("request %s has gone with its session", request_id)
        finally:
            self._waiting[sampler.user_id] -= 1
            self._waiting_samples[sampler.user_id] -= count
            self._answered(request_id)

    # Futures ----------------------------------------------------------------------------------------------------------

    async def answer(self, user: ServiceUser, request_id: str, wait_s: float) -> dict[str, Any]:
        """Return the answer to a request, or one of the type ``try_again`` if there is none within ``wait_s`` seconds.

        Raises:
            NotFound: there is no such request.
            Expired: its answer was forgotten; it may be sent again.
        """
        owner, _, number = request_id.rpartition(":")
        if not number.isdecimal() and number != UNLOAD:
            raise NotFound(f"request_id: no request {request_id!r:.100}")
        record = self.models.get(owner) or self.samplers.get(owner)
        if record is None and owner.startswith(DIRECT):
            raise _forgotten(request_id)
        if record is None or record.user_id != user.user_id:
            raise NotFound(f"request_id: no request {request_id!r:.100}, or its session has ended")
        if number == UNLOAD:
            # The model was unloaded before the id was given.
            return {"type": "unload_model", "model_id": owner}
        seq = int(number)
        run = self._runs.get(owner)
        if (event := self._pending.get(request_id)) is not None and not (run is not None and run.failure):
            self._listening[record.session_id] += 1
            try:
                with trio.move_on_after(wait_s):
                    await event.wait()
            finally:
                self._listening[record.session_id] -= 1
        if record.session_id in self._seen:
            self._seen[record.session_id] = trio.current_time()
        if run is not None and run.small_answer[0] == seq:
            return run.small_answer[1]
        try:
            answer: dict[str, Any] | None = await self._store.call(self._store.answer, owner, seq)
        except LookupError:
            if isinstance(record, TinkerSampler):
                raise _forgotten(request_id) from None
            raise NotFound(f"request_id: no request {request_id!r:.100}") from None
        if answer is not None:
            return answer
        run = self._runs.get(owner)
        if run is not None and run.failure:
            return failed(run.failure, "server")
        if isinstance(record, TinkerModel) and run is None:
            return failed(f"model {owner} was unloaded, or its session has ended, before this request was executed")
        if run is not None:
            state, reason = run.waits_because(seq)
        elif self._store.trouble:
            state, reason = "paused_capacity", self._store.trouble
        else:
            state, reason = self._engines_of(record.base_model).queue_state(user.user_id)
            reason = reason or f"{self._waiting[user.user_id]} requests for samples of yours wait"
        return {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": state,
            "queue_state_reason": reason,
        }

    def _answered(self, request_id: str) -> None:
        if (event := self._pending.pop(request_id, None)) is not None:
            event.set()

    async def _put(self, *records: Any) -> None:
        with trio.CancelScope(shield=True):
            await self._store.call(self._store.put, *records)


def _forgotten(request_id: str) -> Expired:
    return Expired(
        f"request {request_id!r:.100} has no answer here: answers with samples are kept for {ANSWER_S:g} s, and the "
        f"newest {ANSWERS_LIMIT} of a sampler; send it again"
    )
