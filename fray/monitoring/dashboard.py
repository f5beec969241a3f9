"""HTTP server of the dashboard: the page, its live tables, logs, and actions."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import trio
from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fray.api.cluster import Cluster
from fray.errors import ConnectionFailed, FrayError, InvalidRequest, NoSuchJob, NoSuchReservation, Unauthorized
from fray.model.access.roles import Access, AccessRole, access_of
from fray.model.messages import client, maintenance, people
from fray.monitoring import past
from fray.monitoring.connection import ControllerConnection, OpenCluster
from fray.monitoring.event_stream import ALIVE_S, EventStream, WriteText
from fray.monitoring.job_tables import JobDocument, JobList, NodeList
from fray.monitoring.json_form import plain
from fray.monitoring.live import LiveTables, Table
from fray.monitoring.rows import COLUMNS, Row, job_row, keyed, node_row, queue_row

PAGE = Path(__file__).parent / "page"
PAGES_LIMIT = 200
"""Streams of live tables or logs at a time."""
TOO_MANY_PAGES = f"{PAGES_LIMIT} pages and logs are open, and no more are served: close some\n"
BODY_LIMIT_BYTES = 16_384
RECONNECT_S = 1.0
"""Pause before a new session with the controller: a page is waiting."""
LINES_AT_ONCE = 500
"""Lines of a log in one event."""
PROGRESS_EVERY_S = 0.1
"""Pause between two questions for the progress of some jobs, in seconds."""
HELD_EVERY_S = 30.0
"""Pause between two questions for what all jobs have held."""
AUDIT_LIMIT = 500
"""Newest records of the audit log that are shown."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
ACTIONS: dict[str, type] = {
    "stop": client.Terminate,
    "requeue": client.Requeue,
    "stacks": client.GetStacks,
    "cordon": maintenance.CordonNodes,
    "renew": client.RenewReservation,
    "release": client.ReleaseReservation,
    "users": people.ListUsers,
    "audit": people.ReadAudit,
}
"""Offers of a page, and the request that its role must be allowed to send for each."""

Answer: TypeAlias = Callable[[Request], Awaitable[Any]]


@frozen
class Viewer:
    """Identity with which the dashboard acts.

    Attributes:
        cluster: address of the controller as people write it.
        role: role of its key.
        user: user of its key; empty for the cluster's token.
        requester: who acts through it, for the reason of a stop: ``fray dashboard by ada@laptop``.
    """

    cluster: str
    role: AccessRole
    user: str
    requester: str

    def allowed(self) -> dict[str, bool]:
        """Return which of `ACTIONS` the role may do, on its own jobs at least."""
        return {name: access_of(self.role, request) is not Access.NO for name, request in ACTIONS.items()}


class Dashboard:
    """Page of one cluster, of which it is a client.

    Args:
        open_cluster: connects to the cluster.
        viewer: identity of that connection.
        key: a browser must have opened the page with it, once.
    """

    def __init__(self, open_cluster: OpenCluster, viewer: Viewer, key: str) -> None:
        self._connection = ControllerConnection(open_cluster, RECONNECT_S)
        self._viewer, self._key = viewer, key
        self._cookie, self._token = _derived(key, "cookie"), _derived(key, "action")
        self._streams = trio.CapacityLimiter(PAGES_LIMIT)
        self._live = LiveTables(lambda: self._connection.cluster, self._status)
        self._add_tables()
        routes = [
            Route("/", self._index),
            Route("/login", self._login, methods=["POST"]),
            Route("/healthz", self._health),
            Route("/api/live", self._stream),
            Route("/api/tables/{name}", self._json(self._table)),
            Route("/api/held", self._json(lambda request: past.held(self._cluster(), request.query_params))),
            Route("/api/events", self._json(lambda request: past.events(self._cluster(), request.query_params))),
            Route("/api/capacity", self._json(lambda request: past.capacity(self._cluster(), request.query_params))),
            Route("/api/nodes/{node}", self._json(self._node)),
            Route("/api/jobs/{job}", self._json(self._job)),
            Route("/api/jobs/{job}/logs", self._logs),
            Route("/api/jobs/{job}/{action}", self._json(self._act_on_job), methods=["POST"]),
            Route("/api/nodes/{node}/{action}", self._json(self._act_on_node), methods=["POST"]),
            Route("/api/reservations/{id}/{action}", self._json(self._act_on_reservation), methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        self._inner = Starlette(routes=routes)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay connected and ask for what pages show, until cancelled; reports and raises as
        `ControllerConnection.run`.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self._connection.run)
            await nursery.start(self._live.run)
            task_status.started()

    # Who may ask

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as an ASGI app."""
        assert scope["type"] == "http", scope["type"]
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                given = {name for name, _ in message.get("headers", ())}
                headers = [*message.get("headers", ()), *(each for each in more if each[0] not in given)]
                message = {**message, "headers": headers}
            await send(message)

        await self._inner(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        path, is_post = request.url.path, request.method == "POST"
        if is_post and not self._is_same_origin(request):
            return PlainTextResponse("this request comes from another site\n", 403)
        if path in ("/", "/login", "/healthz") or path.startswith("/page/"):
            return None
        if not self._is_known(request):
            return PlainTextResponse("open the page with its key first\n", 401)
        if is_post and not hmac.compare_digest(request.headers.get("x-fray-token", "").encode(), self._token.encode()):
            return PlainTextResponse("the token of the page is missing: reload the page\n", 403)
        return None

    def _is_same_origin(self, request: Request) -> bool:
        return request.headers.get("origin") == f"{request.url.scheme}://{request.headers.get('host', '')}"

    def _cookie_name(self, request: Request) -> str:
        # Cookies are those of a host, whatever the port.
        return f"fray-{request.url.port or 0}"

    def _is_known(self, request: Request) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(bearer.strip().encode(), self._key.encode()):
            return True
        return hmac.compare_digest(request.cookies.get(self._cookie_name(request), "").encode(), self._cookie.encode())

    async def _index(self, request: Request) -> Response:
        given = request.query_params.get("key")
        if given is not None:
            return self._logged_in(request, given)
        if not self._is_known(request):
            return Response((PAGE / "login.html").read_bytes(), 401, media_type="text/html")
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    async def _login(self, request: Request) -> Response:
        try:
            body = await _body(request)
        except InvalidRequest as error:
            return PlainTextResponse(f"{error}\n", 413)
        form = dict(part.partition("=")[::2] for part in body.decode("ascii", "replace").split("&"))
        return self._logged_in(request, form.get("key", ""))

    def _logged_in(self, request: Request, given: str) -> Response:
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            return Response((PAGE / "login.html").read_bytes(), 401, media_type="text/html")
        # To the page without the key, which neither stays in the address nor in the history.
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._cookie_name(request),
            self._cookie,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    # What is shown

    def _add_tables(self) -> None:
        async def queue(cluster: Cluster) -> Sequence[Row]:
            return [queue_row(await cluster.queue(limit=100), time.time())]

        async def usage(cluster: Cluster) -> Sequence[Row]:
            found = plain(await cluster.usage())
            # It changes with each look, and is not shown.
            del found["now"], found["loop_delay"]
            return [["usage", found]]

        async def samples(cluster: Cluster) -> Sequence[Row]:
            found = await cluster.usage(samples=True)
            return [["samples", plain(found.samples)]]

        async def reservations(cluster: Cluster) -> Sequence[Row]:
            return keyed("reservation_id", await cluster.list_reservations("*", ended=True))

        async def gone_reservations(cluster: Cluster) -> Sequence[Row]:
            return [["gone_reservations", await past.reservations(cluster)]]

        async def groups(cluster: Cluster) -> Sequence[Row]:
            return [["groups", plain(await cluster.list_machines())]]

        async def job_groups(cluster: Cluster) -> Sequence[Row]:
            return keyed("group_id", await cluster.list_groups("*"))

        async def users(cluster: Cluster) -> Sequence[Row]:
            return keyed("user", await cluster.list_users())

        async def actors(cluster: Cluster) -> Sequence[Row]:
            return keyed("actor_id", await cluster.list_actors(namespace="*"))

        async def gone(cluster: Cluster) -> Sequence[Row]:
            # The latest end of each name, as `fray nodes --all`.
            return list({row[0]: row for row in keyed("node", await cluster.gone_nodes())}.values())

        async def audit(cluster: Cluster) -> Sequence[Row]:
            found = await cluster.audit_records(limit=AUDIT_LIMIT)
            return [["audit", plain(found)]]

        for ask, every_s in (
            *((queue, 1.0), (usage, 1.0), (samples, 20.0)),
            *(
                (reservations, 1.0),
                (groups, 1.0),
                (job_groups, 1.0),
                (gone_reservations, 5.0),
                (users, 5.0),
                (audit, 5.0),
                (gone, 5.0),
                (actors, 1.0),
            ),
        ):
            self._live.add(ask.__name__, ask, every_s=every_s)
        self._live.add("held", past.HeldByJob().ask, every_s=HELD_EVERY_S, is_kept=True)
        jobs = JobList()
        self._live.add("jobs", jobs.ask_changes, is_kept=True)
        self._live.add("progress", jobs.ask_living, every_s=PROGRESS_EVERY_S, into="jobs")
        self._live.add("nodes", NodeList().ask_changes, is_kept=True)

    def _status(self, away_s: float) -> Row:
        viewer = self._viewer
        status = {
            "cluster": viewer.cluster,
            "user": viewer.user,
            "role": viewer.role.value,
            "may": viewer.allowed(),
            "away_s": away_s,
            "token": self._token,
            "columns": COLUMNS,
        }
        return ["status", status]

    async def _stream(self, request: Request) -> Any:
        names = list(dict.fromkeys(name for name in request.query_params.get("tables", "").split(",") if name))
        unknown = [name for name in names if name not in self._live]
        if unknown:
            return PlainTextResponse(f"there is no table {unknown[0]!r}\n", 404)
        if not self._streams.available_tokens:
            return PlainTextResponse(TOO_MANY_PAGES, 503)
        job = request.query_params.get("job", "")
        own = Table("job", [JobDocument(job).ask], 0.2) if job else None

        async def produce(write: WriteText) -> None:
            async with self._streams:
                await write(json.dumps({"now": time.time()}))
                with self._live.open_page(names, own) as page:
                    while True:
                        changes = await page.changes(ALIVE_S)
                        for text in changes or [""]:
                            await write(text)

        return EventStream(produce)

    async def _table(self, request: Request) -> Any:
        name = request.path_params["name"]
        if name not in self._live:
            raise InvalidRequest(f"there is no table {name!r}")
        # Of these two a question of the live tables has only what has changed since the last one.
        if name == "jobs":
            return {"columns": COLUMNS[name], "rows": [job_row(info) for info in await self._cluster().list_jobs("*")]}
        if name == "nodes":
            return {"columns": COLUMNS[name], "rows": [node_row(node) for node in await self._cluster().nodes()]}
        return {"columns": COLUMNS.get(name), "rows": await self._live.ask_once(name)}

    async def _job(self, request: Request) -> Any:
        (row,) = await JobDocument(request.path_params["job"]).ask(self._cluster())
        return row[1]

    async def _node(self, request: Request) -> Any:
        return await past.machine(self._cluster(), request.path_params["node"])

    async def _logs(self, request: Request) -> Any:
        query, cluster = request.query_params, self._connection.cluster
        if cluster is None:
            return PlainTextResponse("the controller does not answer\n", 503)
        if not self._streams.available_tokens:
            return PlainTextResponse(TOO_MANY_PAGES, 503)
        try:
            tail = int(query.get("tail", "1000"))
            lines = cluster.logs(
                request.path_params["job"],
                tail=tail,
                follow=query.get("follow") == "1",
                stream=query.get("stream", ""),
                contains=query.get("contains", ""),
                tree=query.get("tree") == "1",
            )
        except (ValueError, InvalidRequest) as error:
            return PlainTextResponse(f"{error}\n", 400)

        async def produce(write: WriteText) -> None:
            async with self._streams, trio.open_nursery() as nursery:
                send, receive = trio.open_memory_channel[str](LINES_AT_ONCE)
                nursery.start_soon(_read_lines, lines, send)
                nursery.start_soon(_write_lines, receive, write)

        return EventStream(produce)

    # Actions

    async def _act_on_job(self, request: Request) -> Any:
        cluster, job, action = self._cluster(), request.path_params["job"], request.path_params["action"]
        if action == "stacks":
            return await cluster.stacks(job)
        if action in ("stop", "requeue"):
            given = await _json_body(request)
            reason = f"{self._viewer.requester}: {given['reason']}" if given.get("reason") else self._viewer.requester
            if action == "stop":
                return {"jobs": await cluster.terminate(job, reason)}
            done = await cluster.requeue(job, reason)
            if done.refused:
                raise InvalidRequest(f"{job} was not requeued: {done.refused[job]}")
            return {"jobs": done.jobs}
        raise InvalidRequest(f"unknown action {action!r}")

    async def _act_on_node(self, request: Request) -> Any:
        cluster, node, action = self._cluster(), request.path_params["node"], request.path_params["action"]
        reason = str((await _json_body(request)).get("reason", ""))
        if action == "cordon":
            marked = await cluster.cordon(node, reason=reason)
        elif action == "drain":
            marked = await cluster.drain(node, reason=reason, let_finish=True)
        elif action == "uncordon":
            marked = await cluster.uncordon(node)
        else:
            raise InvalidRequest(f"unknown action {action!r}")
        return {"nodes": [each.name for each in marked.nodes], "notes": marked.notes}

    async def _act_on_reservation(self, request: Request) -> Any:
        cluster, which, action = self._cluster(), request.path_params["id"], request.path_params["action"]
        if action == "renew":
            return plain(await cluster.renew_reservation(which))
        if action == "release":
            await cluster.release_reservation(which, self._viewer.requester)
            return {}
        raise InvalidRequest(f"unknown action {action!r}")

    def _cluster(self) -> Cluster:
        if self._connection.cluster is None:
            raise ConnectionFailed("the controller does not answer")
        return self._connection.cluster

    def _json(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint that answers with JSON; errors have a sentence in ``error``."""

        async def endpoint(request: Request) -> Response:
            try:
                return JSONResponse(await answer(request))
            except FrayError as error:
                return JSONResponse({"error": str(error)}, _status_of(error))

        return endpoint


async def _read_lines(lines: Any, send: trio.MemorySendChannel[str]) -> None:
    async with send:
        try:
            async with lines:
                async for line in lines:
                    shown = [line.time, line.stream, line.kind.value, line.attempt_id, line.text]
                    await send.send(json.dumps(shown))
        except FrayError as error:
            await send.send(json.dumps([time.time(), "sys", "error", "", str(error)]))


async def _write_lines(receive: trio.MemoryReceiveChannel[str], write: WriteText) -> None:
    """Write lines, as many in one event as there are; the event ``null`` ends them."""
    async with receive:
        has_ended = False
        while not has_ended:
            found: list[str] = []
            try:
                with trio.move_on_after(ALIVE_S):
                    found.append(await receive.receive())
                while found and len(found) < LINES_AT_ONCE:
                    found.append(receive.receive_nowait())
            except trio.WouldBlock:
                pass
            except trio.EndOfChannel:
                has_ended = True
            await write(f"[{','.join(found)}]" if found else "")
        # Without it the browser would ask for all of it again.
        await write("null")


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT_BYTES:
            raise InvalidRequest("the request is too long")
    return body


async def _json_body(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await _body(request) or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest("expected an object in JSON")
    return found


def _status_of(error: FrayError) -> int:
    if isinstance(error, Unauthorized):
        return 403
    if isinstance(error, NoSuchJob | NoSuchReservation):
        return 404
    return 400 if isinstance(error, InvalidRequest) else 503


def _derived(key: str, purpose: str) -> str:
    return hmac.new(key.encode(), f"fray dashboard {purpose}".encode(), hashlib.sha256).hexdigest()
