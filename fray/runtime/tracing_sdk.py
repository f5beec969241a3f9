"""Spans of jobs and calls, recorded with OpenTelemetry's SDK. `fray.runtime.tracing` imports it if it is configured.

A call has a client span in its caller and a server span at its host; a job a producer span in the process that launches
it and a consumer span in the process of each attempt. Exporters work in threads of the SDK, never in the loop.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Protocol

from attrs import evolve
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from fray.model.ids import split_attempt
from fray.model.messages.session import VERSION
from fray.model.monitoring.trace_context import TRACEPARENT, is_traceparent, sent_variables
from fray.model.specs import AttemptSpec, EndReason, JobInfo, JobSpec, Outcome

FLUSH_WITHIN_S = 2.0
"""Seconds that the end of a process waits until its spans have been sent."""
MESSAGE_LIMIT_CHARS = 1000
"""Longest message of an error in a span; longer ones are cut."""
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_FINE = (EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.OWNER_ENDED)
"""Ends that are not errors: of what has done its work, or was ended on request."""
_NO_PARENT = Context()

_untraced: ContextVar[bool] = ContextVar("fray_untraced", default=False)


class OutgoingCall(Protocol):
    """Part of an outgoing call that its span uses (`fray.runtime.calls.futures.CallFuture`)."""

    cancelled: bool

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(call)`` once the call is settled."""

    def failure(self) -> tuple[str, str] | None:
        """Return type and message of its error; None: it has a result."""


def start(attempt_spec: AttemptSpec | None) -> Tracing:
    """Set up the SDK as the environment says, unless the program has done so, and return what records spans.

    Raises:
        ImportError: an exporter is not installed.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # the program has set none
        # Not at exit, where the SDK would wait for an exporter without a limit: see `Tracing.flush`.
        own = TracerProvider(resource=Resource.create(_resource_of(attempt_spec)), shutdown_on_exit=False)
        for exporter in _make_exporters(os.environ):
            own.add_span_processor(BatchSpanProcessor(exporter))
        # The exporter writes a line for each batch and for each try; one says it all.
        logging.getLogger(_EXPORTER_LOG).addFilter(_FirstProblem())
        trace.set_tracer_provider(own)
    return Tracing(trace.get_tracer_provider(), attempt_spec)


def _resource_of(attempt_spec: AttemptSpec | None) -> dict[str, str | int]:
    process: dict[str, str | int] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    return process if attempt_spec is None else {**process, **_attempt_attributes(attempt_spec)}


def _make_exporters(environ: Mapping[str, str]) -> list[SpanExporter]:
    exporters = []
    for given in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        name = given.strip()
        if name == "otlp":
            protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not found:
            raise ImportError(f"an exporter of traces named {name!r}")
        exporters.append(found[0].load()())
    return exporters


class _FirstProblem(logging.Filter):
    """Passes the first warning or error of the exporter, and no other."""

    _passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        passes, self._passed = not self._passed, True
        record.msg = f"{record.msg} (of the exporter of traces; what else goes wrong there is not shown)"
        return passes


class Tracing:
    """Records the spans of this process."""

    def __init__(self, provider: trace.TracerProvider, attempt_spec: AttemptSpec | None = None) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("fray", VERSION)
        self._process_parent = _parent_of(os.environ.get(TRACEPARENT, "")) or _NO_PARENT
        """Parent of spans that are begun outside of any other, as on threads of the user's own."""
        self._is_attempt = attempt_spec is not None
        self._secrets = tuple(attempt_spec.secrets.values()) if attempt_spec is not None else ()

    def _parent(self) -> Context:
        current = contexts.get_current()
        return current if trace.get_current_span(current).get_span_context().is_valid else self._process_parent

    def flush(self) -> None:
        """Wait until the spans that have ended are sent, at most `FLUSH_WITHIN_S`."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is None:
            return
        # On a thread, because the SDK waits without a limit for a collector out of reach.
        thread = threading.Thread(target=flush, name="fray-traces", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the interpreter is at its end, and starts no threads any more
        thread.join(FLUSH_WITHIN_S)

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Record no spans of the calls that are made in the body."""
        token = _untraced.set(True)
        try:
            yield
        finally:
            _untraced.reset(token)

    # Calls -----------------------------------------------------------------------------------------------------------

    def start_call(self, call: OutgoingCall, label: str, method: str) -> bytes:
        """Begin the span of a call that is made now, on any thread; return the ``traceparent`` for its host, if any."""
        if _untraced.get():
            return b""
        attributes = {"rpc.system": "fray", "rpc.method": method, "fray.actor.name": label}
        span = self.tracer.start_span(f"{label}.{method}", self._parent(), SpanKind.CLIENT, attributes)
        call.add_done_callback(partial(_end_call, span))
        return _traceparent_of(span).encode()

    def served_call(self, traceparent: bytes) -> ServedCall | None:
        """Return the span of a call that arrives with this ``traceparent``; None if it is malformed."""
        parent = _parent_of(traceparent.decode("latin-1"))
        return None if parent is None else ServedCall(self, parent)

    # Jobs ------------------------------------------------------------------------------------------------------------

    def start_launch(self, spec: JobSpec) -> tuple[JobSpec, LaunchSpan]:
        """Begin the span of a launch, and return the spec with which the job's processes continue the trace."""
        attributes = {"fray.job.id": spec.job_id, "fray.job.name": spec.name, "fray.job.entry": spec.entry.value}
        span = self.tracer.start_span(f"job {spec.name}", self._parent(), SpanKind.PRODUCER, attributes)
        traceparent = _traceparent_of(span)
        variables = {**sent_variables(os.environ), **({TRACEPARENT: traceparent} if traceparent else {})}
        return evolve(spec, trace_vars=variables), LaunchSpan(span)

    def enter_attempt(self, attempt_spec: AttemptSpec) -> AttemptSpan:
        """Begin the span of an attempt and make it the current one of the running context."""
        parent = _parent_of(attempt_spec.spec.trace_vars.get(TRACEPARENT, "")) or _NO_PARENT
        attributes = _attempt_attributes(attempt_spec)
        span = self.tracer.start_span(f"attempt {attempt_spec.spec.name}", parent, SpanKind.CONSUMER, attributes)
        entered = trace.set_span_in_context(span, parent)
        if self._is_attempt:
            self._process_parent = entered
        return AttemptSpan(span, contexts.attach(entered))

    def redacted(self, text: str) -> str:
        """Return a text of the user's code without the values of the job's secrets, cut to `MESSAGE_LIMIT_CHARS`."""
        for secret in self._secrets:
            text = text.replace(secret, "[secret]") if secret else text
        return text[:MESSAGE_LIMIT_CHARS]


def _end_call(span: Span, call: OutgoingCall) -> None:
    failure = call.failure()
    if call.cancelled:
        span.set_attribute("fray.outcome", "cancelled")
    elif failure is not None:
        _set_error(span, *failure)
    span.end()


def _set_error(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {message}"[:MESSAGE_LIMIT_CHARS]))


class ServedCall:
    """Span of one call at its host."""

    __slots__ = ("_parent", "_span", "_tracing")

    def __init__(self, tracing: Tracing, parent: Context) -> None:
        self._tracing = tracing
        self._parent = parent
        self._span: Span | None = None

    def enter(self, actor: str, actor_id: str, method: str) -> None:
        """Begin the span, unless it has begun, and make it the current one of the running context."""
        if self._span is None:
            attributes = {"rpc.system": "fray", "rpc.method": method, "fray.actor.name": actor}
            attributes["fray.actor.id"] = actor_id
            tracer = self._tracing.tracer
            self._span = tracer.start_span(f"{actor}.{method}", self._parent, SpanKind.SERVER, attributes)
        # Not detached: each call runs in a context of its own.
        contexts.attach(trace.set_span_in_context(self._span, self._parent))

    def fail(self, error: BaseException) -> None:
        """Note what the method raised. Any thread."""
        if self._span is not None:
            try:
                text = str(error)
            except Exception:  # noqa: BLE001 - a user's __str__
                text = "(its text cannot be made)"
            _set_error(self._span, type(error).__name__, self._tracing.redacted(text))

    def end(self, cancelled: bool) -> None:
        """End the span, if it has begun."""
        if self._span is not None:
            if cancelled:
                self._span.set_attribute("fray.outcome", "cancelled")
            self._span.end()


class LaunchSpan:
    """Span of a job in the process that launches it, from the request to the end of the job."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def fail(self, error: BaseException) -> None:
        """End the span of a launch that was refused or cancelled."""
        _set_error(self._span, type(error).__name__, str(error))
        self._span.end()

    def end(self, info: JobInfo) -> None:
        """End the span with the last known state of the job."""
        span = self._span
        span.set_attribute("fray.outcome", str(info.cause or info.state))
        if info.attempts:
            generations = {split_attempt(each.attempt_id)[1] for each in info.attempts}
            span.set_attribute("fray.attempt", max(generations))
            span.set_attribute("fray.node", info.attempts[-1].node)
        if info.start_time is not None:
            span.add_event("started", timestamp=int(info.start_time * 1e9))
        if info.state.finished and info.cause not in _FINE:
            _set_error(span, str(info.cause or info.state), info.error_message or "")
        span.end()


class AttemptSpan:
    """Span of one attempt in its own process, around the user's code."""

    def __init__(self, span: Span, token: Token[Context]) -> None:
        self._span = span
        self._token = token

    def end(self, outcome: Outcome | None) -> None:
        """End the span; None: the attempt was cancelled."""
        cause = EndReason.STOPPED if outcome is None else outcome.cause
        self._span.set_attribute("fray.outcome", str(cause))
        if outcome is not None and cause not in _FINE:
            _set_error(self._span, str(cause), outcome.message)
        self._span.end()
        contexts.detach(self._token)


def _attempt_attributes(attempt_spec: AttemptSpec) -> dict[str, str | int]:
    job_id, generation, member = split_attempt(attempt_spec.attempt_id)
    return {
        "fray.job.id": job_id,
        "fray.job.name": attempt_spec.spec.name,
        "fray.attempt": generation,
        "fray.member": member,
        "fray.node": attempt_spec.node,
    }


# W3C Trace Context ---------------------------------------------------------------------------------------------------


def _traceparent_of(span: Span) -> str:
    """Return the ``traceparent`` that names ``span``; empty if the program has set a provider that makes no ids."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _parent_of(traceparent: str) -> Context | None:
    """Return the context in which a span continues the trace; None if it is malformed."""
    if not is_traceparent(traceparent):
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
