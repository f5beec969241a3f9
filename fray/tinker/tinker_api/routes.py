"""Routes of the Tinker API below ``/api/v1/``: sessions, training, samples, futures."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.rl.model_spec import TinyLlama
from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import Answer
from fray.tinker.opentinker.callers import ForUser
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.model_run import CREATE, decoded_forward_request
from fray.tinker.tinker_api.refusals import NotFound, check_ttl
from fray.tinker.tinker_api.requests import ApiHandlers, answer_response, for_user
from fray.tinker.tinker_api.rest_routes import rest_routes
from fray.tinker.tinker_api.tinker_runs import UNLOAD, TinkerRuns
from fray.tinker.wire.tinker_json import Fields, adam_of
from fray.tinker.wire.tinker_proto import CONTENT_TYPE, WireError

WAIT_S = 40.0
"""Seconds for which `retrieve_future` waits; the SDK ends a connection after 45."""
OPERATIONS = {
    "optim_step": True,
    "save_weights": False,
    "save_weights_for_sampler": False,
    "save_weights_external": False,
    "load_weights": True,
}
"""Requests of models with a body of JSON, and whether they have an effect on the model."""


class TinkerHandlers(ApiHandlers):
    """Handlers of the routes that train and sample."""

    async def capabilities(self, request: Request, user: ServiceUser) -> Answer:
        models = [
            {
                "model_name": name,
                "max_context_length": spec.max_length if isinstance(spec, TinyLlama) else None,
                "trainable": True,
                "sampleable": True,
            }
            for name, spec in self._runs.plan.models.items()
        ]
        return {"supported_models": models}

    async def accept(self, answer: Answer, request: Request, user: ServiceUser) -> Answer:
        """Drop the body."""
        await self._body(request)
        return answer

    # Sessions

    async def create_session(self, request: Request, user: ServiceUser) -> Answer:
        session = await self._runs.create_session(user, await self._fields(request))
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self, request: Request, user: ServiceUser) -> Answer:
        self._runs.session(user, (await self._fields(request)).get("session_id", "str"))
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request, user: ServiceUser) -> Answer:
        await self._body(request)
        await self._runs.end_session(self._runs.session(user, request.path_params["session_id"]))
        return None

    # Training

    async def create_model(self, request: Request, user: ServiceUser) -> Answer:
        body = await self._body(request)
        return await self._created(user, Fields.of_body(body), body, CREATE)

    async def _created(self, user: ServiceUser, fields: Fields, body: bytes, kind: str) -> Answer:
        request_id = await self._runs.create_model(user, fields, body, kind)
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    async def get_info(self, request: Request, user: ServiceUser) -> Answer:
        model = self._runs.model(user, (await self._fields(request)).get("model_id", "str"))
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": model.base_model,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
            "model_data": {
                "arch": "causal-lm",
                "model_name": model.base_model,
                "tokenizer_id": self._runs.plan.tokenizer_id(model.base_model),
            },
        }

    async def unload_model(self, request: Request, user: ServiceUser) -> Answer:
        model = self._runs.model(user, (await self._fields(request)).get("model_id", "str"))
        if model.session_id:
            await self._runs.unload(model)
        return {"request_id": f"{model.id}:{UNLOAD}", "model_id": model.id}

    async def forward_backward(self, request: Request, user: ServiceUser) -> Answer:
        body = await self._body(request)
        kind = request.headers.get("Content-Type", "")
        if not kind.startswith(CONTENT_TYPE) or request.headers.get("Content-Encoding", "identity") != "identity":
            raise WireError(f"body: {kind!r:.100}; expected {CONTENT_TYPE}, not compressed: SDKs from 0.25 on send it")
        wanted = await decoded_forward_request(body)
        self._runs.check_datums(len(wanted.data))
        request_id = await self._runs.submit(
            user, "forward_backward", wanted.model_id, wanted.seq_id, body, has_effect=wanted.backward
        )
        return {"request_id": request_id, "model_id": wanted.model_id}

    async def operation(self, kind: str, request: Request, user: ServiceUser) -> Answer:
        body = await self._body(request)
        fields = Fields.of_body(body)
        if kind == "optim_step":
            adam_of(fields)
        check_ttl(fields.get("ttl_seconds", "int", None))
        # Of what is saved: its record is made when the files are there, too late to refuse anything.
        fields.get("user_metadata", "dict", None)
        fields.get("sampling_session_seq_id", "int", None)
        if kind == "load_weights" and fields.value.get("model_id") is None:
            return await self._created(user, fields, body, kind)
        model_id, seq = fields.get("model_id", "str"), fields.get("seq_id", "int")
        request_id = await self._runs.submit(user, kind, model_id, seq, body, has_effect=OPERATIONS[kind])
        return {"request_id": request_id, "model_id": model_id}

    # Samples and futures

    async def create_sampling_session(self, request: Request, user: ServiceUser) -> Answer:
        sampler = await self._runs.create_sampler(user, await self._fields(request))
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def asample(self, request: Request, user: ServiceUser) -> Answer:
        body = await self._body(request)
        request_id, count = await self._runs.submit_sample(user, Fields.of_body(body), body)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}

    async def get_sampler(self, request: Request, user: ServiceUser) -> Answer:
        sampler = self._runs.sampler(user, request.path_params["sampler_id"])
        # The SDK looks for the tokenizer of a sampler by this name.
        base_model = self._runs.plan.tokenizer_id(sampler.base_model)
        return {"sampler_id": sampler.id, "base_model": base_model, "model_path": sampler.model_path}

    async def retrieve_future(self, request: Request, user: ServiceUser) -> Answer:
        request_id = (await self._fields(request)).get("request_id", "str")
        answer = await self._runs.answer(user, request_id, WAIT_S)
        return answer_response(answer, request.headers.get("Accept", ""))


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _unknown(request: Request, user: ServiceUser) -> Answer:
    raise NotFound(f"{request.method} {request.url.path} is not part of this service; see docs/tinker.md")


def tinker_routes(jobs: ServiceJobs, runs: TinkerRuns) -> list[Route]:
    """Return the routes of the Tinker API, those of `rest_routes` included."""
    api = TinkerHandlers(jobs, runs)
    gets = {"get_server_capabilities": api.capabilities, "samplers/{sampler_id}": api.get_sampler}
    posts: dict[str, ForUser] = {
        "client/config": partial(api.accept, {}),
        "telemetry": partial(api.accept, {"status": "accepted"}),
        "create_session": api.create_session,
        "session_heartbeat": api.heartbeat,
        "sessions/{session_id}/finish": api.finish_session,
        "create_model": api.create_model,
        "get_info": api.get_info,
        "unload_model": api.unload_model,
        "forward_backward": api.forward_backward,
        **{kind: partial(api.operation, kind) for kind in OPERATIONS},
        "create_sampling_session": api.create_sampling_session,
        "asample": api.asample,
        "retrieve_future": api.retrieve_future,
    }
    return [
        Route("/api/v1/healthz", _healthz),
        *(Route(f"/api/v1/{path}", for_user(jobs, run)) for path, run in gets.items()),
        *(Route(f"/api/v1/{path}", for_user(jobs, run), methods=["POST"]) for path, run in posts.items()),
        *rest_routes(jobs, runs),
        Route("/api/v1/{path:path}", for_user(jobs, _unknown), methods=["GET", "POST", "PUT", "DELETE"]),
    ]
