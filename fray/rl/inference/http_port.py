"""HTTP ports of an inference server: OpenAI's API with control of pauses and weights, and a port for weights alone."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import trio
from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fray.net.tls.identity import server_context
from fray.rl.core.versions import VersionName
from fray.rl.http_access.place import advertised_host, wildcard_for
from fray.rl.inference.chat_messages import checked_messages
from fray.rl.inference.http_settings import HttpPort, WeightAddress
from fray.rl.inference.openai_app import answering, api_app, api_routes, body_of, json_of, shows_key, unless_left
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.served_model import ServedModel, TokenServer
from fray.rl.model_spec import model_name
from fray.rl.tokenizers import load_tokenizer
from fray.rl.weight_files import read_weights, table_of_files
from fray.runtime.actors.server import host_of
from fray.runtime.runtime import current_or_none

WEIGHTS_LIMIT_BYTES = 8 << 30
"""Bytes of weights in the body of a request; larger ones come from a disk."""
KEY_BYTES = 32
HEALTH_S = 1.0
"""Seconds after which a server whose engine is not ready is reported as starting."""


class ServedEngine(TokenServer, Protocol):
    """Part of an inference server that has a port."""

    async def load_weights(self, version: VersionName, table: Any, weights: Any, mode: Any = "keep") -> None: ...
    async def pause(self, mode: Any = "wait") -> None: ...
    async def resume(self) -> None: ...
    async def is_paused(self) -> bool: ...


def server_app(server: ServedEngine, settings: HttpPort) -> Starlette:
    """Return the app of an inference server.

    Args:
        server: the server.
        settings: of its port.

    Raises:
        InvalidRequest: the model has no tokenizer here.
    """
    model = ServedModel(server, settings.name or model_name(settings.model), load_tokenizer(settings.model))
    control = _Control(server, settings.key)

    async def health(request: Request) -> Response:
        with trio.move_on_after(HEALTH_S):
            return JSONResponse({"status": "ok", "version": str((await server.status())["version"])})
        raise ApiError("the model is being loaded", status=503, code="starting")

    async def metrics(request: Request) -> Response:
        text = metrics_text(await server.status())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def tokenize(request: Request) -> Response:
        body = await json_of(request)
        if not isinstance(body, dict) or not ("messages" in body or isinstance(body.get("prompt"), str)):
            raise ApiError('expected {"prompt": "text"} or {"messages": [...]}', param="prompt")
        if "messages" in body:
            tokens = model.tokenizer.apply_chat_template(checked_messages(body["messages"]), body.get("tools") or None)
        else:
            tokens = model.tokenizer.encode(body["prompt"])
        length = (await server.status())["max_length"]
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    return api_app(
        [
            *api_routes("/v1", lambda path: model),
            Route("/health", answering(health)),
            Route("/metrics", answering(metrics)),
            Route("/tokenize", answering(tokenize), methods=["POST"]),
            *control.routes(),
        ],
        # A client that may change the server may use it, too.
        keys=[] if settings.access is None else [settings.access.key, *filter(None, [settings.key])],
    )


@frozen(eq=False)
class _Control:
    """Routes that change a server.

    Args:
        server: the server.
        key: that requests show; None: these routes are off.
    """

    server: ServedEngine
    key: str | None

    def routes(self) -> list[Route]:
        handlers = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weights": self.update,
        }
        posts = [Route(path, answering(handler), methods=["POST"]) for path, handler in handlers.items()]
        return [*posts, Route("/is_paused", answering(self.is_paused))]

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": await self.server.is_paused()})

    async def pause(self, request: Request) -> Response:
        self._check(request)
        await self.server.pause(request.query_params.get("mode", "wait"))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._check(request)
        await self.server.resume()
        return JSONResponse({"status": "resumed"})

    async def update_from_disk(self, request: Request) -> Response:
        """Load the safetensors files of a directory: ``{"model_path": ..., "version": "0.3", "mode": "keep"}``."""
        self._check(request)
        body = await json_of(request)
        path = body.get("model_path") if isinstance(body, dict) else None
        if not isinstance(path, str):
            raise ApiError('expected {"model_path": "a directory of this machine"}', param="model_path")
        version = await self._version(body.get("version"))
        try:
            table, buffer = await trio.to_thread.run_sync(read_weights, path)
        except OSError as error:
            raise ApiError(f"model_path: {error}", param="model_path") from None
        return await self._load(version, table, buffer, body.get("mode") or "keep")

    async def update(self, request: Request) -> Response:
        """Load the body, a file of safetensors; version and mode are in the query."""
        self._check(request)
        version = await self._version(request.query_params.get("version"))
        content = await body_of(request, WEIGHTS_LIMIT_BYTES)
        table, mode = table_of_files(content), request.query_params.get("mode", "keep")
        # A sender that has given up has no use for them: newer ones may be on their way.
        answer = await unless_left(request, lambda: self._load(version, table, content, mode))
        return answer or Response(status_code=499)

    async def _load(self, version: VersionName, table: Any, buffer: Any, mode: Any) -> Response:
        await self.server.load_weights(version, table, buffer, str(mode))
        return JSONResponse({"success": True, "version": str(version)})

    async def _version(self, text: object) -> VersionName:
        """Return the version that was named; by default the one after that of the server."""
        if text is None:
            current: VersionName = (await self.server.status())["version"]
            return VersionName(current.incarnation, current.number + 1)
        incarnation, _, number = str(text).rpartition(".")
        try:
            return VersionName(int(incarnation or 0), int(number))
        except ValueError:
            raise ApiError(f"version={text!r}: expected such as '0.7' or 7", param="version") from None

    def _check(self, request: Request) -> None:
        if self.key is None:
            text = f"{request.url.path} is off: the server was started without a key for control routes"
            raise ApiError(text, status=403, code="control_off")
        if not shows_key(request, self.key):
            text = f"{request.url.path} needs the key for control routes: Authorization: Bearer KEY"
            raise ApiError(text, status=401, code="invalid_api_key")


async def serve_weight_port(
    server: ServedEngine, started: Callable[[WeightAddress], None], *, host: str | None = None
) -> None:
    """Serve ``/update_weights`` until cancelled, for those who have the address, which has a key of its own.

    Args:
        server: whose weights are loaded.
        started: called with the address when it listens.
        host: address of this machine for others, with TLS. Default: where actors of this process are called from other
            machines, that one; else loopback without TLS.

    Raises:
        ImportError: hypercorn is missing.
    """
    # Here: the apps of this module need no server.
    from fray.http_server import HttpAddress, serve_http

    own, is_secure = _own_place() if host is None else (host, True)
    tls: ssl.SSLContext | None = None
    certificate = b""
    if own and is_secure:
        # Here: the import takes 45 ms, and processes on one machine have no use for it.
        from fray.net.tls.certificates import make_host

        identity = make_host(time.time())
        tls, certificate = server_context(identity), identity.chain
    key = secrets.token_urlsafe(KEY_BYTES)
    app = api_app([Route("/update_weights", answering(_Control(server, key).update), methods=["POST"])])
    bound = wildcard_for(own) if own else "127.0.0.1"
    async with trio.open_nursery() as nursery:
        address: HttpAddress = await nursery.start(partial(serve_http, app, host=bound, tls=tls))
        url = HttpAddress(own or bound, address.port, tls is not None).url
        started(WeightAddress(url, key, certificate.decode()))


def _own_place() -> tuple[str, bool]:
    """Return the address of this machine for others, empty if there are none, and whether TLS is wanted."""
    runtime = current_or_none()
    if runtime is None:
        return "", True
    return advertised_host(), host_of(runtime).has_tls


def metrics_text(status: dict[str, Any]) -> str:
    """Return what `InferenceServer.status` returns in the text format of Prometheus."""
    version: VersionName = status["version"]
    rows = (
        ("requests_running", "gauge", "Requests that are decoded.", status["running"]),
        ("requests_waiting", "gauge", "Requests that wait for weights or the end of a pause.", status["waiting"]),
        ("paused", "gauge", "1 if decoding is paused.", int(status["paused"])),
        ("tokens_total", "counter", "Tokens of ended completions.", status["tokens"]),
        ("steps_total", "counter", "Decoding steps.", status["steps"]),
        ("busy_seconds_total", "counter", "Seconds in decoding steps.", status["busy_s"]),
        ("weights_incarnation", "gauge", "Incarnation of the trainer that made the weights.", version.incarnation),
        ("weights_version", "gauge", "Updates that made the weights.", version.number),
    )
    return "".join(
        f"# HELP fray_rl_{name} {text}\n# TYPE fray_rl_{name} {kind}\nfray_rl_{name} {value}\n"
        for name, kind, text, value in rows
    )
