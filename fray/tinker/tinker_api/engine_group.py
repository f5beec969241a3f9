"""Engines of one base model: each model is trained by one of them, samples are made by any."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import frozen

from fray.rl.inference.requests import Completion, GenerateRequest
from fray.tinker.core.engine_choice import EngineLoad, engine_for_model, engine_for_samples
from fray.tinker.core.sampling_requests import SampleAnswer, SampleRequest
from fray.tinker.kept_engine import EngineFailed
from fray.tinker.tinker_api.base_engine import AdapterPlan, BaseEngine


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
    """Engines of one base model, ``plan.engines`` of them.

    Args:
        base_model: its name.
        plan: settings.
        start: has an engine run; called for each.
    """

    def __init__(self, base_model: str, plan: AdapterPlan, start: Callable[[BaseEngine], None]) -> None:
        self._base_model, self._plan, self._start = base_model, plan, start
        self.engines: Sequence[BaseEngine] = ()
        self._lost: dict[int, int] = {}
        """Incarnation of an engine with which a request was lost, by number; its `Down` may not have come yet."""
        self._changed = trio.Event()
        self.renew()

    def renew(self) -> None:
        """Start all engines again if all have failed."""
        if all(engine.failure for engine in self.engines):
            self._lost = {}
            self.engines = [
                BaseEngine(self._base_model, self._plan, number, self._wake) for number in range(self._plan.engines)
            ]
            for engine in self.engines:
                self._start(engine)

    @property
    def is_up(self) -> bool:
        return any(engine.is_up for engine in self.engines)

    @property
    def starting(self) -> str:
        """Return what the engines wait for, if none is up."""
        return self.engines[0].starting

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
        incarnation, number = divmod(after, len(self.engines))
        self._lost[number] = max(self._lost.get(number, 0), incarnation)
        while (chosen := engine_for_samples(self._loads(weights))) is None:
            if all(engine.failure for engine in self.engines):
                raise EngineFailed(self.engines[0].failure)
            await self._changed.wait()
        engine = self.engines[chosen]
        # Without a wait, since it is up: what is chosen next has the load of this one.
        incarnation, actor = await engine.up()
        return incarnation * len(self.engines) + chosen, SamplingEngine(engine, actor, weights)

    def _loads(self, weights: str | None) -> list[EngineLoad]:
        return [
            EngineLoad(
                is_up=engine.is_up and engine.starts > self._lost.get(number, 0),
                has_failed=bool(engine.failure),
                models=len(engine.models),
                samples=engine.under_way.total(),
                has_weights=weights is None
                or weights in engine.under_way
                or weights in engine.info.get("resident", ()),
            )
            for number, engine in enumerate(self.engines)
        ]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
