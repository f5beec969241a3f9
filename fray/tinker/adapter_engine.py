"""Engine behind the Tinker API: the actor whose process has a base model, and trains and samples its adapters."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio
from attrs import define, evolve, field

from fray.model.text import near_text
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.model_spec import ModelSpec
from fray.rl.train.lora import LoRA
from fray.tinker.adapter_runner import AdapterEngineSettings, AdapterRunner, TrainedModel
from fray.tinker.core.adapter_operations import AdapterOperation, OperationResult
from fray.tinker.core.fair_turns import EngineTurn, FairTurns
from fray.tinker.core.residency import Residency
from fray.tinker.core.sampling_requests import SampleAnswer, SampledSequence, SampleRequest
from fray.tinker.kept_engine import EngineRestarted

__all__ = ["AdapterEngine", "AdapterEngineSettings"]
R = TypeVar("R")


@define(eq=False)
class _OpenSample:
    """A call that waits for its samples."""

    user: str
    left: int
    """Samples that have not ended."""
    is_streamed: bool = False
    woken: trio.Event = field(factory=trio.Event)
    news: list[TokenEvent | Completion] = field(factory=list)
    """Events that the caller has not taken yet."""
    error: Exception | None = None
    waits: bool = False
    """True while the caller waits for news: it may be the one that generates."""


class AdapterEngine:
    """Actor with one base model: trains adapters, and samples from them and from the base model.

    All methods may be called at the same time; what is computed next is decided by the time that each user has had.
    Results of training do not depend on what else runs.

    Args:
        model: the base model.
        directory: of this engine, shared with one that replaces it; saved weights are below it at their ``path``.
        settings: its settings.

    Raises:
        ValueError: the directory has another ``slice_tokens``.
    """

    def __init__(self, model: ModelSpec, directory: Path, settings: AdapterEngineSettings) -> None:
        self._residency = Residency(settings.resident)
        self._runner = AdapterRunner(model, directory, settings)
        self._turns = FairTurns()
        self._granted: dict[EngineTurn, trio.Event] = {}
        self._asked_at: dict[EngineTurn, float] = {}
        self._waited = 0.0
        """Seconds that turns have waited, those in `_asked_at` not counted."""
        self._room = trio.Event()
        self._locks: dict[str, trio.Lock] = {}
        self._numbers = itertools.count()
        self._open: dict[str, _OpenSample] = {}
        self._driver: _OpenSample | None = None
        """The call that generates for all; others wait until theirs has ended, or they are next to generate."""
        self._new: list[GenerateRequest] = []
        self._cancelled: list[str] = []

    # Training ---------------------------------------------------------------------------------------------------------

    async def create_adapter(self, model_id: str, user: str, lora: LoRA) -> int:
        """Make the adapter of a model, or find that of its newest snapshot; to be called first, also after a restart.

        Returns:
            The number up to which it has all requests and the caller their answers, -1 for a new one. Those after it
            are to be executed (again).

        Raises:
            ValueError: the name is refused, a model of this name has other settings, or the base model has none of the
                layers.
        """
        lock = self._locks.setdefault(model_id, trio.Lock())
        async with lock, self._resident(model_id):
            try:
                return await self._compute([user], lambda: partial(self._runner.create, model_id, user, lora))
            finally:
                if model_id not in self._runner.models:
                    self._locks.pop(model_id, None)

    async def remove_adapter(self, model_id: str) -> None:
        """Remove a model with its snapshots, also those of another engine. What it has saved stays."""
        model = self._runner.models.get(model_id)
        if model is None:
            await trio.to_thread.run_sync(self._runner.remove, model_id)
            return
        async with self._locks[model_id]:
            await self._compute([model.user], lambda: partial(self._runner.remove, model_id))
            self._residency.drop(model_id)
            self._room.set()
        self._locks.pop(model_id, None)

    async def release_adapter(self, model_id: str) -> str:
        """Write a snapshot of a model and forget the model, so that another engine of the directory continues with it.

        It has all requests whose answers the caller has; none of its requests may be under way.

        Returns:
            Why the snapshot cannot be written, in which case the model stays; empty: it has gone.

        Raises:
            EngineRestarted: there is no such model.
        """
        user = self._model(model_id).user
        async with self._locks[model_id]:
            async with self._resident(model_id):
                error = await self._compute([user], lambda: partial(self._runner.release, model_id))
            if not error:
                self._residency.drop(model_id)
                self._room.set()
        if not error:
            self._locks.pop(model_id, None)
        return error

    async def execute(self, model_id: str, seq: int, operation: AdapterOperation) -> OperationResult:
        """Execute a request of a model, each number once.

        The caller sends the requests of one model in the order of their numbers, each after it has kept the answer to
        the one before: a snapshot may have it then. A number that was just executed is answered again.

        Raises:
            EngineRestarted: there is no such model: `create_adapter` makes it.
            ValueError: the number is before the last one that was executed.
        """
        self._model(model_id)
        async with self._locks[model_id]:
            model = self._model(model_id)
            if seq == model.seq and model.answer is not None:
                return model.answer
            if seq <= model.seq:
                raise ValueError(f"model {model_id}: request {seq} comes after {model.seq}, which was executed")
            async with self._resident(model_id):
                answer = await self._execute(model, seq, operation)
                self._runner.finish(model, seq, answer)
                return answer

    async def _execute(self, model: TrainedModel, seq: int, operation: AdapterOperation) -> OperationResult:
        work = self._runner.work(model, seq, operation)
        try:
            while True:
                answer = await self._compute([model.user], lambda: partial(_advanced, work))
                if answer is not None:
                    return answer
        finally:
            work.close()

    def _model(self, model_id: str) -> TrainedModel:
        models = self._runner.models
        if model_id not in models:
            near = near_text(model_id, models)
            raise EngineRestarted(f"there is no model {model_id!r}{near}: create_adapter makes one")
        return models[model_id]

    # Samples ----------------------------------------------------------------------------------------------------------

    async def sample(self, user: str, request: SampleRequest) -> SampleAnswer:
        """Return samples; those of all callers share batches, whatever their weights.

        Raises:
            ValueError: the request cannot be answered by this model; the message says why.
            FileNotFoundError: nothing was saved at ``weights``.
        """
        left = self._runner.max_length - len(request.prompt)
        sampling = request.sampling(max(1, left) if request.max_tokens is None else request.max_tokens)
        return _answer(
            request, await self.generate(user, GenerateRequest("", request.prompt, sampling, request.weights))
        )

    async def generate(self, user: str, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request, by index; its ``adapter`` is as ``weights`` of a `SampleRequest`.

        Raises:
            ValueError, FileNotFoundError: as `sample`.
        """
        events = self._generated(user, request, is_streamed=False)
        async with aclosing(events):
            completions = [event async for event in events if isinstance(event, Completion)]
        return sorted(completions, key=lambda each: each.index)

    async def stream(self, user: str, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        """Return tokens as they are made, and each completion when it has ended. Closing it cancels the request.

        Raises:
            ValueError, FileNotFoundError: as `sample`.
        """
        events = self._generated(user, request, is_streamed=True)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _generated(
        self, user: str, request: GenerateRequest, *, is_streamed: bool
    ) -> AsyncGenerator[TokenEvent | Completion]:
        name, mine = f"sample-{next(self._numbers)}", _OpenSample(user, request.sampling.n, is_streamed)
        async with self._saved(request.adapter):
            self._open[name] = mine
            self._new.append(generated := evolve(request, request_id=name))
            try:
                while mine.left or mine.news:
                    await self._wait_for_news(mine)
                    if mine.error is not None:
                        raise mine.error
                    news, mine.news = mine.news, []
                    for event in news:
                        yield event
            finally:
                del self._open[name]
                if mine.left and mine.error is None:
                    # Its adapter may leave memory from now on, and a request that was not added yet is not added.
                    if generated in self._new:
                        self._new.remove(generated)
                    else:
                        self._cancelled.append(name)

    @asynccontextmanager
    async def _saved(self, path: str | None) -> AsyncIterator[None]:
        """Keep the place of saved weights in memory; None: the base model, which always has one."""
        if path is None:
            yield
            return
        self._runner.saved(path)
        async with self._resident(path):
            yield

    async def _wait_for_news(self, mine: _OpenSample) -> None:
        """Wait for news of a call; generates for all calls if no other one does."""
        mine.waits = True
        try:
            while not mine.news and mine.error is None:
                if self._driver in (None, mine):
                    self._driver = mine
                    await self._generate()
                else:
                    await mine.woken.wait()
                    mine.woken = trio.Event()
        finally:
            mine.waits = False
            if self._driver is mine:
                # Another one that waits: a caller that reads slowly delays no other.
                self._driver = next((each for each in self._open.values() if each.waits), None)
                if self._driver is not None:
                    self._driver.woken.set()

    async def _generate(self) -> None:
        """Generate some tokens of all open samples."""

        def begin() -> Callable[[], list[tuple[str, TokenEvent | Completion | Exception]]]:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            streamed = {name for name, each in self._open.items() if each.is_streamed}
            return partial(self._runner.sample, new, cancelled, streamed)

        # Those whose samples have ended only read.
        users = sorted({each.user for each in self._open.values() if each.left})
        for name, result in await self._compute(users, begin):
            entry = self._open.get(name)
            if entry is None:
                continue
            if isinstance(result, Exception):
                entry.error = result
            else:
                entry.news.append(result)
                entry.left -= isinstance(result, Completion)
            entry.woken.set()

    async def remove_saved(self, path: str) -> None:
        """Remove saved weights, if they are there; samples under way end with them.

        Raises:
            ValueError: the path has another form.
        """
        await trio.to_thread.run_sync(self._runner.remove_saved, path)
        self._residency.drop(path)
        self._room.set()

    async def info(self) -> dict[str, Any]:
        """Return facts: ``max_length`` and ``vocabulary_size`` of the base model, ``slice_tokens`` of training,
        names of the adapters ``resident`` in memory and of the models ``offloaded``, ``seconds`` of computation and
        ``weights`` by user, ``waited`` seconds of all turns together, users who wait ``behind`` others, ``slots`` for
        samples."""
        resident = set(self._runner.resident)
        return {
            "max_length": self._runner.max_length,
            "vocabulary_size": self._runner.vocabulary_size,
            "slice_tokens": self._runner.slice_tokens,
            "resident": sorted(resident),
            "offloaded": sorted(self._runner.models.keys() - resident),
            "seconds": dict(self._turns.seconds),
            "waited": self._waited + sum(trio.current_time() - asked for asked in self._asked_at.values()),
            "behind": self._turns.behind(),
            "slots": self._runner.slots,
            "weights": dict(self._turns.weights),
        }

    async def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of users in the time of this engine, in place of all earlier ones; others have 1."""
        self._turns.weights = weights

    # Turns ------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _resident(self, name: str) -> AsyncIterator[None]:
        """Keep the place of an adapter in memory; waits while others use all places."""
        while not self._residency.take(name):
            self._room = trio.Event() if self._room.is_set() else self._room
            await self._room.wait()
        try:
            yield
        finally:
            self._residency.release(name)
            self._room.set()

    async def _compute(self, users: list[str], begin: Callable[[], Callable[[], R]]) -> R:
        """Call what ``begin`` returns in a thread, when it is the users' turn."""
        turn = self._turns.ask(users)
        granted = self._granted[turn] = trio.Event()
        self._asked_at[turn] = trio.current_time()
        self._grant()
        try:
            await granted.wait()
        except trio.Cancelled:
            if granted.is_set():
                self._turns.end(0.0)
                self._grant()
            else:
                del self._granted[turn]
                self._turns.withdraw(turn)
            raise
        finally:
            self._waited += trio.current_time() - self._asked_at.pop(turn)
        began = time.perf_counter()
        try:
            # Not before: which adapters are used changes while a turn is waited for.
            self._runner.keep = self._residency.names
            work = begin()
            # Shielded: what begins takes effect, and its result is noted.
            with trio.CancelScope(shield=True):
                result = await trio.to_thread.run_sync(work)
        finally:
            self._turns.end(time.perf_counter() - began)
            self._grant()
        return result

    def _grant(self) -> None:
        if (turn := self._turns.next()) is not None:
            self._granted.pop(turn).set()


def _advanced(work: Generator[None, None, OperationResult]) -> OperationResult | None:
    """Continue to the next place where others may be served; return the result at the end."""
    try:
        next(work)
    except StopIteration as end:
        result: OperationResult = end.value
        return result
    return None


def _answer(request: SampleRequest, completions: list[Completion]) -> SampleAnswer:
    first = completions[0]
    return SampleAnswer(
        [
            SampledSequence(each.token_ids, each.logprobs, "length" if each.finish_reason == "length" else "stop")
            for each in completions
        ],
        first.prompt_logprobs if request.prompt_logprobs else None,
        [None, *first.top_prompt_logprobs] if request.topk_prompt_logprobs else None,
    )
