"""Routes of the operator's commands, below ``/fray``: jobs, use by user, keys."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fray.tinker.api_store import TinkerModel, TinkerSampler
from fray.tinker.core.keys import ServiceUser, tinker_key_of
from fray.tinker.core.usage import UserUsage
from fray.tinker.opentinker.answers import Answer, fields_of, json_of
from fray.tinker.opentinker.callers import for_user
from fray.tinker.operations.shown_runs import shown_checkpoint, shown_model, shown_runs, shown_sampler
from fray.tinker.service_jobs import JobRefused, ServiceJobs
from fray.tinker.service_usage import KEPT_DAYS
from fray.tinker.store import ServiceJob
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

NO_USAGE = UserUsage(0.0, 0.0, 0.0)
DAYS_DIGITS = 4
SHOWN_IDS = 5
"""Ids in the message about one that is incomplete."""


class OperatorHandlers:
    """Handlers of the routes. Users see their own jobs and use, administrators those of all.

    Args:
        jobs: of the service.
        runs: state of the Tinker API.
    """

    def __init__(self, jobs: ServiceJobs, runs: TinkerRuns) -> None:
        self._jobs, self._runs = jobs, runs

    async def status(self, request: Request, user: ServiceUser) -> Answer:
        usage, waiting = self._jobs.usage.last_minute(), self._runs.waiting_by_user()
        found = {each: usage.get(each, NO_USAGE) for each in [*usage, *waiting] if _sees(user, each)}
        users = [
            {
                "user": self._jobs.name_of(user_id),
                "tokens_per_s": used.tokens_per_s,
                "share": used.share,
                "busy_s": used.busy_s,
                "waiting_samples": waiting.get(user_id, 0),
            }
            for user_id, used in found.items()
        ]
        return {
            "version": self._jobs.version,
            "jobs": [await self._shown(job) for job in self._visible(user)],
            "users": users,
            **shown_runs(self._runs, partial(_sees, user), self._jobs.name_of),
        }

    async def usage(self, request: Request, user: ServiceUser) -> Answer:
        text = request.query_params.get("days", "7")
        # The length first: int() of long texts is slow.
        if not (len(text) <= DAYS_DIGITS and text.isascii() and text.isdigit() and 1 <= int(text) <= KEPT_DAYS):
            raise HTTPException(
                400, f"days={text:.20}: expected an integer from 1 to {KEPT_DAYS}, the days that are kept"
            )
        found = [each for each in await self._jobs.usage.by_day(int(text)) if _sees(user, each.user_id)]
        return {
            "usage": [
                {
                    "day": each.day,
                    "user": self._jobs.name_of(each.user_id),
                    "tokens": each.tokens,
                    "busy_s": each.busy_s,
                }
                for each in found
            ]
        }

    # Jobs

    def _visible(self, user: ServiceUser) -> list[ServiceJob]:
        return [job for job in self._jobs.jobs.values() if self._jobs.may_see(user, job)]

    async def _shown(self, job: ServiceJob) -> dict[str, Any]:
        runner = self._jobs.runners.get(job.job_id)
        return {
            "job_id": job.job_id,
            "status": job.state.value,
            "kind": "inference" if job.is_inference else "training",
            "user": self._jobs.name_of(job.user_id),
            "gpus": job.gpus,
            "message": await self._jobs.explained_message_of(job),
            "activity": runner.activity() if runner and runner.starts else "",
            "global_steps": runner.global_steps if runner else None,
            "requests": runner.requests if runner else None,
            "executed": runner.executed if runner else None,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": job.completed_at,
        }

    async def one_job(self, request: Request, user: ServiceUser) -> Answer:
        name = request.path_params["job"]
        job = self._jobs.jobs.get(name)
        if job is None or not self._jobs.may_see(user, job):
            longer = [each.job_id for each in self._visible(user) if each.job_id.startswith(name)]
            begins = f"; ids that begin so: {', '.join(longer[:SHOWN_IDS])}" if longer else ""
            more = f" and {len(longer) - SHOWN_IDS} more" if len(longer) > SHOWN_IDS else ""
            raise HTTPException(404, f"no job {name!r}{begins}{more}; fray tinker ls lists them")
        return {
            **await self._shown(job),
            "gpu_ids": list(job.gpu_ids),
            "error": job.error,
            "config": job.config,
            "checkpoints": await self._jobs.checkpoints_of(job),
            "explanation": await self._jobs.explain(job),
        }

    # Models and samplers

    def _run_of(self, request: Request, user: ServiceUser) -> TinkerModel | TinkerSampler:
        name = request.path_params["name"]
        for found in (self._runs.models.get(name), self._runs.samplers.get(name)):
            if found is not None and _sees(user, found.user_id):
                return found
        raise HTTPException(404, f"no model or sampler {name!r}; fray tinker ls lists them")

    async def one_run(self, request: Request, user: ServiceUser) -> Answer:
        run, name_of = self._run_of(request, user), self._jobs.name_of
        if isinstance(run, TinkerSampler):
            return shown_sampler(self._runs, run, name_of)
        saved = [each for each in self._runs.checkpoints.values() if each.model_id == run.id]
        checkpoints = [shown_checkpoint(each, name_of) for each in saved]
        return {**shown_model(self._runs, run, name_of), "checkpoints": checkpoints}

    async def cancel_run(self, request: Request, user: ServiceUser) -> Answer:
        run, text = self._run_of(request, user), "cancelled; checkpoints stay"
        if isinstance(run, TinkerSampler):
            await self._runs.end_sampler(run)
        elif run.session_id:
            await self._runs.unload(run)
        else:
            text = "its session has ended, or it was unloaded, before"
        return {"id": run.id, "status": "ENDED", "message": text}

    # Keys

    async def list_keys(self, request: Request, user: ServiceUser) -> Answer:
        return {
            "keys": [
                {
                    "name": each.name,
                    "user_id": each.user_id,
                    "is_admin": each.is_admin,
                    "is_revoked": not each.key_hash,
                    "created_at": each.created_at,
                }
                for each in self._jobs.users.values()
            ]
        }

    async def create_key(self, request: Request, user: ServiceUser) -> Answer:
        body = fields_of(await json_of(request, self._jobs.limits.user.body_bytes), name="str", is_admin="bool?")
        created, key = await self._jobs.create_user(body["name"], is_admin=bool(body["is_admin"]))
        keys = {"api_key": key, "tinker_api_key": tinker_key_of(key)}
        return JSONResponse(
            {"name": created.name, "user_id": created.user_id, "is_admin": created.is_admin, **keys},
            headers={"Cache-Control": "no-store"},
        )

    async def revoke_key(self, request: Request, user: ServiceUser) -> Answer:
        try:
            revoked = await self._jobs.revoke_key(request.path_params["name"])
        except JobRefused as error:
            raise HTTPException(404, str(error)) from None
        return {"name": revoked.name, "user_id": revoked.user_id, "is_revoked": True}


def _sees(user: ServiceUser, user_id: str) -> bool:
    return user.is_admin or user.user_id == user_id


def operator_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes."""
    operator = OperatorHandlers(jobs, runs)
    of_users = [
        ("GET", "status", operator.status),
        ("GET", "usage", operator.usage),
        ("GET", "jobs/{job}", operator.one_job),
        ("GET", "runs/{name}", operator.one_run),
        ("DELETE", "runs/{name}", operator.cancel_run),
    ]
    of_administrators = [
        ("GET", "keys", operator.list_keys),
        ("POST", "keys", operator.create_key),
        ("DELETE", "keys/{name}", operator.revoke_key),
    ]
    return [
        Route(f"/fray/{path}", for_user(jobs, run, admin=is_admin), methods=[method])
        for is_admin, table in ((True, of_administrators), (False, of_users))
        for method, path, run in table
    ]
