"""Routes of the operator's commands, below ``/fray``: jobs, use by user, keys."""

from __future__ import annotations

from typing import Any

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.tinker.core.keys import ServiceUser, tinker_key_of
from fray.tinker.core.usage import UserUsage
from fray.tinker.opentinker.answers import fields_of, json_of
from fray.tinker.opentinker.callers import ForUser, for_user
from fray.tinker.operations.shown_runs import shown_checkpoint, shown_model, shown_runs, shown_sampler
from fray.tinker.service_jobs import JobRefused, ServiceJobs
from fray.tinker.store import ServiceJob
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

NO_USAGE = UserUsage(0.0, 0.0, 0.0)
SHOWN_IDS = 5
"""Ids in the message about one that is incomplete."""


def operator_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes. Users see their own jobs and use, administrators those of all; keys are theirs alone."""

    async def shown(job: ServiceJob) -> dict[str, Any]:
        runner = jobs.runners.get(job.job_id)
        return {
            "job_id": job.job_id,
            "status": job.state.value,
            "kind": "inference" if job.is_inference else "training",
            "user": jobs.name_of(job.user_id),
            "gpus": job.gpus,
            "message": await jobs.explained_message_of(job),
            "activity": runner.activity() if runner and runner.starts else "",
            "global_steps": runner.global_steps if runner else None,
            "requests": runner.requests if runner else None,
            "executed": runner.executed if runner else None,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": job.completed_at,
        }

    def visible(user: ServiceUser) -> list[ServiceJob]:
        return [job for job in jobs.jobs.values() if jobs.may_see(user, job)]

    def sees(user: ServiceUser, user_id: str) -> bool:
        return user.is_admin or user.user_id == user_id

    async def status(request: Request, user: ServiceUser) -> Response:
        usage, waiting = jobs.usage.by_user(trio.current_time()), runs.waiting_by_user()
        found = {each: usage.get(each, NO_USAGE) for each in [*usage, *waiting] if sees(user, each)}
        users = [
            {
                "user": jobs.name_of(user_id),
                "tokens_per_s": used.tokens_per_s,
                "share": used.share,
                "busy_s": used.busy_s,
                "waiting_samples": waiting.get(user_id, 0),
            }
            for user_id, used in found.items()
        ]
        return JSONResponse(
            {
                "version": jobs.version,
                "jobs": [await shown(job) for job in visible(user)],
                "users": users,
                **shown_runs(runs, lambda user_id: sees(user, user_id), jobs.name_of),
            }
        )

    async def one_run(request: Request, user: ServiceUser) -> Response:
        name = request.path_params["name"]
        model, sampler = runs.models.get(name), runs.samplers.get(name)
        if model is not None and sees(user, model.user_id):
            saved = [each for each in runs.checkpoints.values() if each.model_id == name]
            checkpoints = [shown_checkpoint(each, jobs.name_of) for each in saved]
            return JSONResponse({**shown_model(runs, model, jobs.name_of), "checkpoints": checkpoints})
        if sampler is not None and sees(user, sampler.user_id):
            return JSONResponse(shown_sampler(runs, sampler, jobs.name_of))
        raise HTTPException(404, f"no model or sampler {name!r}; fray tinker ls lists them")

    async def cancel_run(request: Request, user: ServiceUser) -> Response:
        name = request.path_params["name"]
        model, sampler = runs.models.get(name), runs.samplers.get(name)
        if model is not None and sees(user, model.user_id):
            has_ended = not model.session_id
            if not has_ended:
                await runs.unload(model)
        elif sampler is not None and sees(user, sampler.user_id):
            has_ended = False
            await runs.end_sampler(sampler)
        else:
            raise HTTPException(404, f"no model or sampler {name!r}; fray tinker ls lists them")
        text = "its session has ended, or it was unloaded, before" if has_ended else "cancelled; checkpoints stay"
        return JSONResponse({"id": name, "status": "ENDED", "message": text})

    async def one_job(request: Request, user: ServiceUser) -> Response:
        name = request.path_params["job"]
        job = jobs.jobs.get(name)
        if job is None or not jobs.may_see(user, job):
            longer = [each.job_id for each in visible(user) if each.job_id.startswith(name)]
            begins = f"; ids that begin so: {', '.join(longer[:SHOWN_IDS])}" if longer else ""
            more = f" and {len(longer) - SHOWN_IDS} more" if len(longer) > SHOWN_IDS else ""
            raise HTTPException(404, f"no job {name!r}{begins}{more}; fray tinker ls lists them")
        return JSONResponse(
            {
                **await shown(job),
                "gpu_ids": list(job.gpu_ids),
                "error": job.error,
                "config": job.config,
                "checkpoints": await jobs.checkpoints_of(job),
                "explanation": await jobs.explain(job),
            }
        )

    async def list_keys(request: Request, user: ServiceUser) -> Response:
        return JSONResponse(
            {
                "keys": [
                    {
                        "name": each.name,
                        "user_id": each.user_id,
                        "is_admin": each.is_admin,
                        "is_revoked": not each.key_hash,
                        "created_at": each.created_at,
                    }
                    for each in jobs.users.values()
                ]
            }
        )

    async def create_key(request: Request, user: ServiceUser) -> Response:
        body = fields_of(await json_of(request, jobs.limits.user.body_bytes), name="str", is_admin="bool?")
        try:
            created, key = await jobs.create_user(body["name"], is_admin=bool(body["is_admin"]))
        except JobRefused as error:
            raise HTTPException(400, str(error)) from None
        keys = {"api_key": key, "tinker_api_key": tinker_key_of(key)}
        return JSONResponse(
            {"name": created.name, "user_id": created.user_id, "is_admin": created.is_admin, **keys},
            headers={"Cache-Control": "no-store"},
        )

    async def revoke_key(request: Request, user: ServiceUser) -> Response:
        try:
            revoked = await jobs.revoke_key(request.path_params["name"])
        except JobRefused as error:
            raise HTTPException(404, str(error)) from None
        return JSONResponse({"name": revoked.name, "user_id": revoked.user_id, "is_revoked": True})

    def route(path: str, run: ForUser, method: str, *, admin: bool = False) -> Route:
        return Route(path, for_user(jobs, run, admin=admin), methods=[method])

    return [
        route("/fray/status", status, "GET"),
        route("/fray/jobs/{job}", one_job, "GET"),
        route("/fray/runs/{name}", one_run, "GET"),
        route("/fray/runs/{name}", cancel_run, "DELETE"),
        route("/fray/keys", list_keys, "GET", admin=True),
        route("/fray/keys", create_key, "POST", admin=True),
        route("/fray/keys/{name}", revoke_key, "DELETE", admin=True),
    ]
