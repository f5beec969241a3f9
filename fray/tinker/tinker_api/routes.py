"""Routes of the Tinker API below ``/api/v1/``: sessions, training, samples, futures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.rl.model_spec import TinyLlama
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import body_of
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.model_run import CREATE, decoded_forward_request
from fray.tinker.tinker_api.refusals import NotFound, check_ttl
from fray.tinker.tinker_api.requests import answer_response, for_user
from fray.tinker.tinker_api.rest_routes import rest_routes
from fray.tinker.tinker_api.tinker_runs import UNLOAD, TinkerRuns
from fray.tinker.wire.tinker_json import Fields, adam_of
from fray.tinker.wire.tinker_proto import CONTENT_TYPE, WireError

WAIT_S = 40.0
"""Seconds for which `retrieve_future` waits; the SDK ends a connection after 45."""
_Post = Callable[[ServiceUser, Fields, bytes], Awaitable[dict[str, Any]]]


def tinker_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes of the Tinker API, those of `rest_routes` included."""

    def post(name: str, route: _Post) -> Route:
        async def answer(request: Request, user: ServiceUser) -> Response:
            body = await body_of(request, jobs.limits.user.body_bytes)
            return JSONResponse(await route(user, Fields.of_body(body), body))

        return Route(f"/api/v1/{name}", for_user(jobs, answer), methods=["POST"])

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(request: Request, user: ServiceUser) -> Response:
        models = [
            {
                "model_name": name,
                "max_context_length": spec.max_length if isinstance(spec, TinyLlama) else None,
                "trainable": True,
                "sampleable": True,
            }
            for name, spec in runs.plan.models.items()
        ]
        return JSONResponse({"supported_models": models})

    async def client_config(request: Request, user: ServiceUser) -> Response:
        await body_of(request, jobs.limits.user.body_bytes)
        return JSONResponse({})

    async def telemetry(request: Request, user: ServiceUser) -> Response:
        await body_of(request, jobs.limits.user.body_bytes)
        return JSONResponse({"status": "accepted"})

    # Sessions

    async def create_session(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        return {"type": "create_session", "session_id": (await runs.create_session(user, fields)).id}

    async def heartbeat(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        runs.session(user, fields.get("session_id", "str"))
        return {"type": "session_heartbeat"}

    async def finish_session(request: Request, user: ServiceUser) -> Response:
        await body_of(request, jobs.limits.user.body_bytes)
        await runs.end_session(runs.session(user, request.path_params["session_id"]))
        return Response(status_code=204)

    # Training

    async def create_model(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        request_id = await runs.create_model(user, fields, body, CREATE)
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    async def get_info(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        model = runs.model(user, fields.get("model_id", "str"))
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": model.base_model,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
            "model_data": {
                "arch": "causal-lm",
                "model_name": model.base_model,
                "tokenizer_id": runs.plan.tokenizer_id(model.base_model),
            },
        }

    async def unload_model(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        model = runs.model(user, fields.get("model_id", "str"))
        if model.session_id:
            await runs.unload(model)
        return {"request_id": f"{model.id}:{UNLOAD}", "model_id": model.id}

    async def forward_backward(request: Request, user: ServiceUser) -> Response:
        body = await body_of(request, jobs.limits.user.body_bytes)
        kind = request.headers.get("Content-Type", "")
        if not kind.startswith(CONTENT_TYPE) or request.headers.get("Content-Encoding", "identity") != "identity":
            raise WireError(f"body: {kind!r:.100}; expected {CONTENT_TYPE}, not compressed: SDKs from 0.25 on send it")
        wanted = await decoded_forward_request(body)
        runs.check_datums(len(wanted.data))
        request_id = await runs.submit(
            user, "forward_backward", wanted.model_id, wanted.seq_id, body, has_effect=wanted.backward
        )
        return JSONResponse({"request_id": request_id, "model_id": wanted.model_id})

    def operation(kind: str, *, has_effect: bool) -> _Post:
        async def submit(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
            if kind == "optim_step":
                adam_of(fields)
            check_ttl(fields.get("ttl_seconds", "int", None))
            # Of what is saved: its record is made when the files are there, too late to refuse anything.
            fields.get("user_metadata", "dict", None)
            fields.get("sampling_session_seq_id", "int", None)
            if kind == "load_weights" and fields.value.get("model_id") is None:
                request_id = await runs.create_model(user, fields, body, kind)
                return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}
            model_id, seq = fields.get("model_id", "str"), fields.get("seq_id", "int")
            return {
                "request_id": await runs.submit(user, kind, model_id, seq, body, has_effect=has_effect),
                "model_id": model_id,
            }

        return submit

    # Samples and futures

    async def create_sampling_session(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        sampler = await runs.create_sampler(user, fields)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def asample(user: ServiceUser, fields: Fields, body: bytes) -> dict[str, Any]:
        request_id, count = await runs.submit_sample(user, fields, body)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}

    async def get_sampler(request: Request, user: ServiceUser) -> Response:
        sampler = runs.sampler(user, request.path_params["sampler_id"])
        # The SDK looks for the tokenizer of a sampler by this name.
        base_model = runs.plan.tokenizer_id(sampler.base_model)
        return JSONResponse({"sampler_id": sampler.id, "base_model": base_model, "model_path": sampler.model_path})

    async def retrieve_future(request: Request, user: ServiceUser) -> Response:
        fields = Fields.of_body(await body_of(request, jobs.limits.user.body_bytes))
        answer = await runs.answer(user, fields.get("request_id", "str"), WAIT_S)
        return answer_response(answer, request.headers.get("Accept", ""))

    async def unknown(request: Request, user: ServiceUser) -> Response:
        raise NotFound(f"{request.method} {request.url.path} is not part of this service; see docs/tinker.md")

    return [
        Route("/api/v1/healthz", healthz),
        Route("/api/v1/get_server_capabilities", for_user(jobs, capabilities)),
        Route("/api/v1/client/config", for_user(jobs, client_config), methods=["POST"]),
        Route("/api/v1/telemetry", for_user(jobs, telemetry), methods=["POST"]),
        post("create_session", create_session),
        post("session_heartbeat", heartbeat),
        Route("/api/v1/sessions/{session_id}/finish", for_user(jobs, finish_session), methods=["POST"]),
        post("create_model", create_model),
        post("get_info", get_info),
        post("unload_model", unload_model),
        Route("/api/v1/forward_backward", for_user(jobs, forward_backward), methods=["POST"]),
        post("optim_step", operation("optim_step", has_effect=True)),
        post("save_weights", operation("save_weights", has_effect=False)),
        post("save_weights_for_sampler", operation("save_weights_for_sampler", has_effect=False)),
        post("save_weights_external", operation("save_weights_external", has_effect=False)),
        post("load_weights", operation("load_weights", has_effect=True)),
        post("create_sampling_session", create_sampling_session),
        post("asample", asample),
        Route("/api/v1/samplers/{sampler_id}", for_user(jobs, get_sampler)),
        Route("/api/v1/retrieve_future", for_user(jobs, retrieve_future), methods=["POST"]),
        *rest_routes(jobs, runs),
        Route("/api/v1/{path:path}", for_user(jobs, unknown), methods=["GET", "POST", "PUT", "DELETE"]),
    ]
