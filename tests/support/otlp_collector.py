"""Collector of traces: an HTTP server that speaks OTLP, and shows the spans that real exporters have sent to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import frozen
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WITHIN_S = 60.0


@frozen
class ReceivedSpan:
    """One span, with the ids as hexadecimal text."""

    name: str
    kind: str
    """``client``, ``server``, ``producer``, ``consumer`` or ``internal``."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is the root of its trace."""
    is_error: bool
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    """Attributes of the process that has sent it."""


class Collector:
    """The spans that have arrived; made by `open_collector`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []
        self.authorizations: list[str | None] = []
        """The header of each request."""
        self._arrived = threading.Condition()

    def add(self, body: bytes, authorization: str | None) -> None:
        """Add the spans of one request."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._arrived:
            self.authorizations.append(authorization)
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self.spans += [_read(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._arrived.notify_all()

    def wait_for(self, is_there: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """Return the first span for which ``is_there`` is true, when it has arrived."""
        until = time.monotonic() + WITHIN_S
        with self._arrived:
            while True:
                found = next((span for span in self.spans if is_there(span)), None)
                if found is not None:
                    return found
                assert self._arrived.wait(until - time.monotonic()), f"not among {[span.name for span in self.spans]}"

    def ancestry(self, span: ReceivedSpan) -> list[str]:
        """Return the kinds and names of a span and of those that it is part of, innermost first."""
        by_id = {each.span_id: each for each in self.spans}
        steps = []
        while True:
            steps.append(f"{span.kind} {span.name}")
            if not span.parent_id:
                return steps
            span = by_id[span.parent_id]


def _read(span: Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
        attributes=_attributes(span.attributes),
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def open_collector() -> Iterator[Collector]:
    """Serve on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            collector.add(self.rfile.read(int(self.headers["Content-Length"])), self.headers["Authorization"])
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
