"""The parts of a trace that are sent to other processes, and those that are refused there."""

from __future__ import annotations

import pytest

from fray.errors import InvalidRequest
from fray.model.monitoring.trace_context import (
    TRACEPARENT,
    VALUE_LIMIT_CHARS,
    check_trace_vars,
    is_traceparent,
    sent_variables,
)

RIGHT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_of_the_standard_is_one() -> None:
    assert is_traceparent(RIGHT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        RIGHT[:-1],
        RIGHT + "0",
        RIGHT + "\n",
        RIGHT.upper(),
        RIGHT.replace("-", "_"),
        "ff" + RIGHT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        RIGHT.replace("0a", "é0"),
        RIGHT.replace("1", "\N{ARABIC-INDIC DIGIT ONE}"),
    ],
)
def test_anything_else_is_no_traceparent(text: str) -> None:
    assert not is_traceparent(text)
    with pytest.raises(InvalidRequest, match="the value of TRACEPARENT is malformed"):
        check_trace_vars({TRACEPARENT: text}, "job 'a'")


def test_jobs_get_the_variables_that_hold_no_credentials() -> None:
    environ = {
        "OTEL_SERVICE_NAME": "lab",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://user:password@collector/v1/traces",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer secret",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer secret",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/home/user/key.pem",
        "OTEL_RESOURCE_ATTRIBUTES": "x" * (VALUE_LIMIT_CHARS + 1),
        "OTEL_TRACES_SAMPLER": "",
        "PATH": "/bin",
    }
    sent = sent_variables(environ)
    assert sent == {"OTEL_SERVICE_NAME": "lab", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    check_trace_vars({**sent, TRACEPARENT: RIGHT}, "job 'a'")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"LD_PRELOAD": "/tmp/x.so"}, "'LD_PRELOAD' is not among the variables for traces"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, "'OTEL_EXPORTER_OTLP_HEADERS' is not among the variables for traces"),
        ({"OTEL_SERVICE_NAME": "x" * (VALUE_LIMIT_CHARS + 1)}, "OTEL_SERVICE_NAME is malformed, or longer than 4096"),
        ({"OTEL_SERVICE_NAME": "a\0b"}, "OTEL_SERVICE_NAME is malformed"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:b@c"}, "OTEL_EXPORTER_OTLP_ENDPOINT is malformed"),
    ],
)
def test_the_controller_refuses_other_variables_and_values(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        check_trace_vars(variables, "job 'a'")
