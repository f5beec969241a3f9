"""Routes below the address of a training job: ``/jobs/{id}-{secret}/api/v1/…``, and without ``/api/v1``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from fray.tinker.core.ledger import LedgerConflict, LedgerFull
from fray.tinker.core.training_session import EFFECTS
from fray.tinker.job_runner import JobRunner
from fray.tinker.opentinker.answers import body_of
from fray.tinker.service_jobs import ServiceJobs

REQUEST_ID_HEADER = "X-Request-ID"
"""Header by which a request that is sent again is recognised."""


class _LedgerAnswer(Response):
    """Answer to a request of a ledger: waits for it, and notes whether it was sent."""

    def __init__(self, runner: JobRunner, seq: int) -> None:
        super().__init__()
        self._runner, self._seq = runner, seq

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        found: list[tuple[int, dict[str, Any]]] = []
        was_sent = False
        try:
            async with trio.open_nursery() as nursery:
                # A connection that ends is noticed while its request is executed, which continues.
                nursery.start_soon(_until_disconnected, receive, nursery.cancel_scope)
                found.append(await self._runner.answer_of(self._seq))
                nursery.cancel_scope.cancel()
            if found:
                status, body = found[0]
                await JSONResponse(body, status)(scope, receive, send)
                was_sent = True
        finally:
            with trio.CancelScope(shield=True):
                await self._runner.leave(self._seq, was_sent=was_sent)


def _path_of(body: bytes) -> str | None:
    """Return the path of a request to resume; None: its engine refuses the body."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    path = message.get("path") if isinstance(message, dict) else None
    return path if isinstance(path, str) else None


async def _until_disconnected(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def training_routes(jobs: ServiceJobs) -> list[Route]:
    """Return the routes of all training jobs."""

    def runner_of(request: Request) -> JobRunner:
        job = jobs.job_at(request.path_params["address"])
        if job is None or job.is_inference:
            raise HTTPException(404, "no training job has this address")
        runner = jobs.runners.get(job.job_id)
        if runner is None:
            raise HTTPException(409, jobs.ended_text(job))
        assert isinstance(runner, JobRunner)
        runner.see_client()
        return runner

    def operation(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            runner = runner_of(request)
            body = await body_of(request, jobs.limits.user.body_bytes)
            if kind == "resume" and (path := _path_of(body)) is not None:
                await jobs.check_resumable(jobs.jobs[runner.job_id], path)
            try:
                seq = await runner.receive(kind, body, request.headers.get(REQUEST_ID_HEADER, ""))
            except LedgerFull as error:
                raise HTTPException(429, str(error)) from None
            except LedgerConflict as error:
                raise HTTPException(409, str(error)) from None
            return _LedgerAnswer(runner, seq)

        return route

    async def health(request: Request) -> Response:
        runner_of(request)
        return JSONResponse({"status": "healthy"})

    async def status(request: Request) -> Response:
        runner = runner_of(request)
        return JSONResponse(
            {
                "status": jobs.jobs[runner.job_id].state.value.lower(),
                "is_initialized": runner.is_initialized,
                "global_steps": runner.global_steps,
                "generation_config": runner.generation,
            }
        )

    routes = []
    for prefix in ("/jobs/{address}/api/v1", "/jobs/{address}"):
        routes += [Route(f"{prefix}/{kind}", operation(kind), methods=["POST"]) for kind in EFFECTS]
        routes += [Route(f"{prefix}/health", health), Route(f"{prefix}/status", status)]
    return routes
