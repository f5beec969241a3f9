"""HTTP server for a Starlette app, in the Trio loop of the process, by Hypercorn.

The one module that imports Hypercorn. Apps are pure of it, so that their tests need no socket.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import trio
from attrs import frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from fray.errors import InvalidRequest
from fray.net.limited_log import LimitedLog

App: TypeAlias = Any
"""A `starlette.applications.Starlette`, or any ASGI app; of the former the lifespan runs, too."""

KEEP_ALIVE_S = 3_600.0
"""Seconds that an idle connection is kept: clients of a run wait for tasks in between."""
KEEP_ALIVE_REQUESTS = 1 << 30
"""Requests of one connection: Hypercorn ends it after 1,000, and a request that is on its way then is lost."""
CONNECTIONS_LIMIT = 1_024
"""Connections at a time; further ones are closed at once."""
END_S = 3.0
"""Seconds that requests under way have when the server is to end."""
NO_DESCRIPTORS_S = 0.1
"""Pause when the process has no file descriptors left."""
UNREAD_LIMIT_BYTES = 1 << 18
"""Bytes of a request's body that are read for an app which answers without it."""
UNREAD_S = 5.0
"""Seconds for that."""

log = logging.getLogger("fray.http")
_refused = LimitedLog(log, logging.WARNING)


@frozen
class HttpAddress:
    """Address of a server.

    Attributes:
        host: name or number, as it was given.
        port: the port, chosen by the system if 0 was given.
        url: ``http://host:port``, or ``https://``.
    """

    host: str
    port: int
    is_tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"


def tls_of_server(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a server. Raises InvalidRequest if the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = "expected a certificate and its key, in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise InvalidRequest(f"certificate {certificate} with key {key}: {reason}") from None
    return context


async def serve_http(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    listener: trio.SocketListener | None = None,
    end_s: float = END_S,
    task_status: trio.TaskStatus[HttpAddress] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until cancelled: ``address = await nursery.start(serve_http, app)``.

    It reports the address when connections are accepted. Cancelled, it accepts nothing further; requests under way have
    ``end_s`` seconds, then their tasks are cancelled and their connections closed, whatever their clients do.

    Args:
        app: the app.
        host: address to listen on. Default: loopback, which other machines cannot reach.
        port: 0 lets the system choose.
        tls: context of a server; None serves HTTP without TLS.
        listener: listens already, instead of at ``host`` and ``port``; it is closed at the end.
        end_s: seconds for requests that are under way at the end.

    Raises:
        OSError: the address cannot be listened on; the message names it.
    """
    if listener is None:
        listener = await _listen(host, port)
    else:
        host = listener.socket.getsockname()[0]
    address = HttpAddress(host, listener.socket.getsockname()[1], tls is not None)
    connections = _Connections(app, tls)
    async with listener, _lifespan_of(app, end_s), trio.open_nursery() as owner:
        await owner.start(connections.hold)
        try:
            task_status.started(address)
            await connections.accept(listener)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()
                await connections.end(end_s)


async def _listen(host: str, port: int) -> trio.SocketListener:
    try:
        # One listener: a name with two families would have two ports.
        listener, *others = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    for other in others:
        await other.aclose()
    return listener


@asynccontextmanager
async def _lifespan_of(app: App, end_s: float) -> AsyncIterator[None]:
    """Run the lifespan of a Starlette app around the block. Its end runs as ASGI has it: also when cancelled."""
    router = getattr(app, "router", None)
    if router is None:
        yield
        return
    lifespan = router.lifespan_context(app)
    await lifespan.__aenter__()
    try:
        yield
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + end_s):
            await lifespan.__aexit__(None, None, None)


def _hypercorn_config() -> Config:
    config = Config()
    config.keep_alive_timeout, config.keep_alive_max_requests = KEEP_ALIVE_S, KEEP_ALIVE_REQUESTS
    config.errorlog, config.accesslog, config.include_server_header = log, None, False
    return config


def _reads_whole_requests(app: App) -> App:
    """Return an app that answers when the body of the request is there, also where ``app`` does not read it.

    Hypercorn ends a connection whose request is incomplete when it is answered: the next request of a
    client that keeps its connections would be lost. What exceeds the limits is answered with ``Connection: close``.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        complete = trio.Event()

        async def receive_part() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                complete.set()
            return message

        async def read_rest(scope: trio.CancelScope) -> None:
            unread = 0
            while unread <= UNREAD_LIMIT_BYTES:
                unread += len((await receive_part()).get("body", b""))
            scope.cancel()

        async def send_when_complete(message: Any) -> None:
            if message["type"] == "http.response.start" and not complete.is_set():
                with trio.move_on_after(UNREAD_S):
                    async with trio.open_nursery() as nursery:
                        # The end may come to another task of the app: a streamed answer waits for a disconnect.
                        nursery.start_soon(read_rest, nursery.cancel_scope)
                        await complete.wait()
                        nursery.cancel_scope.cancel()
                if not complete.is_set():
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive_part, send_when_complete)

    return answer


class _HttpConnection(TCPServer):
    """One connection, which ends when its client has closed it.

    Hypercorn would keep it open for `KEEP_ALIVE_S` from its last answer on, until `CONNECTIONS_LIMIT` of such were open
    and every further one refused.
    """

    _is_read = False
    """True when nothing further comes."""

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            self._is_read = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        # An answer that ends after its client has left begins the pause, too.
        if not self._is_read:
            await super()._idle_timeout()


class _Connections:
    """Connections of one server, each with a task. The tasks are shielded from cancellation until `end`."""

    def __init__(self, app: App, tls: ssl.SSLContext | None) -> None:
        self._app, self._tls = ASGIWrapper(_reads_whole_requests(app)), tls
        self._config, self._context = _hypercorn_config(), WorkerContext(None)
        self._open: set[trio.SocketStream] = set()
        self._tasks: trio.Nursery | None = None
        self._ending, self._ended = trio.Event(), trio.Event()

    async def hold(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks of the connections, from the start to the last one's end."""
        try:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as self._tasks:
                    task_status.started()
                    await self._ending.wait()
        finally:
            self._ended.set()

    async def accept(self, listener: trio.SocketListener) -> None:
        """Accept connections until cancelled."""
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise
                await trio.sleep(NO_DESCRIPTORS_S)
                continue
            if len(self._open) >= CONNECTIONS_LIMIT:
                _refused.write("%d connections are open; a further one is closed at once", CONNECTIONS_LIMIT)
                stream.socket.close()
                continue
            assert self._tasks is not None
            self._open.add(stream)
            self._tasks.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        transport: Any = stream
        if self._tls is not None:
            transport = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        try:
            await _HttpConnection(self._app, self._config, self._context, ConnectionState({}), transport).run()
        except Exception:
            # A connection that Hypercorn cannot handle must not end the others.
            log.exception("a connection failed")
        finally:
            stream.socket.close()
            self._open.discard(stream)

    async def end(self, within_s: float) -> None:
        """Wait for requests under way, at most so long; then end them."""
        self._ending.set()
        # Idle connections end now, those with a request after its answer.
        await self._context.terminated.set()
        with trio.move_on_after(within_s):
            await self._ended.wait()
        if not self._ended.is_set():
            assert self._tasks is not None
            self._tasks.cancel_scope.cancel()
            # Hypercorn shields its writes: cancellation alone would wait for a client that reads nothing.
            for stream in list(self._open):
                stream.socket.close()
            await self._ended.wait()
