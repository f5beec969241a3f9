"""Routes of OpenTinker's scheduler: users, keys, jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import Answer, Unprocessable, fields_of, json_of
from fray.tinker.opentinker.callers import ForUser, for_user
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.store import ServiceJob

ENDPOINTS = {
    "register": "POST /register?username=",
    "submit_job": "POST /submit_job",
    "submit_inference_job": "POST /submit_inference_job",
    "job_status": "GET /job_status/{job_id}",
    "list_jobs": "GET /list_jobs",
    "cancel_job": "DELETE /cancel_job/{job_id}",
    "complete_job": "POST /complete_job/{job_id}",
    "users": "GET /admin/users",
}


class SchedulerHandlers:
    """Handlers of the scheduler's routes.

    Args:
        jobs: of the service.
    """

    def __init__(self, jobs: ServiceJobs) -> None:
        self._jobs = jobs

    async def index(self, request: Request) -> Response:
        return JSONResponse(
            {
                "service": "fray.tinker",
                "version": self._jobs.version,
                "status": "running",
                "authentication": "enabled" if self._jobs.has_auth else "disabled",
                "endpoints": ENDPOINTS,
            }
        )

    # Users

    async def register(self, request: Request) -> Response:
        if not self._jobs.has_registration:
            raise HTTPException(403, "registration is closed: ask for a key (fray tinker key create NAME)")
        name = request.query_params.get("username")
        if name is None:
            problem = {"type": "missing", "loc": ["query", "username"], "msg": "Field required", "input": None}
            raise Unprocessable([problem])
        user, key = await self._jobs.create_user(name)
        text = "keep this key: it is shown once"
        return JSONResponse({"user_id": user.user_id, "username": user.name, "api_key": key, "message": text})

    async def users(self, request: Request, user: ServiceUser) -> Answer:
        return {
            "users": [
                {
                    "user_id": each.user_id,
                    "username": each.name,
                    "created_at": time_text(each.created_at),
                    "is_admin": each.is_admin,
                }
                for each in self._jobs.users.values()
            ]
        }

    # Jobs

    async def submit(self, request: Request, user: ServiceUser) -> Answer:
        body = fields_of(
            await json_of(request, self._jobs.limits.user.body_bytes),
            config="dict",
            enable_agent_loop="bool?",
            wandb_key="str?",
            num_gpus="int?",
        )
        config = body["config"]
        if body["enable_agent_loop"]:
            config = {**config, "enable_agent_loop": True}
        job = await self._jobs.submit(user, config, body["num_gpus"])
        return self._accepted(job, server_url=_url_of(request, job))

    async def submit_inference(self, request: Request, user: ServiceUser) -> Answer:
        body = await json_of(request, self._jobs.limits.user.body_bytes)
        fields = fields_of(
            body,
            model_path="str",
            tokenizer_path="str?",
            tensor_parallel_size="int?",
            num_gpus="int?",
            gpu_memory_utilization="float?",
            max_model_len="int?",
            trust_remote_code="bool?",
            priority="str?",
        )
        config = {name: value for name, value in (body | fields).items() if value is not None}
        job = await self._jobs.submit_inference(user, config, fields["num_gpus"])
        return self._accepted(job, vllm_server_url=_url_of(request, job))

    def _accepted(self, job: ServiceJob, **url: str | None) -> Answer:
        return {"job_id": job.job_id, "status": job.state.value, "message": self._jobs.message_of(job), **url}

    async def status(self, request: Request, user: ServiceUser) -> Answer:
        job = self._jobs.jobs.get(request.path_params["job_id"])
        if job is None or not self._jobs.may_see(user, job):
            raise HTTPException(404, "Job not found")
        self._jobs.see_client(job)
        return await self._shown(request, job)

    async def list_jobs(self, request: Request, user: ServiceUser) -> Answer:
        found = [job for job in self._jobs.jobs.values() if self._jobs.may_see(user, job)]
        for job in found:
            if job.user_id == user.user_id:
                self._jobs.see_client(job)
        return {"jobs": [await self._shown(request, job) for job in found]}

    async def _shown(self, request: Request, job: ServiceJob) -> dict[str, Any]:
        return {
            "job_id": job.job_id,
            "status": job.state.value,
            "gpu_ids": list(job.gpu_ids),
            "port": request.base_url.port,
            "server_url": _url_of(request, job),
            "created_at": time_text(job.created_at),
            "started_at": time_text(job.started_at),
            "completed_at": time_text(job.completed_at),
            "error_message": job.error or None,
            "message": await self._jobs.explained_message_of(job),
        }

    async def end(self, state: ServiceJobState, request: Request, user: ServiceUser) -> Answer:
        job_id = request.path_params["job_id"]
        job = self._jobs.jobs.get(job_id)
        if job is None:
            return {"job_id": job_id, "status": "NOT_FOUND", "message": "Job not found"}
        if not self._jobs.may_see(user, job):
            raise HTTPException(403, "Not authorized: the job is another user's")
        if job.state.is_final:
            message = f"the job has ended before: {job.state.value}"
        else:
            job, message = await self._jobs.end(job, state), state.value.lower()
        return {"job_id": job_id, "status": job.state.value, "message": message}


def scheduler_routes(jobs: ServiceJobs) -> list[Route]:
    """Return the routes of the scheduler."""
    scheduler = SchedulerHandlers(jobs)
    table: list[tuple[str, str, ForUser]] = [
        ("POST", "/submit_job", scheduler.submit),
        ("POST", "/submit_inference_job", scheduler.submit_inference),
        ("GET", "/job_status/{job_id}", scheduler.status),
        ("GET", "/list_jobs", scheduler.list_jobs),
        ("DELETE", "/cancel_job/{job_id}", partial(scheduler.end, ServiceJobState.CANCELLED)),
        ("POST", "/complete_job/{job_id}", partial(scheduler.end, ServiceJobState.COMPLETED)),
    ]
    return [
        Route("/", scheduler.index),
        Route("/register", scheduler.register, methods=["POST"]),
        *(Route(path, for_user(jobs, run), methods=[method]) for method, path, run in table),
        Route("/admin/users", for_user(jobs, scheduler.users, admin=True), methods=["GET"]),
    ]


def _url_of(request: Request, job: ServiceJob) -> str | None:
    """Return the address of a job that has one, by the name under which its client reaches the service."""
    if job.state in (ServiceJobState.QUEUED, ServiceJobState.FAILED, ServiceJobState.CANCELLED):
        return None
    return f"{str(request.base_url).rstrip('/')}/jobs/{job.job_id}-{job.secret}"


def time_text(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat()
