"""Spans of calls and jobs within one process; those of real processes are in tests/processes/test_traces_real.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import fray
import fray.aio
from fray import Entrypoint, JobRequest
from fray.net.channel.versions import Release
from fray.runtime import tracing
from fray.runtime.calls.route import DEFAULT_OPTIONS
from fray.runtime.threads.executor import ThreadExecutor
from fray.runtime.tracing_sdk import Tracing
from tests.support.calls import Stage, Way, open_stage


class Spans:
    """The spans of this process that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.tracing = Tracing(provider)

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.all() if f"{span.kind.name.lower()} {span.name}" == name]
        return found

    def ancestry(self, name: str) -> list[str]:
        by_id = {span.context.span_id: span for span in self.all()}
        span: ReadableSpan | None = self.named(name)
        steps = []
        while span is not None:
            steps.append(f"{span.kind.name.lower()} {span.name}")
            span = by_id.get(span.parent.span_id) if span.parent is not None else None
        return steps


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    monkeypatch.setattr(tracing, "active", spans.tracing)
    return spans


def decorated(method: Any) -> Any:
    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    return call


class Sync:
    """An actor whose methods run on threads."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans

    def inside(self) -> None:
        assert tracing.active is not None
        with tracing.active.tracer.start_as_current_span("own"):
            pass

    def items(self) -> Iterator[int]:
        for number in range(2):
            with self.spans.tracer.start_as_current_span(f"item {number}"):
                yield number

    def fail(self) -> None:
        raise KeyError("missing")


class Async(Sync):
    """An actor whose methods run in the loop."""

    async def inside_async(self) -> None:
        await trio.lowlevel.checkpoint()
        with self.spans.tracer.start_as_current_span("own"):
            await trio.lowlevel.checkpoint()

    @decorated
    async def inside_decorated(self) -> None:
        await self.inside_async()

    async def items_async(self) -> AsyncIterator[int]:
        for number in self.items():
            yield number

    async def wait(self) -> None:
        await trio.sleep_forever()


async def actor(stage: Stage, spans: Spans, cls: type[Sync]) -> Way:
    if issubclass(cls, Async):
        return await stage.actor(cls(spans))
    executor = ThreadExecutor()
    executor.start()
    return await stage.actor(cls(spans), executor=executor)


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "method"), [(Sync, "inside"), (Async, "inside"), (Async, "inside_async"), (Async, "inside_decorated")]
)
async def test_spans_in_a_method_are_part_of_its_call(spans: Spans, cls: type[Sync], method: str) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, cls)
        with spans.tracer.start_as_current_span("caller"):
            await way.call(method)
    chain = ["internal own", f"server a.{method}", f"client a.{method}", "internal caller"]
    assert spans.ancestry("internal own") == chain


@pytest.mark.parametrize(("cls", "method"), [(Sync, "items"), (Async, "items"), (Async, "items_async")])
async def test_spans_between_the_items_of_a_stream_are_part_of_it(spans: Spans, cls: type[Sync], method: str) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, cls)
        async with way.route.stream(method) as stream:
            assert [item async for item in stream] == [0, 1]
    assert spans.ancestry("internal item 1") == ["internal item 1", f"server a.{method}", f"client a.{method}"]


@pytest.mark.parametrize("cls", [Sync, Async])
async def test_both_spans_of_a_call_show_what_its_method_raised(spans: Spans, cls: type[Sync]) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, cls)
        with pytest.raises(KeyError):
            await way.call("fail")
    for kind in ("client", "server"):
        span = spans.named(f"{kind} a.fail")
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "KeyError: 'missing'"
        assert span.attributes["error.type"] == "KeyError"


async def test_a_call_that_its_caller_has_cancelled_is_no_error(spans: Spans, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        with trio.move_on_after(1):
            await way.call("wait")
    for kind in ("client", "server"):
        span = spans.named(f"{kind} a.wait")
        assert span.status.status_code is StatusCode.UNSET
        assert span.attributes["fray.outcome"] == "cancelled"


async def test_a_call_that_cannot_be_delivered_has_an_error_in_its_caller(spans: Spans) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        with pytest.raises(fray.NoSuchMethod):
            await way.call("missing")
    assert spans.named("client a.missing").attributes["error.type"] == "fray.errors.NoSuchMethod"
    assert [span.name for span in spans.all()] == ["a.missing"]


@pytest.mark.parametrize(
    "text",
    [
        b"not a traceparent",
        b"\xff\xfe",
        b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" * 1000,
    ],
)
async def test_what_is_no_traceparent_is_ignored_by_the_host(spans: Spans, text: bytes) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        call = way.route.make("inside_async")
        call.trace = text
        way.route.send(call, DEFAULT_OPTIONS, None)
        await call
    # The call has run, without a span of its host.
    assert [span.name for span in spans.all() if span.kind.name == "SERVER"] == []
    assert spans.ancestry("internal own") == ["internal own"]


async def test_a_trace_counts_for_the_call_of_its_number_alone(spans: Spans) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        await way.call("inside_async")
        assert way.route.binding is not None
        channel = way.route.binding.connection._channel
        assert channel is not None
        channel.send_nowait(44, 1_000, b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        with spans.tracer.start_as_current_span("caller"):
            await way.call("inside")
    assert len({span.context.trace_id for span in spans.all()}) == 2


async def test_a_host_of_an_earlier_release_is_sent_no_trace(spans: Spans) -> None:
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        await way.call("inside")
        assert way.route.binding is not None
        channel = way.route.binding.connection._channel
        assert channel is not None
        channel.peer_release = Release(capabilities=frozenset())
        await way.call("inside_async")
    assert spans.named("client a.inside_async")
    assert [span.name for span in spans.all() if span.kind.name == "SERVER"] == ["a.inside"]


async def test_without_tracing_calls_have_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.active is None
    spans = Spans()
    async with open_stage() as stage:
        way = await actor(stage, spans, Async)
        call = way.start("inside_async")
        await call
        assert call.trace == b""
    assert [span.name for span in spans.all()] == ["own"]


# Jobs ----------------------------------------------------------------------------------------------------------------


async def test_a_launch_that_is_refused_has_an_error(spans: Spans) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("work") as scope:
        await scope.create_actor(Sync, None, name="taken")
        with pytest.raises(fray.NameInUse):
            await scope.create_actor(Sync, None, name="taken")
    first, second = [span for span in spans.all() if span.name == "job taken"]
    assert first.attributes["error.type"] == "NameInUse"
    assert second.attributes["fray.outcome"] == "stopped"


async def test_the_span_of_a_detached_job_ends_when_it_is_accepted(spans: Spans) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("work") as scope:
        actor = await scope.create_actor(Sync, None, name="lasting", lifetime="detached")
        assert spans.named("producer job lasting")
        await fray.kill(actor) if hasattr(fray, "kill") else None


async def test_a_request_of_another_span_is_the_same_request(spans: Spans) -> None:
    request = JobRequest(name="once", entrypoint=Entrypoint.from_callable(trio.sleep_forever))
    async with fray.open_cluster("local") as cluster, cluster.open_scope("work") as scope:
        found = []
        for _ in range(2):
            with spans.tracer.start_as_current_span("caller"):
                found.append(await scope.launch(request, adopt_existing=True))
        first, second = found
        assert first.id == second.id
        await first.terminate()


def test_calls_and_jobs_of_asyncio_programs_are_traced(spans: Spans) -> None:
    async def main() -> None:
        async with fray.aio.open_cluster("local") as cluster, cluster.open_scope("work") as scope:
            with spans.tracer.start_as_current_span("caller"):
                actor = await scope.create_actor(Sync, None, name="sync")
                await actor.inside()

    asyncio.run(main())
    chain = ["internal own", "server sync.inside", "client sync.inside", "internal caller"]
    assert spans.ancestry("internal own") == chain
    assert spans.ancestry("consumer attempt sync")[1:] == ["producer job sync", "internal caller"]


# Configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "configured"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "lab"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "None"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_variables_of_opentelemetry_decide_whether_spans_are_recorded(
    environ: dict[str, str], configured: bool
) -> None:
    assert tracing.is_configured(environ) == configured
