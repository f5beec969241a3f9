"""Runner of one inference job: its engine, which answers OpenAI's requests at the address of the job."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from fray.api.cluster import Cluster
from fray.errors import ActorDied, FrayError, InvalidRequest
from fray.model.specs import ActorConfig
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.served_model import ServedModel
from fray.rl.inference.server import InferenceServer
from fray.rl.model_spec import ModelSpec
from fray.rl.tokenizers import Tokenizer, load_tokenizer
from fray.tinker.core.inference_config import InferenceSettings
from fray.tinker.core.limits import limit_text
from fray.tinker.job_runner import RESTART_PERIOD_S, RESTARTS, EnginePlan
from fray.tinker.kept_engine import EngineFailed, KeptEngine
from fray.tinker.replaced_engine import ReplacedEngine
from fray.tinker.store import ServiceJob
from fray.tracebacks import failure_text

USE_S = 2.0
"""Seconds between two readings of the time that the engine was busy."""

log = logging.getLogger("fray.tinker")


class InferenceRunner:
    """One inference job that has been accepted: runs its engine once it may start.

    Args:
        job: the job.
        settings: of the job.
        model: that its engine loads; None: it is not served any more.
        plan: settings of its engine.
        on_start: called when its engine is ready for the first time.
        on_failure: called with the reason for which it cannot run.
        on_use: called with tokens that were generated, and seconds for which the engine was busy.
        room: returns how many requests its user may add.
    """

    def __init__(
        self,
        job: ServiceJob,
        settings: InferenceSettings,
        model: ModelSpec | None,
        plan: EnginePlan,
        on_start: Callable[[], Awaitable[None]],
        on_failure: Callable[[str], Awaitable[None]],
        on_use: Callable[[int, float], None],
        room: Callable[[], int],
    ) -> None:
        self.job_id, self._settings, self._model, self._plan = job.job_id, settings, model, plan
        self._on_start, self._on_failure, self._on_use, self._room = on_start, on_failure, on_use, room
        self._kept = KeptEngine(f"tinker-{job.job_id}", self._create)
        self._scope = trio.CancelScope()
        self._max_length = 0
        self._tokenizer: Tokenizer | None = None
        self.seen_at = trio.current_time()
        """Time of its client's last request, or of the last answer to one."""
        self.requests = 0
        """Prompts that were received."""
        self.unfinished = 0
        """Prompts that are not answered yet."""
        self.global_steps: int | None = None
        """None: it trains nothing."""
        self._is_loaded = False

    @property
    def executed(self) -> int:
        """Prompts that were answered, or whose clients have left."""
        return self.requests - self.unfinished

    @property
    def starts(self) -> int:
        """Starts of its engine, since the service began."""
        return self._kept.starts

    @property
    def is_ready(self) -> bool:
        """True if its engine has loaded the model, and is not lost."""
        return self._is_loaded and self._kept.is_up

    def see_client(self) -> None:
        """Note that its client exists."""
        self.seen_at = trio.current_time()

    def activity(self) -> str:
        """Return what its engine does, or waits for, in words."""
        restarts = f"; its engine was restarted {self.starts - 1} times" if self.starts > 1 else ""
        state = f"answers {self.unfinished} prompts" if self.unfinished else "waits for its client's next request"
        if not self.is_ready:
            state = f"its engine is being started; {self.unfinished} prompts wait for it"
        return f"{state}; {self.executed} answered{restarts}"

    def end(self, reason: str) -> None:
        """End the engine; requests that wait are answered with the reason."""
        self._kept.end(reason)
        self._scope.cancel()

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
            lambda tokens: self._on_use(tokens, 0.0),
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
        if count > self._room():
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

    async def run(self, cluster: Cluster) -> None:
        """Run the engine until the job ends; it is started again when it is lost."""
        failure: BaseException | None = None
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._kept.run, cluster)
                    await self._follow()
            except* (EngineFailed, FrayError, OSError, ValueError, LookupError) as group:
                failure = group
        # Outside: the end of the job cancels what is inside.
        if failure is not None:
            text = failure_text(failure)
            log.error("job %s failed: %s", self.job_id, text)
            await self._on_failure(text)

    async def _create(self, scope: Any) -> Any:
        if self._model is None:
            raise InvalidRequest(f"model_path: {self.name!r} is not served any more")
        make = ModelEngine(self._model, max_length=self._settings.max_model_len, threads=self._plan.threads)
        return await scope.create_actor(
            InferenceServer,
            make,
            name=f"tinker-{self.job_id}",
            resources=self._plan.resources,
            actor_config=ActorConfig(max_restarts=RESTARTS, restart_period_s=RESTART_PERIOD_S, must_start=True),
            on_failure="absorb",
        )

    async def _follow(self) -> None:
        """Note each engine that is ready, and the time for which it is busy. Raises what its loading raised."""
        incarnation, has_started = 0, False
        while True:
            incarnation, engine = await self._kept.up(incarnation)
            try:
                # Returns when the model is loaded.
                await engine.status.options(idempotent=True)()
                self._is_loaded = True
                if not has_started:
                    await self._on_start()
                has_started, busy_s = True, 0.0
                while True:
                    await trio.sleep(USE_S)
                    _, now_s = await engine.busy_time.options(idempotent=True)()
                    self._on_use(0, now_s - busy_s)
                    busy_s = now_s
            except ActorDied:
                pass
            except FrayError:
                # A model that cannot be loaded: no other start would do better.
                if not has_started:
                    raise
            finally:
                self._is_loaded = False
