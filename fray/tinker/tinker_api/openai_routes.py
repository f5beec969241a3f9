"""OpenAI's API below ``/oai/api/v1``: base models and saved weights of the Tinker API, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio
from attrs import evolve, frozen
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount

from fray.rl.inference.openai_app import ApiModels, api_app, models_routes
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.requests import GenerateRequest
from fray.rl.inference.served_model import ServedModel
from fray.rl.tokenizers import Tokenizer, load_tokenizer
from fray.tinker.core.keys import ServiceUser
from fray.tinker.kept_engine import EngineFailed
from fray.tinker.opentinker.callers import user_of
from fray.tinker.replaced_engine import ReplacedEngine
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.engine_group import SamplingEngine
from fray.tinker.tinker_api.model_run import UserError
from fray.tinker.tinker_api.refusals import TooMany
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

PREFIX = "/oai/api/v1"


def openai_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Mount]:
    """Return OpenAI's API for the users of a service."""
    known = BaseModels(runs)

    def models_of(request: Request) -> ApiModels:
        return SampledModels(known, caller(request, jobs), partial(caller, request, jobs))

    return [Mount(PREFIX, api_app(models_routes("", models_of)))]


def caller(request: Request, jobs: ServiceJobs) -> ServiceUser:
    """Return the user of a request's key, ``Authorization: Bearer tml-…``. Raises ApiError 401."""
    try:
        return user_of(request, jobs)
    except HTTPException as error:
        text = f"{error.detail}: expected Authorization: Bearer tml-…, with a key of this service"
        raise ApiError(text, status=error.status_code, code="invalid_api_key") from None


class BaseModels:
    """Tokenizers and lengths of the base models of a service, each read when it is used first.

    Args:
        runs: state of the Tinker API.
    """

    def __init__(self, runs: TinkerRuns) -> None:
        self.runs = runs
        self._tokenizers: dict[str, Tokenizer] = {}
        self._lengths: dict[str, int] = {}

    async def tokenizer(self, base_model: str) -> Tokenizer:
        """Return the tokenizer of a base model. Raises InvalidRequest if it has none."""
        if base_model not in self._tokenizers:
            spec = self.runs.plan.models[base_model]
            # In a thread: its files may have to be downloaded.
            self._tokenizers[base_model] = await trio.to_thread.run_sync(load_tokenizer, spec)
        return self._tokenizers[base_model]

    async def max_length(self, base_model: str) -> int:
        """Return the tokens of a prompt and a sample together."""
        if base_model not in self._lengths:
            _, engine = await self.engine(base_model, None, 0)
            self._lengths[base_model] = (await engine.actor.info.options(idempotent=True)())["max_length"]
        return self._lengths[base_model]

    async def engine(self, base_model: str, weights: str | None, after: int) -> tuple[int, SamplingEngine]:
        """Wait for an engine for samples, as `TinkerRuns.engine_up`. Raises ApiError 503 if it has failed."""
        try:
            return await self.runs.engine_up(base_model, after, weights)
        except EngineFailed as error:
            raise ApiError(f"the engine of {base_model} cannot be started: {error}", status=503) from None


@frozen
class SampledModels:
    """`ApiModels` of one user: base models, and saved weights that the user may load.

    Args:
        known: base models of the service.
        user: the user.
        check: raises ApiError when the user's key has ended; a stream ends then.
    """

    known: BaseModels
    user: ServiceUser
    check: Callable[[], object]

    async def named(self, name: str | None) -> ServedModel:
        """Return the model of a base model's name or a path ``tinker://…``. Raises ApiError."""
        if name is None:
            raise ApiError("model is missing: expected a base model, or a path tinker://…", param="model")
        base_model, weights = self._weights(name)
        user_id = self.user.user_id
        server = ReplacedEngine(
            partial(self.known.engine, base_model, weights),
            lambda engine, request: engine.generate(user_id, _of(weights, request)),
            lambda engine, request: engine.stream(user_id, _of(weights, request)),
            partial(self.known.max_length, base_model),
            self._counted,
            lambda tokens: self.known.runs.on_use(user_id, tokens, 0.0),
            self.check,
        )
        return ServedModel(server, name, await self.known.tokenizer(base_model))

    def names(self) -> Sequence[str]:
        """Return the base models, and the paths of the user's saved weights for samplers."""
        runs = self.known.runs
        mine = [each for each in runs.checkpoints.values() if each.user_id == self.user.user_id]
        mine.sort(key=lambda each: each.created_at)
        return [*runs.plan.models, *(each.id for each in mine if "/sampler_weights/" in each.id)]

    def _weights(self, name: str) -> tuple[str, str | None]:
        runs = self.known.runs
        base_model, weights = name, None
        if name not in runs.plan.models:
            try:
                checkpoint = runs.find_checkpoint(self.user.user_id, name)
            except UserError:
                checkpoint = None
            if checkpoint is None or checkpoint.base_model not in runs.plan.models:
                text = f"there is no model {name!r:.200} here that you may use; base models: "
                text += ", ".join(runs.plan.models)
                raise ApiError(text, status=404, param="model", code="model_not_found")
            base_model, weights = checkpoint.base_model, checkpoint.weights
        return base_model, weights

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        try:
            with self.known.runs.waiting_samples(self.user.user_id, count):
                yield
        except TooMany as error:
            raise ApiError(str(error), status=429, code="too_many_requests") from None


def _of(weights: str | None, request: GenerateRequest) -> GenerateRequest:
    return evolve(request, adapter=weights)
