"""Engines of one base model: each model is trained by one, samples are made by any; their number follows the load."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import frozen

from fray.rl.inference.requests import Completion, GenerateRequest
from fray.tinker.core.engine_choice import EngineLoad, engine_for_model, engine_for_samples
from fray.tinker.core.engine_scale import QUEUED, EndEngine, EngineScale, EngineSeen, MoveModel, StartEngine
from fray.tinker.core.sampling_requests import SampleAnswer, SampleRequest
from fray.tinker.kept_engine import EngineFailed
from fray.tinker.tinker_api.base_engine import INFO_S, AdapterPlan, BaseEngine
from fray.tinker.tinker_api.model_run import ModelRun

log = logging.getLogger("fray.tinker")


@frozen(eq=False)
class SamplingEngine:
    """Engine that was chosen for samples of some weights; what is under way there counts in later choices.

    Attributes:
        actor: `fray.tinker.adapter_engine.AdapterEngine`.
    """

    _base: BaseEngine
    actor: Any
    _weights: str | None

    async def sample(self, user: str, request: SampleRequest) -> SampleAnswer:
        """Return samples, as `AdapterEngine.sample`."""
        with self._base.sampling(self._weights, request.num_samples):
            answer: SampleAnswer = await self._base.unless_lost(self.actor.sample, user, request)
        return answer

    async def generate(self, user: str, request: GenerateRequest) -> list[Completion]:
        """Return completions, as `AdapterEngine.generate`."""
        with self._base.sampling(self._weights, request.sampling.n):
            completions: list[Completion] = await self._base.unless_lost(self.actor.generate, user, request)
        return completions

    @asynccontextmanager
    async def stream(self, user: str, request: GenerateRequest) -> AsyncIterator[AsyncIterator[Any]]:
        """Give tokens and completions as they are made, as `AdapterEngine.stream`."""
        with self._base.sampling(self._weights, request.sampling.n):
            async with self.actor.stream.stream(user, request) as events:
                yield events


class EngineGroup:
    """Engines of one base model, as many as ``plan.engines`` allows and the load needs.

    Args:
        base_model: its name.
        plan: settings.
        start: has an engine run; called for each.
        runs: returns the models that are trained, those of other base models included.
    """

    def __init__(
        self,
        base_model: str,
        plan: AdapterPlan,
        start: Callable[[BaseEngine], None],
        runs: Callable[[], Iterable[ModelRun]],
    ) -> None:
        self.base_model, self._plan, self._start, self._runs = base_model, plan, start, runs
        self.engines: list[BaseEngine] = []
        """Engines by number."""
        self._retired: list[BaseEngine] = []
        """Engines whose processes have not ended yet, and the last of each number."""
        self._scale = EngineScale(plan.engines)
        self._lost: dict[int, int] = {}
        """Incarnation of an engine with which a request was lost, by number; its `Down` may not have come yet."""
        self._changed = trio.Event()
        self.renew()

    def renew(self) -> None:
        """Start all engines again if all have failed."""
        if all(engine.failure for engine in self.engines):
            self._lost, self.engines, self._retired = {}, [], []
            for _ in range(self._plan.engines.least):
                self._start_engine()

    @property
    def is_up(self) -> bool:
        return any(engine.is_up for engine in self.engines)

    def queue_state(self, user: str) -> tuple[str, str]:
        """Return the state of a user's requests for samples, as `BaseEngine.queue_state`."""
        found = [each.queue_state(user) for each in self.engines if each.is_up] or [self.engines[0].queue_state(user)]
        return next((each for each in found if each[1]), found[0])

    def explanation(self) -> str:
        """Return why there are as many engines as there are, in words; empty: no work queues."""
        starting = [each.starting for each in self.engines if not each.is_up and not each.failure]
        return self._scale.explanation(trio.current_time(), len(self.engines), "; ".join(starting))

    def place(self, model_id: str) -> BaseEngine:
        """Return the engine that trains a model from now on; `BaseEngine.models` has it until it ends."""
        engine = self.engines[engine_for_model(self._loads(None))]
        engine.models.add(model_id)
        return engine

    async def up(self, after: int, weights: str | None) -> tuple[int, SamplingEngine]:
        """Wait until an engine for samples is ready; return the number of its incarnation and the engine.

        Args:
            after: number of the incarnation with which the request was lost; 0: with none.
            weights: from which samples are made; None: those of the base model.

        Raises:
            EngineFailed: none is started again.
        """
        incarnation, number = divmod(after, self._plan.engines.most)
        self._lost[number] = max(self._lost.get(number, 0), incarnation)
        while (chosen := engine_for_samples(self._loads(weights))) is None:
            if all(engine.failure for engine in self.engines):
                raise EngineFailed(self.engines[0].failure)
            await self._changed.wait()
        engine = self.engines[chosen]
        # Without a wait, since it is up: what is chosen next has the load of this one.
        incarnation, actor = await engine.up()
        return incarnation * self._plan.engines.most + engine.number, SamplingEngine(engine, actor, weights)

    async def scale(self) -> None:
        """Start, relieve and end engines as the load needs it, until cancelled."""
        while not self._plan.engines.is_fixed:
            await trio.sleep(INFO_S)
            if self._may_scale():
                self._take(self._scale.step(trio.current_time(), [self._seen(each) for each in self.engines]))

    def _may_scale(self) -> bool:
        """Note how the last move of a model ended; return whether the next step may be taken."""
        self._retired = [each for each in self._retired if not each.has_ended or each is self._last_of(each.number)]
        for run in self._trained():
            if run.move_error:
                log.warning("model %s stays with its engine: %s", run.model.id, run.move_error)
                self._scale.refused(trio.current_time(), run.engine.number)
                run.move_error = ""
        return not any(run.target for run in self._trained()) and not all(each.failure for each in self.engines)

    def _take(self, step: StartEngine | EndEngine | MoveModel | None) -> None:
        if isinstance(step, StartEngine):
            engine = self._start_engine()
            log.info("engine %d of %s is started: %s", engine.number, self.base_model, self.explanation())
        elif isinstance(step, EndEngine):
            engine = self._engine(step.number)
            log.info("engine %d of %s ends: it was idle", engine.number, self.base_model)
            self.engines.remove(engine)
            self._retired.append(engine)
            engine.retire()
        elif isinstance(step, MoveModel):
            source, target = self._engine(step.source), self._engine(step.target)
            movable = [run for run in self._trained() if run.engine is source]
            if movable:
                max(movable, key=self._is_active).move_to(target)

    def _engine(self, number: int) -> BaseEngine:
        return next(each for each in self.engines if each.number == number)

    def _last_of(self, number: int) -> BaseEngine | None:
        """Return the engine of a number that ended last."""
        return next((each for each in reversed(self._retired) if each.number == number), None)

    def _start_engine(self) -> BaseEngine:
        taken = {each.number for each in self.engines} | {each.number for each in self._retired if not each.has_ended}
        # There may be one more for a moment, while the process of the last that was ended is not gone yet.
        number = next(each for each in range(len(taken) + 1) if each not in taken)
        last = self._last_of(number)
        engine = BaseEngine(self.base_model, self._plan, number, self._wake, last.starts if last else 0)
        self.engines = sorted([*self.engines, engine], key=lambda each: each.number)
        self._start(engine)
        return engine

    def _trained(self) -> list[ModelRun]:
        return [run for run in self._runs() if run.model.base_model == self.base_model and not run.failure]

    def _is_active(self, run: ModelRun) -> bool:
        return run.has_work or trio.current_time() - run.worked_at < self._plan.engines.queue_s

    def _seen(self, engine: BaseEngine) -> EngineSeen:
        runs = [run for run in self._trained() if run.engine is engine]
        return EngineSeen(
            engine.number,
            is_up=engine.is_up,
            has_failed=bool(engine.failure),
            models=len(engine.models),
            active=sum(map(self._is_active, runs)),
            queued=engine.queued + engine.samples_queued,
            has_work=bool(engine.under_way) or any(run.has_work for run in runs),
            seconds=engine.seconds,
        )

    def _loads(self, weights: str | None) -> list[EngineLoad]:
        return [
            EngineLoad(
                is_up=engine.is_up and engine.starts > self._lost.get(engine.number, 0),
                has_failed=bool(engine.failure),
                models=len(engine.models),
                samples=engine.under_way.total(),
                has_weights=weights is None
                or weights in engine.under_way
                or weights in engine.info.get("resident", ()),
                is_queued=engine.queued >= QUEUED,
            )
            for engine in self.engines
        ]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
