"""HTTP server for scrapes: ``/metrics``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

import hmac
import logging
from contextlib import suppress

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fray.errors import FrayError, Unsupported
from fray.monitoring.connection import ControllerConnection, OpenCluster
from fray.monitoring.exposition import CONTENT_TYPE, ClusterNumbers, exposition

ANSWER_WITHIN_S = 5.0
"""Seconds in which the controller has to answer; Prometheus ends a scrape after 10 s by default."""
FRESH_S = 1.0
"""Seconds for which an answer is used again, so that several scrapers cost as much as one."""

_log = logging.getLogger("fray.monitoring")


class Exporter:
    """Numbers of one cluster, of which it is a client.

    Args:
        open_cluster: connects to the cluster.
        token: scrapes of ``/metrics`` must carry it (``Authorization: Bearer``); empty: none is needed.
    """

    def __init__(self, open_cluster: OpenCluster, token: str = "") -> None:
        self._connection = ControllerConnection(open_cluster)
        self._token = token.encode()
        self._asking = trio.Lock()
        self._latest: ClusterNumbers | None = None
        self._fresh_until = -1.0
        self.app = Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/healthz", self._health),
                Route("/readyz", self._readiness),
            ]
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay connected until cancelled; reports and raises as `ControllerConnection.run`."""
        await self._connection.run(task_status=task_status)

    async def _snapshot(self) -> ClusterNumbers | None:
        """Return the present state, at most `FRESH_S` old; None if the controller does not answer in time."""
        async with self._asking:
            if trio.current_time() >= self._fresh_until:
                self._latest = None
                with trio.move_on_after(ANSWER_WITHIN_S):
                    self._latest = await self._ask()
                self._fresh_until = trio.current_time() + FRESH_S
            return self._latest

    async def _ask(self) -> ClusterNumbers | None:
        cluster = self._connection.cluster
        if cluster is None:
            return None
        try:
            machines = await cluster.list_machines()
            counts = None
            # A controller of the previous release does not know them.
            with suppress(Unsupported):
                counts = await cluster.counts()
            return ClusterNumbers(await cluster.usage(), await cluster.nodes(), machines.groups, counts)
        except FrayError as error:
            _log.warning("the controller did not answer: %s", error)
            return None

    async def _metrics(self, request: Request) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self._token and not (
            scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token)
        ):
            return PlainTextResponse(
                "expected Authorization: Bearer with the scrape token\n", 401, {"WWW-Authenticate": "Bearer"}
            )
        return Response(exposition(await self._snapshot()), media_type=CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readiness(self, request: Request) -> Response:
        if await self._snapshot() is None:
            return PlainTextResponse("the controller does not answer\n", 503)
        return PlainTextResponse("ok\n")
