"""Trace context of calls and jobs: the ``traceparent`` of W3C Trace Context, and the variables that jobs get. Pure.

What is done with them is in `fray.runtime.tracing`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fray.errors import InvalidRequest

TRACEPARENT = "TRACEPARENT"
"""Variable of a job with the span of its launch."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
TRACEPARENT_BYTES = 55
# Those for headers, certificates and keys are left out: they may hold credentials, and a job's record is shown.
SENT_VARIABLES = (
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    *("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    *("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"),
    *("OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION"),
    *("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_EXPORTER"),
    *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT"),
    *("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
)
"""Variables of OpenTelemetry that jobs get from the process that launches them."""
_ALLOWED = frozenset((TRACEPARENT, *SENT_VARIABLES))
VALUE_LIMIT_CHARS = 4096
"""Longest value of such a variable; longer ones are not sent."""


def is_traceparent(text: str) -> bool:
    """Return whether ``text`` is a ``traceparent`` of version 00: with ids of a trace and a span that are not zero."""
    return _TRACEPARENT.fullmatch(text) is not None


def sent_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of OpenTelemetry in ``environ`` that jobs get, without endpoints that contain a password."""
    found = ((name, environ[name]) for name in SENT_VARIABLES if environ.get(name))
    return {name: value for name, value in found if _can_be_sent(name, value)}


def check_trace_vars(variables: Mapping[str, str], subject: str) -> None:
    """Check the ``trace_vars`` of the spec of a job.

    Raises:
        InvalidRequest: a name that is not among `SENT_VARIABLES`, a value that cannot be a variable or is too long, or
            a malformed ``traceparent``.
    """
    for name, value in variables.items():
        if name not in _ALLOWED:
            raise InvalidRequest(f"{subject}: {name[:60]!r} is not among the variables for traces")
        if not _can_be_sent(name, value) or (name == TRACEPARENT and not is_traceparent(value)):
            raise InvalidRequest(f"{subject}: the value of {name} is malformed, or longer than {VALUE_LIMIT_CHARS}")


def _can_be_sent(name: str, value: str) -> bool:
    # An address may contain a user's name and password, in front of an "@".
    return len(value) <= VALUE_LIMIT_CHARS and "\0" not in value and not (name.endswith("_ENDPOINT") and "@" in value)
