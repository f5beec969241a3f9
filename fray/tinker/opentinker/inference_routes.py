"""Routes below the address of an inference job: OpenAI's API at ``/jobs/{id}-{secret}/v1/…``, and its health."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fray.rl.inference.openai_app import ApiModel, ApiModels, OneModel, answering, models_routes
from fray.rl.inference.openai_requests import ApiError
from fray.tinker.inference_runner import InferenceRunner
from fray.tinker.service_jobs import ServiceJobs


def inference_routes(jobs: ServiceJobs) -> list[BaseRoute]:
    """Return the routes of all inference jobs; the address of each is the key to it."""

    def runner_of(request: Request) -> InferenceRunner:
        job = jobs.job_at(request.path_params["address"])
        if job is None or not job.is_inference:
            raise ApiError("no inference job has this address", status=404, code="job_not_found")
        runner = jobs.runners.get(job.job_id)
        if runner is None:
            raise ApiError(jobs.ended_text(job), status=409, code="job_ended")
        assert isinstance(runner, InferenceRunner)
        runner.see_client()
        return runner

    def models_of(request: Request) -> ApiModels:
        return _JobModels(runner_of(request))

    async def health(request: Request) -> Response:
        runner = runner_of(request)
        if not runner.is_ready:
            raise ApiError(runner.activity(), status=503, code="starting")
        return JSONResponse({"status": "healthy"})

    prefix = "/jobs/{address}"
    return [*models_routes(f"{prefix}/v1", models_of), Route(f"{prefix}/v1/health", answering(health))]


@frozen
class _JobModels:
    """`ApiModels` with the model of one job, which is there before its engine."""

    runner: InferenceRunner

    async def named(self, name: str | None) -> ApiModel:
        return await OneModel(await self.runner.model()).named(name)

    def names(self) -> Sequence[str]:
        return (self.runner.name,)
