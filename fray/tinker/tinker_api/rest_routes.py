"""Routes of the Tinker API about what there is: sessions, training runs, checkpoints."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from attrs import evolve
from starlette.requests import Request
from starlette.routing import Route

from fray.tinker.api_store import TinkerCheckpoint, TinkerModel
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import Answer
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.downloads import FILES, Downloads
from fray.tinker.tinker_api.refusals import NotFound, check_ttl
from fray.tinker.tinker_api.requests import ApiHandlers, for_user
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.tinker_proto import WireError

PAGE_LIMIT = 1_000
"""Items of one page."""


class RestHandlers(ApiHandlers):
    """Handlers of the routes about sessions, training runs and checkpoints."""

    def __init__(self, jobs: ServiceJobs, runs: TinkerRuns) -> None:
        super().__init__(jobs, runs)
        # Looked up with each address: the routes are also listed without a service, to check their descriptions.
        self.downloads = Downloads(runs, lambda user_id: jobs.key_hash_of(user_id))

    # Training runs

    async def training_runs(self, request: Request, user: ServiceUser) -> Answer:
        mine = [model for model in self._runs.models.values() if model.user_id == user.user_id]
        part, cursor = _page(request, mine)
        shown = [_shown_run(model, self._checkpoints_of(model)) for model in part]
        return {"training_runs": shown, "cursor": cursor}

    async def training_run(self, request: Request, user: ServiceUser) -> Answer:
        model = self._runs.model(user, request.path_params["run_id"])
        return _shown_run(model, self._checkpoints_of(model))

    async def checkpoints(self, request: Request, user: ServiceUser) -> Answer:
        model = self._runs.model(user, request.path_params["run_id"])
        return {"checkpoints": [_shown(each) for each in self._checkpoints_of(model)], "cursor": None}

    def _checkpoints_of(self, model: TinkerModel) -> list[TinkerCheckpoint]:
        found = [each for each in self._runs.checkpoints.values() if each.model_id == model.id]
        return sorted(found, key=lambda each: each.created_at)

    # Checkpoints

    async def all_checkpoints(self, request: Request, user: ServiceUser) -> Answer:
        mine = [each for each in self._runs.checkpoints.values() if each.user_id == user.user_id]
        part, cursor = _page(request, mine)
        return {"checkpoints": [_shown(each) for each in part], "cursor": cursor}

    async def delete(self, request: Request, user: ServiceUser) -> Answer:
        await self._runs.delete_checkpoint(self._checkpoint_of(request, user))
        return None

    async def publish(self, request: Request, user: ServiceUser) -> Answer:
        await self._body(request)
        checkpoint = self._checkpoint_of(request, user)
        await self._runs.put_checkpoint(evolve(checkpoint, is_public=request.method == "POST"))
        return None

    async def set_ttl(self, request: Request, user: ServiceUser) -> Answer:
        seconds = (await self._fields(request)).get("ttl_seconds", "int", None)
        check_ttl(seconds)
        expires_at = None if seconds is None else time.time() + seconds
        await self._runs.put_checkpoint(evolve(self._checkpoint_of(request, user), expires_at=expires_at))
        return None

    async def archive(self, request: Request, user: ServiceUser) -> Answer:
        url, expires = self.downloads.url(request, user.user_id, self._checkpoint_of(request, user))
        return {"url": url, "expires": expires}

    async def external_urls(self, request: Request, user: ServiceUser) -> Answer:
        checkpoint = self._checkpoint_of(request, user)
        urls = {file: self.downloads.url(request, user.user_id, checkpoint, file) for file in FILES}
        return {"urls": {file: url for file, (url, _) in urls.items()}, "expires": min(at for _, at in urls.values())}

    async def weights_info(self, request: Request, user: ServiceUser) -> Answer:
        path = (await self._fields(request)).get("tinker_path", "str")
        checkpoint = self._runs.find_checkpoint(user.user_id, path)
        lora = checkpoint.lora
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": lora["rank"],
            "train_unembed": lora["unembed"],
            "train_mlp": lora["mlp"],
            "train_attn": lora["attention"],
        }

    def _checkpoint_of(self, request: Request, user: ServiceUser) -> TinkerCheckpoint:
        path = f"tinker://{request.path_params['run_id']}/{request.path_params['checkpoint_id']}"
        checkpoint = self._runs.checkpoints.get(path)
        if checkpoint is None or checkpoint.user_id != user.user_id:
            raise NotFound(f"you have no checkpoint {path!r:.200}")
        return checkpoint

    # Sessions

    async def sessions(self, request: Request, user: ServiceUser) -> Answer:
        mine = [session for session in self._runs.sessions.values() if session.user_id == user.user_id]
        part, _ = _page(request, mine)
        return {"sessions": [session.id for session in part]}

    async def session(self, request: Request, user: ServiceUser) -> Answer:
        session_id = request.path_params["session_id"]
        found = self._runs.sessions.get(session_id)
        if found is None or found.user_id != user.user_id:
            raise NotFound(f"you have no session {session_id!r:.100}, or it has ended")
        return {
            "training_run_ids": [each.id for each in self._runs.models.values() if each.session_id == session_id],
            "sampler_ids": [each.id for each in self._runs.samplers.values() if each.session_id == session_id],
            "user_metadata": _texts(found.metadata),
        }


def rest_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes about sessions, training runs and checkpoints."""
    rest = RestHandlers(jobs, runs)
    one = "training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
    table = [
        ("GET", "training_runs", rest.training_runs),
        ("GET", "training_runs/{run_id}", rest.training_run),
        ("GET", "training_runs/{run_id}/checkpoints", rest.checkpoints),
        ("POST", f"{one}/publish", rest.publish),
        ("DELETE", f"{one}/publish", rest.publish),
        ("PUT", f"{one}/ttl", rest.set_ttl),
        ("GET", f"{one}/archive", rest.archive),
        ("GET", f"{one}/external_weights_urls", rest.external_urls),
        # Its path has all those above.
        ("DELETE", one, rest.delete),
        ("GET", "checkpoints", rest.all_checkpoints),
        ("POST", "weights_info", rest.weights_info),
        ("GET", "sessions", rest.sessions),
        ("GET", "sessions/{session_id}", rest.session),
    ]
    found = [Route(f"/api/v1/{path}", for_user(jobs, run), methods=[method]) for method, path, run in table]
    return [*found, rest.downloads.route()]


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the items that a request asks for, latest first, and its cursor. Raises WireError for wrong numbers."""
    items = sorted(items, key=lambda each: each.created_at, reverse=True)
    numbers = {}
    for name, default, least in (("limit", 20, 1), ("offset", 0, 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or not least <= int(text) <= (PAGE_LIMIT if name == "limit" else 10**9):
            raise WireError(f"{name}: {text!r:.50}; expected an integer from {least}")
        numbers[name] = int(text)
    offset, limit = numbers["offset"], numbers["limit"]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _shown_run(model: TinkerModel, saved: list[TinkerCheckpoint]) -> dict[str, Any]:
    """Return facts about a training run, with its checkpoints in the order of their times."""
    training = [each for each in saved if _kind(each) == "training"]
    sampler = [each for each in saved if _kind(each) == "sampler"]
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.user_id,
        "is_lora": True,
        "lora_rank": model.lora["rank"],
        "last_request_time": _time_text(model.created_at if not saved else saved[-1].created_at),
        "last_checkpoint": _shown(training[-1]) if training else None,
        "last_sampler_checkpoint": _shown(sampler[-1]) if sampler else None,
        "user_metadata": _texts(model.metadata),
    }


def _kind(checkpoint: TinkerCheckpoint) -> str:
    folder = checkpoint.id.removeprefix("tinker://").split("/")[1]
    return {"sampler_weights": "sampler", "external_weights": "external"}.get(folder, "training")


def _shown(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.id.removeprefix("tinker://").partition("/")[2],
        "checkpoint_type": _kind(checkpoint),
        "time": _time_text(checkpoint.created_at),
        "tinker_path": checkpoint.id,
        "size_bytes": checkpoint.size,
        "public": checkpoint.is_public,
        "expires_at": None if checkpoint.expires_at is None else _time_text(checkpoint.expires_at),
        "user_metadata": _texts(checkpoint.metadata),
    }


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
