"""Routes of the Tinker API about what there is: sessions, training runs, checkpoints."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from attrs import evolve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.tinker.api_store import TinkerCheckpoint, TinkerModel
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import body_of
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.downloads import FILES, Downloads
from fray.tinker.tinker_api.refusals import NotFound, check_ttl
from fray.tinker.tinker_api.requests import ForUser, for_user
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.tinker_json import Fields
from fray.tinker.wire.tinker_proto import WireError

PAGE_LIMIT = 1_000
"""Items of one page."""


def rest_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes about sessions, training runs and checkpoints."""
    # Looked up with each address: the routes are also listed without a service, to check their descriptions.
    downloads = Downloads(runs, lambda user_id: jobs.key_hash_of(user_id))

    def route(method: str, path: str, handler: ForUser) -> Route:
        return Route(f"/api/v1/{path}", for_user(jobs, handler), methods=[method])

    def checkpoints_of(model_id: str) -> list[TinkerCheckpoint]:
        found = [each for each in runs.checkpoints.values() if each.model_id == model_id]
        return sorted(found, key=lambda each: each.created_at)

    def checkpoint_of(request: Request, user: ServiceUser) -> TinkerCheckpoint:
        path = f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}"
        checkpoint = runs.checkpoints.get(path)
        if checkpoint is None or checkpoint.user_id != user.user_id:
            raise NotFound(f"you have no checkpoint {path!r:.200}")
        return checkpoint

    def shown_run(model: TinkerModel) -> dict[str, Any]:
        saved = checkpoints_of(model.id)
        training = [each for each in saved if _kind(each) == "training"]
        sampler = [each for each in saved if _kind(each) == "sampler"]
        metadata = model.metadata
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": model.user_id,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
            "last_request_time": _time_text(model.created_at if not saved else saved[-1].created_at),
            "last_checkpoint": _shown(training[-1]) if training else None,
            "last_sampler_checkpoint": _shown(sampler[-1]) if sampler else None,
            "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
        }

    async def training_runs(request: Request, user: ServiceUser) -> Response:
        mine = [model for model in runs.models.values() if model.user_id == user.user_id]
        mine.sort(key=lambda model: model.created_at, reverse=True)
        part, cursor = _page(request, mine)
        return JSONResponse({"training_runs": [shown_run(model) for model in part], "cursor": cursor})

    async def training_run(request: Request, user: ServiceUser) -> Response:
        return JSONResponse(shown_run(runs.model(user, request.path_params["run_id"])))

    async def checkpoints(request: Request, user: ServiceUser) -> Response:
        model = runs.model(user, request.path_params["run_id"])
        return JSONResponse({"checkpoints": [_shown(each) for each in checkpoints_of(model.id)], "cursor": None})

    async def all_checkpoints(request: Request, user: ServiceUser) -> Response:
        mine = [each for each in runs.checkpoints.values() if each.user_id == user.user_id]
        mine.sort(key=lambda each: each.created_at, reverse=True)
        part, cursor = _page(request, mine)
        return JSONResponse({"checkpoints": [_shown(each) for each in part], "cursor": cursor})

    async def delete(request: Request, user: ServiceUser) -> Response:
        await runs.delete_checkpoint(checkpoint_of(request, user))
        return Response(status_code=204)

    async def publish(request: Request, user: ServiceUser) -> Response:
        await body_of(request, jobs.limits.user.body_bytes)
        await runs.put_checkpoint(evolve(checkpoint_of(request, user), is_public=request.method == "POST"))
        return Response(status_code=204)

    async def set_ttl(request: Request, user: ServiceUser) -> Response:
        seconds = Fields.of_body(await body_of(request, jobs.limits.user.body_bytes)).get("ttl_seconds", "int", None)
        check_ttl(seconds)
        expires_at = None if seconds is None else time.time() + seconds
        await runs.put_checkpoint(evolve(checkpoint_of(request, user), expires_at=expires_at))
        return Response(status_code=204)

    async def archive(request: Request, user: ServiceUser) -> Response:
        url, expires = downloads.url(request, user.user_id, checkpoint_of(request, user))
        return JSONResponse({"url": url, "expires": expires})

    async def external_urls(request: Request, user: ServiceUser) -> Response:
        checkpoint = checkpoint_of(request, user)
        urls = {file: downloads.url(request, user.user_id, checkpoint, file) for file in FILES}
        return JSONResponse(
            {"urls": {file: url for file, (url, _) in urls.items()}, "expires": min(at for _, at in urls.values())}
        )

    async def weights_info(request: Request, user: ServiceUser) -> Response:
        path = Fields.of_body(await body_of(request, jobs.limits.user.body_bytes)).get("tinker_path", "str")
        checkpoint = runs.find_checkpoint(user.user_id, path)
        lora = checkpoint.lora
        return JSONResponse(
            {
                "base_model": checkpoint.base_model,
                "is_lora": True,
                "lora_rank": lora["rank"],
                "train_unembed": lora["unembed"],
                "train_mlp": lora["mlp"],
                "train_attn": lora["attention"],
            }
        )

    async def sessions(request: Request, user: ServiceUser) -> Response:
        mine = [session for session in runs.sessions.values() if session.user_id == user.user_id]
        mine.sort(key=lambda session: session.created_at, reverse=True)
        part, _ = _page(request, mine)
        return JSONResponse({"sessions": [session.id for session in part]})

    async def session(request: Request, user: ServiceUser) -> Response:
        session_id = request.path_params["session_id"]
        found = runs.sessions.get(session_id)
        if found is None or found.user_id != user.user_id:
            raise NotFound(f"you have no session {session_id!r:.100}, or it has ended")
        return JSONResponse(
            {
                "training_run_ids": [each.id for each in runs.models.values() if each.session_id == session_id],
                "sampler_ids": [each.id for each in runs.samplers.values() if each.session_id == session_id],
                "user_metadata": {key: str(value) for key, value in found.metadata.items()},
            }
        )

    one = "training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
    return [
        route("GET", "training_runs", training_runs),
        route("GET", "training_runs/{run_id}", training_run),
        route("GET", "training_runs/{run_id}/checkpoints", checkpoints),
        route("POST", f"{one}/publish", publish),
        route("DELETE", f"{one}/publish", publish),
        route("PUT", f"{one}/ttl", set_ttl),
        route("GET", f"{one}/archive", archive),
        route("GET", f"{one}/external_weights_urls", external_urls),
        downloads.route(),
        route("DELETE", one, delete),
        route("GET", "checkpoints", all_checkpoints),
        route("POST", "weights_info", weights_info),
        route("GET", "sessions", sessions),
        route("GET", "sessions/{session_id}", session),
    ]


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the items that a request asks for, and its cursor. Raises WireError for numbers out of range."""
    numbers = {}
    for name, default, least in (("limit", 20, 1), ("offset", 0, 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or not least <= int(text) <= (PAGE_LIMIT if name == "limit" else 10**9):
            raise WireError(f"{name}: {text!r:.50}; expected an integer from {least}")
        numbers[name] = int(text)
    offset, limit = numbers["offset"], numbers["limit"]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _kind(checkpoint: TinkerCheckpoint) -> str:
    folder = checkpoint.id.removeprefix("tinker://").split("/")[1]
    return {"sampler_weights": "sampler", "external_weights": "external"}.get(folder, "training")


def _shown(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    metadata = checkpoint.metadata
    return {
        "checkpoint_id": checkpoint.id.removeprefix("tinker://").partition("/")[2],
        "checkpoint_type": _kind(checkpoint),
        "time": _time_text(checkpoint.created_at),
        "tinker_path": checkpoint.id,
        "size_bytes": checkpoint.size,
        "public": checkpoint.is_public,
        "expires_at": None if checkpoint.expires_at is None else _time_text(checkpoint.expires_at),
        "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
    }


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
