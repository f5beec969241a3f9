"""Runner of one inference job: its engine, which answers OpenAI's requests at the address of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from fray.errors import ActorDied, FrayError, InvalidRequest
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.served_model import ServedModel
from fray.rl.inference.server import InferenceServer
from fray.rl.model_spec import ModelSpec
from fray.rl.tokenizers import Tokenizer, load_tokenizer
from fray.tinker.core.inference_config import InferenceSettings
from fray.tinker.core.limits import limit_text
from fray.tinker.engine_runner import EnginePlan, EngineRunner, JobCallbacks
from fray.tinker.kept_engine import EngineFailed
from fray.tinker.replaced_engine import ReplacedEngine
from fray.tinker.store import ServiceJob

USE_S = 2.0
"""Seconds between two readings of the time that the engine was busy."""


class InferenceRunner(EngineRunner):
    """One inference job: its engine answers requests once it has started.

    Args:
        job: the job.
        settings: of the job.
        model: that its engine loads; None: it is not served any more.
        plan: settings of its engine.
        callbacks: of the job.
    """

    def __init__(
        self,
        job: ServiceJob,
        settings: InferenceSettings,
        model: ModelSpec | None,
        plan: EnginePlan,
        callbacks: JobCallbacks,
    ) -> None:
        super().__init__(job, plan, callbacks)
        self._settings, self._model = settings, model
        self._max_length = 0
        self._tokenizer: Tokenizer | None = None
        self.requests = 0
        """Prompts that were received."""
        self.unfinished = 0
        """Prompts that are not answered yet."""
        self.global_steps: int | None = None
        """None: it trains nothing."""
        self.seconds_left = None
        """None: it has no planned end."""
        self._is_loaded = False

    @property
    def executed(self) -> int:
        """Prompts that were answered, or whose clients have left."""
        return self.requests - self.unfinished

    @property
    def is_ready(self) -> bool:
        """True if its engine has loaded the model, and is not lost."""
        return self._is_loaded and self._kept.is_up

    def activity(self) -> str:
        """Return what its engine does, or waits for, in words."""
        restarts = f"; its engine was restarted {self.starts - 1} times" if self.starts > 1 else ""
        state = f"answers {self.unfinished} prompts" if self.unfinished else "waits for its client's next request"
        if not self.is_ready:
            state = f"its engine is being started; {self.unfinished} prompts wait for it"
        return f"{state}; {self.executed} answered{restarts}"

    # Requests ---------------------------------------------------------------------------------------------------------

    async def model(self) -> ServedModel:
        """Return the model for OpenAI's routes. Raises InvalidRequest if it has no tokenizer."""
        if self._tokenizer is None:
            if self._model is None:
                raise ApiError(f"model {self.name!r} is not served any more", status=409, code="job_ended")
            self._tokenizer = await trio.to_thread.run_sync(load_tokenizer, self._model)
        server = ReplacedEngine(
            self._up,
            lambda engine, request: engine.generate(request),
            lambda engine, request: engine.stream.stream(request),
            self._length,
            self._counted,
            lambda tokens: self._callbacks.on_use(tokens, 0.0),
        )
        return ServedModel(server, self._settings.model_path, self._tokenizer)

    @property
    def name(self) -> str:
        """Name of the model, for clients."""
        return self._settings.model_path

    async def _up(self, after: int) -> tuple[int, Any]:
        try:
            return await self._kept.up(after)
        except EngineFailed as error:
            raise ApiError(str(error), status=409, code="job_ended") from None

    async def _length(self) -> int:
        if not self._max_length:
            _, engine = await self._up(0)
            self._max_length = (await engine.status.options(idempotent=True)())["max_length"]
        return self._max_length

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        if count > self._callbacks.room():
            limit = limit_text("too many requests wait", "queued_requests", self._plan.limits.queued_requests)
            raise ApiError(limit, status=429, code="too_many_requests")
        self.requests += count
        self.unfinished += count
        try:
            yield
        finally:
            self.unfinished -= count
            self.see_client()

    # Engine -----------------------------------------------------------------------------------------------------------

    async def _create(self, scope: Any) -> Any:
        if self._model is None:
            raise InvalidRequest(f"model_path: {self.name!r} is not served any more")
        make = ModelEngine(self._model, max_length=self._settings.max_model_len, threads=self._plan.threads)
        return await self._create_actor(scope, InferenceServer, make)

    async def _follow(self) -> None:
        """Note each engine that is ready, and the time for which it is busy. Raises what its loading raised."""
        incarnation, has_started = 0, False
        while True:
            incarnation, engine = await self._kept.up(incarnation)
            try:
                # Returns when the model is loaded.
                await engine.status.options(idempotent=True)()
                self._is_loaded = True
                await self._note_start()
                has_started, busy_s = True, 0.0
                while True:
                    await trio.sleep(USE_S)
                    _, now_s = await engine.busy_time.options(idempotent=True)()
                    self._callbacks.on_use(0, now_s - busy_s)
                    busy_s = now_s
            except ActorDied:
                pass
            except FrayError:
                # A model that cannot be loaded: no other start would do better.
                if not has_started:
                    raise
            finally:
                self._is_loaded = False
