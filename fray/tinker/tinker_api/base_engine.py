"""An engine of a base model: started when it is needed first, and again when it is lost."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio
from attrs import field, frozen

from fray.api.cluster import Cluster
from fray.errors import ActorDied, FrayError
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.rl.model_spec import ModelSpec, TinyLlama
from fray.rl.tokenizers import save_char_tokenizer
from fray.tinker.adapter_engine import AdapterEngine, AdapterEngineSettings
from fray.tinker.core.engine_scale import EngineRange
from fray.tinker.kept_engine import EngineFailed, KeptEngine, explained_engine
from fray.tinker.wire.tinker_proto import WireError

R = TypeVar("R")
RESTARTS = 100
"""Restarts of an engine within `RESTART_PERIOD_S`, before its models fail."""
RESTART_PERIOD_S = 600.0
NAME_LIMIT = 40
INFO_S = 1.0
"""Pause between two readings of an engine's facts."""


@frozen
class AdapterPlan:
    """Settings of the engines of adapters.

    Attributes:
        models: base models by name.
        directory: below which each has its own, shared by the machines of the engines and the service.
        threads: of each engine's computation; None: as many as torch takes.
        resources: that each reserves.
        session_s: seconds without a heartbeat after which a session ends.
        engines: of each base model, and when their number changes.
    """

    models: Mapping[str, ModelSpec]
    directory: Path
    threads: int | None = None
    resources: ResourceConfig | None = None
    session_s: float = 300.0
    engines: EngineRange = field(factory=EngineRange)

    def directory_of(self, base_model: str) -> Path:
        """Return the directory of the engines of a base model."""
        digest = hashlib.sha256(base_model.encode()).hexdigest()[:8]
        return self.directory / f"{_slug(base_model)}-{digest}"

    def write_tokenizers(self) -> None:
        """Write the tokenizers of characters, which clients on this machine load. Raises OSError."""
        for name, spec in self.models.items():
            if isinstance(spec, TinyLlama):
                directory = self._tokenizer_of(name)
                directory.mkdir(parents=True, exist_ok=True)
                save_char_tokenizer(spec.tokenizer, directory)

    def tokenizer_id(self, base_model: str) -> str:
        """Return where clients find the tokenizer: a directory of this machine, or a name."""
        spec = self.models.get(base_model, base_model)
        return spec if isinstance(spec, str) else str(self._tokenizer_of(base_model))

    def base_model_of(self, given: str) -> str:
        """Return the name of a base model, given by it, directory or tokenizer. Raises WireError if there is none."""
        for name in self.models:
            if given in (name, self.tokenizer_id(name)):
                return name
        raise WireError(f"base_model: {given!r} is not served here; expected one of {', '.join(self.models)}")

    def _tokenizer_of(self, base_model: str) -> Path:
        return self.directory_of(base_model) / "tokenizer"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-NAME_LIMIT:].strip("-") or "model"


class BaseEngine(KeptEngine):
    """An engine of a base model.

    Args:
        base_model: its name.
        plan: settings.
        number: of the engine among those of the base model.
        on_change: called when it has come, was lost, or has failed.
        starts: incarnations of engines of this number before it.
    """

    def __init__(
        self, base_model: str, plan: AdapterPlan, number: int, on_change: Callable[[], None], starts: int = 0
    ) -> None:
        self.base_model, self.number, self._plan, self._on_change = base_model, number, plan, on_change
        self.models: set[str] = set()
        """Models that it trains."""
        self.under_way: Counter[str | None] = Counter()
        """Samples that are made, by their weights; None: those of the base model."""
        self._calls: set[trio.CancelScope] = set()
        """Calls that end with this incarnation."""
        self.info: dict[str, Any] = {}
        """Facts of `AdapterEngine.info`, at most `INFO_S` old; empty: it is not up."""
        self.starting = f"the engine of {base_model} is being started"
        """State of an engine that is not up, with what it waits for."""
        self.queued = 0.0
        """Turns that have waited on average between the last two readings of `info`."""
        self.has_ended = False
        """True after `keep`: its name is free."""
        self._scope = trio.CancelScope()
        super().__init__(f"tinker-engine-{_slug(base_model)}{f'-{number}' if number else ''}", self._create)
        self._incarnation = starts

    def queue_state(self, user: str) -> tuple[str, str]:
        """Return the state of a user's requests in the engine, as clients have it, and a reason if they are paused."""
        if not self.is_up:
            return "paused_capacity", self.starting
        if behind := self.info.get("behind", {}).get(user, 0):
            return (
                "paused_rate_limit",
                f"{behind} users come first, who were served less than you",
            )
        return "active", ""

    @property
    def seconds(self) -> float:
        """Return the seconds of computation of this incarnation."""
        return float(sum(self.info.get("seconds", {}).values()))

    @property
    def samples_queued(self) -> float:
        """Return the samples without a place in a batch, in batches."""
        slots = self.info.get("slots", 0)
        return max(0, self.under_way.total() - slots) / slots if slots else 0.0

    async def keep(
        self, cluster: Cluster, on_use: Callable[[str, float], None], weights: Callable[[], dict[str, float]]
    ) -> None:
        """Do `run` and `watch` until it has failed, or until `retire`."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.run, cluster)
                    nursery.start_soon(self.watch, cluster, on_use, weights)
        finally:
            self.has_ended = True

    def retire(self) -> None:
        """End the engine; there is no work that waits for it."""
        self.end(f"{self._name} was not needed any more")
        self._scope.cancel()

    @contextmanager
    def sampling(self, weights: str | None, count: int) -> Iterator[None]:
        """Count samples as under way."""
        self.under_way[weights] += count
        try:
            yield
        finally:
            self.under_way[weights] -= count
            if not self.under_way[weights]:
                del self.under_way[weights]

    async def unless_lost(self, call: Callable[..., Awaitable[R]], *arguments: Any) -> R:
        """Call a method of the engine that is up. Raises ActorDied when it is lost.

        A call that is sent between the loss and its discovery would wait for the next incarnation.
        """
        scope = trio.CancelScope()
        self._calls.add(scope)
        try:
            with scope:
                return await call(*arguments)
        finally:
            self._calls.discard(scope)
        raise ActorDied(f"{self._name} was lost")

    async def watch(
        self, cluster: Cluster, on_use: Callable[[str, float], None], weights: Callable[[], dict[str, float]]
    ) -> None:
        """Keep `info` and `starting`, and report the seconds of computation by user, until it starts no more.

        The engine has what ``weights`` returns, the weights of users, within `INFO_S`.
        """
        incarnation, served, known = 0, dict[str, float](), dict[str, float]()
        looked_at, waited = trio.current_time(), 0.0
        while True:
            try:
                while not self.is_up and not self.failure:
                    with trio.move_on_after(INFO_S):
                        await self.up()
                        break
                    reason = await explained_engine(cluster, self._name)
                    self.starting = f"the engine of {self.base_model} is being started: {reason}"
                number, engine = await self.up()
                if number != incarnation:
                    incarnation, served, known = number, {}, {}
                    looked_at, waited = trio.current_time(), 0.0
                if (wanted := weights()) != known:
                    await engine.set_weights.options(idempotent=True)(wanted)
                    known = wanted
                self.info = await engine.info.options(idempotent=True)()
            except EngineFailed:
                self.info, self.queued = {}, 0.0
                return
            except FrayError:
                self.info, self.queued = {}, 0.0
            else:
                now = trio.current_time()
                self.queued = (self.info["waited"] - waited) / max(now - looked_at, 1e-9)
                looked_at, waited = now, self.info["waited"]
                for user, seconds in self.info["seconds"].items():
                    if seconds > served.get(user, 0.0):
                        on_use(user, seconds - served.get(user, 0.0))
                served = self.info["seconds"]
            await trio.sleep(INFO_S)

    async def _create(self, scope: Any) -> Any:
        return await scope.create_actor(
            AdapterEngine,
            self._plan.models[self.base_model],
            self._plan.directory_of(self.base_model),
            AdapterEngineSettings(threads=self._plan.threads, number=self.number),
            name=self._name,
            resources=self._plan.resources,
            actor_config=ActorConfig(max_restarts=RESTARTS, restart_period_s=RESTART_PERIOD_S, must_start=True),
            on_failure="absorb",
        )

    def _wake(self) -> None:
        super()._wake()
        if not self.is_up:
            for scope in self._calls:
                scope.cancel()
        self._on_change()
