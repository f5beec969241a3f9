"""Tinker API that answers at once and computes nothing. ``python -m bench.tinker_stub`` prints its address.

The same server and the same answers as `fray.tinker`, so that the times of a client against both differ by what the
service does: checks, its store, its engine. ``/empty`` is a route that does nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray.http_server import serve_http
from fray.tinker.tinker_api.requests import answer_response

ANSWER = {
    "outputs": {"logprobs": [[-1.0, -1.0]], "elementwise_loss": [[1.0, 1.0]]},
    "metrics": {"loss:sum": 2.0},
}
SESSION, MODEL = "session", "session:train:0"
ANSWERS: dict[str, dict[str, Any]] = {
    "client/config": {},
    "telemetry": {"status": "accepted"},
    "create_session": {"type": "create_session", "session_id": SESSION},
    "session_heartbeat": {"type": "session_heartbeat"},
    "get_info": {
        "type": "get_info",
        "model_id": MODEL,
        "model_name": "stub",
        "is_lora": True,
        "lora_rank": 32,
        "model_data": {"arch": "causal-lm", "model_name": "stub", "tokenizer_id": None},
    },
    "create_model": {"request_id": f"{MODEL}:0", "model_id": MODEL},
}


def stub() -> Starlette:
    """Return the app."""
    numbers = itertools.count(1)

    async def empty(request: Request) -> Response:
        await request.body()  # else the connection would end
        return JSONResponse({})

    async def fixed(request: Request) -> Response:
        await request.body()
        answer = ANSWERS.get(request.path_params["name"])
        return JSONResponse({"detail": "unknown"}, 404) if answer is None else JSONResponse(answer)

    async def forward_backward(request: Request) -> Response:
        await request.body()
        return JSONResponse({"request_id": f"{MODEL}:{next(numbers)}", "model_id": MODEL})

    async def retrieve_future(request: Request) -> Response:
        wanted = (await request.json())["request_id"]
        if wanted == f"{MODEL}:0":
            return JSONResponse({"type": "create_model", "model_id": MODEL})
        return answer_response(ANSWER, request.headers.get("Accept", ""))

    return Starlette(
        routes=[
            Route("/empty", empty, methods=["POST"]),
            Route("/api/v1/forward_backward", forward_backward, methods=["POST"]),
            Route("/api/v1/retrieve_future", retrieve_future, methods=["POST"]),
            Route("/api/v1/{name:path}", fixed, methods=["POST"]),
        ]
    )


async def main() -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, stub())
        print(address.url, flush=True)


if __name__ == "__main__":
    trio.run(main)
