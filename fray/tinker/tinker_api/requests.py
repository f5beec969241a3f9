"""Parts that the routes of the Tinker API share: the caller, answers for errors, answers of futures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fray.tinker.core.ledger import LedgerConflict
from fray.tinker.opentinker.answers import body_of, response_of
from fray.tinker.opentinker.callers import ForUser
from fray.tinker.service_jobs import ServiceJobs
from fray.tinker.tinker_api.model_run import UserError
from fray.tinker.tinker_api.refusals import Expired, NotFound, TooMany
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.tinker_json import Fields
from fray.tinker.wire.tinker_proto import CONTENT_TYPE, WireError, encode_forward_output, encode_samples

KEY_HEADER = "X-API-Key"
_STATUSES: dict[type[Exception], int] = {
    WireError: 422,
    UserError: 400,
    NotFound: 404,
    Expired: 410,
    LedgerConflict: 409,
    TooMany: 429,
}


class ApiHandlers:
    """Handlers of routes.

    Args:
        jobs: of the service.
        runs: state of the Tinker API.
    """

    def __init__(self, jobs: ServiceJobs, runs: TinkerRuns) -> None:
        self._jobs, self._runs = jobs, runs

    async def _body(self, request: Request) -> bytes:
        return await body_of(request, self._jobs.limits.user.body_bytes)

    async def _fields(self, request: Request) -> Fields:
        return Fields.of_body(await self._body(request))


def for_user(jobs: ServiceJobs, handler: ForUser) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint whose caller is known before its body is looked at, and whose refusals are answers."""

    async def checked(request: Request) -> Response:
        user = jobs.anonymous
        if jobs.has_auth:
            found = jobs.user_of_key(request.headers.get(KEY_HEADER, ""))
            if found is None:
                raise HTTPException(401, f"{KEY_HEADER}: missing or not a key of this service; keys begin with tml-")
            user = found
        return response_of(await handler(request, user))

    return refusing(checked)


def refusing(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint whose refusals are answers."""

    async def checked(request: Request) -> Response:
        try:
            return await route(request)
        except tuple(_STATUSES) as error:
            return JSONResponse({"detail": str(error)}, _STATUSES[type(error)])

    return checked


def answer_response(answer: dict[str, Any], accepts: str) -> Response:
    """Return the answer of a future; those of forward passes and samples in protobuf for clients that accept it."""
    is_protobuf = CONTENT_TYPE in accepts
    if "outputs" in answer:
        if is_protobuf:
            return Response(encode_forward_output(answer["outputs"], answer["metrics"]), media_type=CONTENT_TYPE)
        columns = answer["outputs"]
        count = len(next(iter(columns.values())))
        outputs = [{name: _tensor(rows[at]) for name, rows in columns.items()} for at in range(count)]
        return JSONResponse(
            {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": answer["metrics"]}
        )
    if "samples" in answer:
        prompt, topk = answer["prompt_logprobs"], answer["topk_prompt_logprobs"]
        if is_protobuf:
            return Response(encode_samples(answer["samples"], prompt or (), topk or ()), media_type=CONTENT_TYPE)
        sequences = [
            {"tokens": tokens, "logprobs": logprobs, "stop_reason": reason}
            for tokens, logprobs, reason in answer["samples"]
        ]
        return JSONResponse(
            {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt, "topk_prompt_logprobs": topk}
        )
    return JSONResponse(answer)


def _tensor(values: list[float]) -> dict[str, Any]:
    return {"data": values, "dtype": "float32", "shape": [len(values)]}
