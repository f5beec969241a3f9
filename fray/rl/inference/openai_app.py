"""Starlette routes of OpenAI's API: for the port of an inference server, and for sessions of agents."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import uuid4

import trio
from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fray.errors import FrayError, InvalidRequest
from fray.rl.inference.openai_requests import ApiError, ApiRequest, Kind, parse_request
from fray.rl.inference.openai_responses import DONE, AnswerForm, EventWriter, event_bytes
from fray.rl.inference.replies import ModelReply
from fray.rl.inference.request_table import ReaderTooSlow, ServerBusy
from fray.rl.inference.requests import TokenEvent
from fray.rl.tokenizers import Tokenizer

BODY_LIMIT_BYTES = 16 << 20
"""Bytes of the body of a request."""
REQUEST_ID_LIMIT_CHARACTERS = 200
OPEN_PATHS = frozenset(("/health",))
"""Paths that need no key: balancers ask there, and learn nothing but that it answers, and its version."""

T = TypeVar("T")
PromptEvent: TypeAlias = tuple[int, TokenEvent | ModelReply]
"""Number of the prompt, and a token of it or one of its replies."""
log = logging.getLogger("fray.rl.inference")


class ApiModel(Protocol):
    """Model behind the routes."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def accepts_any_name(self) -> bool:
        """True if requests may name any model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""

    async def replies(self, request: ApiRequest, name: str) -> list[list[ModelReply]]:
        """Return the replies to each prompt of a request.

        Args:
            request: the request.
            name: of the request; one that is repeated has that of the first.

        Raises:
            ApiError: the session has ended.
            ValueError: servers can never answer it.
        """

    def stream(self, request: ApiRequest, name: str) -> AsyncIterator[PromptEvent]:
        """Return tokens and replies as they are made; errors as `replies`."""


class ApiModels(Protocol):
    """Models that the caller of a request may use."""

    async def named(self, name: str | None) -> ApiModel:
        """Return a model; None: the request names none. Raises ApiError if there is no such model."""

    def names(self) -> Sequence[str]:
        """Return the names of all."""


@frozen(eq=False)
class OneModel:
    """`ApiModels` with one model."""

    model: ApiModel

    async def named(self, name: str | None) -> ApiModel:
        """Return the model. Raises ApiError if the name is another's."""
        if name is not None and not self.model.accepts_any_name and name != self.model.name:
            text = f"there is no model {name!r} here; this server has {self.model.name!r}"
            raise ApiError(text, status=404, param="model", code="model_not_found")
        return self.model

    def names(self) -> Sequence[str]:
        """Return its name."""
        return (self.model.name,)


FindModel: TypeAlias = Callable[[Mapping[str, Any]], ApiModel]
"""Finds the model of a request by the parameters of its path. Raises ApiError if there is none."""
FindModels: TypeAlias = Callable[[Request], ApiModels]
"""Finds the models of a request's caller, before its body is read. Raises ApiError."""
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def api_app(routes: Sequence[BaseRoute], keys: Sequence[str] = ()) -> Starlette:
    """Return an app whose errors have OpenAI's shape.

    Args:
        routes: its routes.
        keys: of which each request shows one, except at `OPEN_PATHS`. Default: none is needed.
    """
    middleware = [Middleware(_KeyCheck, keys=tuple(keys))] if keys else []
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


def shows_key(request: Request, *keys: str) -> bool:
    """Return whether a request shows one of these keys: ``Authorization: Bearer KEY``."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    # Of each the same time, whichever it is.
    found = [hmac.compare_digest(shown.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(found)


class _KeyCheck:
    """App that refuses requests without a key, before their body is read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or shows_key(Request(scope), *self._keys):
            await self._app(scope, receive, send)
            return
        text = (
            "this port needs the key of the run: Authorization: Bearer KEY, which an OpenAI client sends as its api_key"
        )
        await error_response(ApiError(text, status=401, code="invalid_api_key"))(scope, receive, send)


def api_routes(prefix: str, find: FindModel) -> list[BaseRoute]:
    """Return the routes of OpenAI's API, for one model at each path.

    Args:
        prefix: of their paths, such as ``/v1``.
        find: finds the model of a request.
    """
    return models_routes(prefix, lambda request: OneModel(find(request.path_params)))


def models_routes(prefix: str, find: FindModels) -> list[BaseRoute]:
    """Return the routes of OpenAI's API, for several models.

    Args:
        prefix: of their paths, such as ``/v1``.
        find: finds the models of a request's caller.
    """

    async def completions(request: Request) -> Response:
        return await _answer(request, "completion", find(request))

    async def chats(request: Request) -> Response:
        return await _answer(request, "chat", find(request))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in find(request).names()]})

    async def one_model(request: Request) -> Response:
        model = await find(request).named(request.path_params["model"])
        return JSONResponse(_model(model.name))

    return [
        Route(f"{prefix}/completions", answering(completions), methods=["POST"]),
        Route(f"{prefix}/chat/completions", answering(chats), methods=["POST"]),
        Route(f"{prefix}/models", answering(models)),
        Route(f"{prefix}/models/{{model:path}}", answering(one_model)),
    ]


def answering(handler: Handler) -> Handler:
    """Return a handler whose errors become answers of OpenAI's shape, and that is cancelled when its client leaves."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 (no request may end the server)
            return error_response(error)

    return answer


def error_response(error: Exception) -> Response:
    """Return the answer that an error is."""
    found = _api_error(error)
    return JSONResponse(found.body(), found.status)


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case ServerBusy() | ReaderTooSlow():
            return ApiError(str(error), status=429, code="server_busy")
        case ValueError() | InvalidRequest():
            return ApiError(str(error))
        case FrayError():
            return ApiError(f"{type(error).__name__}: {error}", status=503, code="server_lost")
    log.error("a request failed", exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, code="internal_error")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(text, status=error.status_code).body(), error.status_code, error.headers)


async def body_of(request: Request, limit_bytes: int = BODY_LIMIT_BYTES) -> bytes:
    """Return the body of a request. Raises ApiError if it is longer than the limit."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise ApiError(f"the body has more than {limit_bytes} bytes", status=413, code="body_too_large")
        parts.append(part)
    return b"".join(parts)


async def json_of(request: Request) -> Any:
    """Return the body of a request, decoded. Raises ApiError if it is not JSON or too long."""
    content = await body_of(request)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not JSON: {text}", code="invalid_json") from None


async def _answer(http: Request, kind: Kind, models: ApiModels) -> Response:
    request = parse_request(kind, await json_of(http))
    model = await models.named(request.model)
    name = http.headers.get("x-request-id") or uuid4().hex
    if len(name) > REQUEST_ID_LIMIT_CHARACTERS:
        raise ApiError(f"X-Request-Id has {len(name)} characters; at most {REQUEST_ID_LIMIT_CHARACTERS}")
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    form = AnswerForm(request, f"{prefix}-{name}", request.model or model.name, int(time.time()), model.tokenizer)
    if request.stream:
        return await _stream(form, model.stream(request, name))
    replies = await unless_left(http, lambda: model.replies(request, name))
    if replies is None:
        return Response(status_code=499)
    return JSONResponse(form.body(replies))


async def unless_left(http: Request, call: Callable[[], Awaitable[T]]) -> T | None:
    """Return what ``call`` returns; None if the client leaves before, then it is cancelled."""
    result: T | None = None
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, http, nursery.cancel_scope)
        try:
            result = await call()
        except Exception as caught:  # noqa: BLE001 (raised below, without the group of the nursery)
            error = caught
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


async def _watch(http: Request, scope: trio.CancelScope) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _stream(form: AnswerForm, events: AsyncIterator[PromptEvent]) -> Response:
    writer = EventWriter(form)
    # A request that is refused is answered with its status: nothing was sent yet.
    first = await anext(events)

    async def content() -> AsyncIterator[bytes]:
        async with aclosing(events):  # type: ignore[type-var]
            try:
                for value in writer.take(*first):
                    yield event_bytes(value)
                async for event in events:
                    for value in writer.take(*event):
                        yield event_bytes(value)
            except Exception as error:  # noqa: BLE001 (the answer has begun: the error is its last event)
                yield event_bytes(_api_error(error).body())
                return
            for value in writer.usage():
                yield event_bytes(value)
            yield DONE

    return StreamingResponse(content(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "fray"}
