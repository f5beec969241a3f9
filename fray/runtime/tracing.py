"""Traces of jobs and calls with OpenTelemetry, if the environment of this process asks for them: the door to them.

`active` is None unless `configure` has found the variables of OpenTelemetry. Calls and launches look at nothing else,
and the library, which `fray.runtime.tracing_sdk` alone opens, is not even imported.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from fray.model.specs import AttemptSpec, JobSpec, Outcome

if TYPE_CHECKING:
    from fray.runtime.tracing_sdk import LaunchSpan, Tracing

active: Tracing | None = None
"""Set by `configure`; None: this process records no spans."""
_configured = False
_AS_USUAL = nullcontext()
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether variables ask for traces: an exporter of traces, or an endpoint of OTLP."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporters != "none" if exporters else any(environ.get(name) for name in _ENDPOINTS)


def configure(attempt_spec: AttemptSpec | None = None) -> None:
    """Begin to record spans if the environment of this process asks for it; later calls do nothing.

    Not for zygotes: the exporter has a thread. If packages are missing, a warning is printed, and nothing fails.

    Args:
        attempt_spec: attempt that this process runs; None: a driver.
    """
    global active, _configured
    if _configured:
        return
    _configured = True
    if not is_configured(os.environ):
        return
    try:
        from fray.runtime import tracing_sdk  # late: it imports OpenTelemetry

        active = tracing_sdk.start(attempt_spec)
    except ImportError as error:
        _warn(f"a package is missing ({error}), and no traces are recorded: pip install 'fray[otel]'")
    except Exception as error:  # noqa: BLE001 - a malformed variable, or a plug-in of OpenTelemetry
        _warn(f"no traces are recorded: {type(error).__name__}: {error}")
    if attempt_spec is None:  # the process of an attempt does so itself, before its outcome is read
        atexit.register(flush)


def _warn(text: str) -> None:
    print(f"fray: OpenTelemetry is configured, but {text}", file=sys.stderr, flush=True)


def flush() -> None:
    """Wait until the spans that have ended are sent, at most 2 s (`fray.runtime.tracing_sdk.FLUSH_WITHIN_S`)."""
    if active is not None:
        active.flush()


def untraced() -> AbstractContextManager[None]:
    """Record no spans of the calls that are made in the body: calls of Fray itself, for no one call of the user."""
    return _AS_USUAL if active is None else active.untraced()


def start_launches(specs: Sequence[JobSpec]) -> tuple[Sequence[JobSpec], list[LaunchSpan]]:
    """Begin the spans of launches.

    Returns:
        The specs with which the processes of the jobs continue the trace, and the spans; none if none are recorded.
    """
    if active is None:
        return specs, []
    started = [active.start_launch(spec) for spec in specs]
    return [spec for spec, _ in started], [span for _, span in started]


@contextmanager
def attempt_span(attempt_spec: AttemptSpec) -> Iterator[Callable[[Outcome], object]]:
    """Run the body, the code of an attempt, in a span. The body calls the function that is yielded with its outcome."""
    if active is None:
        yield lambda outcome: None
        return
    span = active.enter_attempt(attempt_spec)
    outcomes: list[Outcome] = []
    try:
        yield outcomes.append
    finally:
        span.end(outcomes[0] if outcomes else None)
