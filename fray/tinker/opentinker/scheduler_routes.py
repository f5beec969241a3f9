"""Routes of OpenTinker's scheduler: users, keys, jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import Unprocessable, fields_of, json_of
from fray.tinker.opentinker.callers import ForUser, for_user
from fray.tinker.service_jobs import JobRefused, ServiceJobs
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


def scheduler_routes(jobs: ServiceJobs) -> list[Route]:
    """Return the routes of the scheduler."""

    async def index(request: Request) -> Response:
        return JSONResponse(
            {
                "service": "fray.tinker",
                "version": jobs.version,
                "status": "running",
                "authentication": "enabled" if jobs.has_auth else "disabled",
                "endpoints": ENDPOINTS,
            }
        )

    async def register(request: Request) -> Response:
        if not jobs.has_registration:
            raise HTTPException(403, "registration is closed: ask for a key (fray tinker key create NAME)")
        name = request.query_params.get("username")
        if name is None:
            problem = {"type": "missing", "loc": ["query", "username"], "msg": "Field required", "input": None}
            raise Unprocessable([problem])
        try:
            user, key = await jobs.create_user(name)
        except JobRefused as error:
            raise HTTPException(400, str(error)) from None
        text = "keep this key: it is shown once"
        return JSONResponse({"user_id": user.user_id, "username": user.name, "api_key": key, "message": text})

    async def submit(request: Request, user: ServiceUser) -> Response:
        body = fields_of(
            await json_of(request, jobs.limits.user.body_bytes),
            config="dict",
            enable_agent_loop="bool?",
            wandb_key="str?",
            num_gpus="int?",
        )
        config = body["config"]
        if body["enable_agent_loop"]:
            config = {**config, "enable_agent_loop": True}
        try:
            job = await jobs.submit(user, config, body["num_gpus"])
        except JobRefused as error:
            raise HTTPException(400, str(error)) from None
        url = _url_of(request, job)
        return JSONResponse(
            {"job_id": job.job_id, "status": job.state.value, "message": jobs.message_of(job), "server_url": url}
        )

    async def submit_inference(request: Request, user: ServiceUser) -> Response:
        body = await json_of(request, jobs.limits.user.body_bytes)
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
        try:
            job = await jobs.submit_inference(user, config, fields["num_gpus"])
        except JobRefused as error:
            raise HTTPException(400, str(error)) from None
        url = _url_of(request, job)
        message = jobs.message_of(job)
        return JSONResponse(
            {"job_id": job.job_id, "status": job.state.value, "message": message, "vllm_server_url": url}
        )

    async def shown(request: Request, job: ServiceJob) -> dict[str, Any]:
        return {**_shown(request, job), "message": await jobs.explained_message_of(job)}

    async def status(request: Request, user: ServiceUser) -> Response:
        job = jobs.jobs.get(request.path_params["job_id"])
        if job is None or not jobs.may_see(user, job):
            raise HTTPException(404, "Job not found")
        jobs.see_client(job)
        return JSONResponse(await shown(request, job))

    async def list_jobs(request: Request, user: ServiceUser) -> Response:
        found = [job for job in jobs.jobs.values() if jobs.may_see(user, job)]
        for job in found:
            if job.user_id == user.user_id:
                jobs.see_client(job)
        return JSONResponse({"jobs": [await shown(request, job) for job in found]})

    def ending(state: ServiceJobState, text: str) -> ForUser:
        async def route(request: Request, user: ServiceUser) -> Response:
            job_id = request.path_params["job_id"]
            job = jobs.jobs.get(job_id)
            if job is None:
                return JSONResponse({"job_id": job_id, "status": "NOT_FOUND", "message": "Job not found"})
            if not jobs.may_see(user, job):
                raise HTTPException(403, "Not authorized: the job is another user's")
            if job.state.is_final:
                message = f"the job has ended before: {job.state.value}"
            else:
                job, message = await jobs.end(job, state), text
            return JSONResponse({"job_id": job_id, "status": job.state.value, "message": message})

        return route

    async def users(request: Request, user: ServiceUser) -> Response:
        return JSONResponse(
            {
                "users": [
                    {
                        "user_id": each.user_id,
                        "username": each.name,
                        "created_at": time_text(each.created_at),
                        "is_admin": each.is_admin,
                    }
                    for each in jobs.users.values()
                ]
            }
        )

    def route(path: str, run: ForUser, method: str, *, admin: bool = False) -> Route:
        return Route(path, for_user(jobs, run, admin=admin), methods=[method])

    return [
        Route("/", index),
        Route("/register", register, methods=["POST"]),
        route("/submit_job", submit, "POST"),
        route("/submit_inference_job", submit_inference, "POST"),
        route("/job_status/{job_id}", status, "GET"),
        route("/list_jobs", list_jobs, "GET"),
        route("/cancel_job/{job_id}", ending(ServiceJobState.CANCELLED, "cancelled"), "DELETE"),
        route("/complete_job/{job_id}", ending(ServiceJobState.COMPLETED, "completed"), "POST"),
        route("/admin/users", users, "GET", admin=True),
    ]


def _url_of(request: Request, job: ServiceJob) -> str | None:
    """Return the address of a job that has one, by the name under which its client reaches the service."""
    if job.state in (ServiceJobState.QUEUED, ServiceJobState.FAILED, ServiceJobState.CANCELLED):
        return None
    return f"{str(request.base_url).rstrip('/')}/jobs/{job.job_id}-{job.secret}"


def _shown(request: Request, job: ServiceJob) -> dict[str, Any]:
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
    }


def time_text(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat()
