"""Inference server: requests, streams, cancellation, weights, pauses, failures; as an object and as an actor."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

import fray
from fray.errors import ActorFailed
from fray.rl.core.versions import VersionName
from fray.rl.inference import request_table
from fray.rl.inference.request_table import ReaderTooSlow, ServerBusy
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.inference.server import InferenceServer
from tests.support.counting_engine import TOKENIZER, CountingEngine, OtherTable, request

V0, V1 = VersionName(0, 0), VersionName(0, 1)


@asynccontextmanager
async def open_server(**options: Any) -> AsyncIterator[tuple[InferenceServer, CountingEngine]]:
    """Start a server whose engine the test can look at."""
    engine = CountingEngine(**options)
    server = InferenceServer(lambda: engine)
    try:
        yield server, engine
    finally:
        if engine.gate is not None:
            engine.gate.release(1_000)
        await server.aclose()


def texts(completions: list[Completion]) -> list[str]:
    return [TOKENIZER.decode(each.token_ids) for each in completions]


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something that another thread does has happened."""
    while not holds():
        await trio.lowlevel.checkpoint()


async def test_requests_are_answered_with_tokens_logprobs_and_versions() -> None:
    async with open_server() as (server, _):
        (answer,) = await server.generate(request("a", max_tokens=8))
        assert (TOKENIZER.decode(answer.token_ids), answer.finish_reason) == ("3456$", "stop")
        assert answer.logprobs == [-0.4, -0.5, -0.6, -0.7, -1.4]
        assert answer.segments == [(V0, 5)]
        assert texts(await server.generate(request("b", n=3))) == ["3456$", "4567$", "5678$"]


async def test_requests_wait_for_the_first_weights_and_a_version_that_is_there_ends_none() -> None:
    engine, answers = CountingEngine(gate=threading.Semaphore(100)), list[Completion]()
    server = InferenceServer(lambda: engine, waits=True)

    async def ask(name: str) -> None:
        answers.extend(await server.generate(request(name, max_tokens=2)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "a")
        await trio.sleep(0.1)
        assert engine.added == []
        await server.load_weights(V1, None, b"\x01")
    assert answers[0].segments == [(V1, 2)]
    assert engine.gate is not None
    while engine.gate.acquire(blocking=False):
        pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "b")
        await until(lambda: len(engine.sequences) == 1)
        # As from a controller that has taken over the run: nothing is to be read, or ended.
        await server.load_weights(V1, None, None, "abort")
        await server.load_weights(V1, None, None, "wait")
        engine.gate.release(100)
    assert answers[1].finish_reason == "length"
    await server.aclose()


async def test_many_requests_are_one_message_and_answered_in_order() -> None:
    async with open_server() as (server, engine):
        answers = await server.generate_many([request("a"), request("b", "9"), request("c", n=2)])
        assert [texts(each) for each in answers] == [["3456$"], ["9012$"], ["3456$", "4567$"]]
        assert engine.steps == 5


async def test_of_many_requests_one_that_is_refused_cancels_the_others() -> None:
    async with open_server(gate=threading.Semaphore(1)) as (server, engine):
        with pytest.raises(ValueError, match="the prompt has 80 tokens, the model takes 64"):
            await server.generate_many([request("long", "1" * 80), request("a")])
        engine.gate.release(10)  # type: ignore[union-attr]
        await until(lambda: engine.cancelled == ["a"])


async def test_a_repeated_id_attaches_to_the_first_request() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine):
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await server.generate(request("a")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            engine.gate.release(1_000)  # type: ignore[union-attr]
        answers.append(await server.generate(request("a")))  # after the end, too
        assert engine.added == ["a"]
        assert answers[0] == answers[1] == answers[2]


async def test_an_id_that_names_another_request_is_refused() -> None:
    async with open_server() as (server, _):
        await server.generate(request("a"))
        with pytest.raises(ValueError, match="request id 'a' names a request with another prompt or sampling"):
            await server.generate(request("a", "13"))


async def test_an_answer_is_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "REMEMBERED_LIMIT", 2)
    async with open_server() as (server, engine):
        for name in "abcca":
            await server.generate(request(name))
        assert engine.added == ["a", "b", "c", "a"]


async def test_a_request_that_every_caller_has_cancelled_ends_in_the_engine() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine):
        async with trio.open_nursery() as one, trio.open_nursery() as other:
            one.start_soon(server.generate, request("a"))
            other.start_soon(server.generate, request("a"))
            await trio.testing.wait_all_tasks_blocked()
            one.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            engine.gate.release(2)  # type: ignore[union-attr]
            await until(lambda: engine.steps == 2)
            assert engine.cancelled == []
            other.cancel_scope.cancel()
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await until(lambda: engine.cancelled == ["a"])
        assert texts(await server.generate(request("a"))) == ["3456$"]  # its id is free
        assert engine.added == ["a", "a"]


async def test_requests_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "REQUESTS_LIMIT", 2)
    async with open_server() as (server, _):
        assert len(await server.generate_many([request("a"), request("b")])) == 2
        with pytest.raises(ServerBusy, match="the server has 2 open requests; send 'e' to another one, or later"):
            await server.generate_many([request("c"), request("d"), request("e")])
        assert texts(await server.generate(request("e"))) == ["3456$"]


# Batches: answers as they end ----------------------------------------------------------------------------------------


async def test_a_batch_is_answered_request_by_request_as_they_end() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine):
        requests = [request("long", max_tokens=4), request("short", max_tokens=1), request("no", "1" * 80)]
        async with aclosing(server.generate_each("batch", requests)) as answers:
            engine.gate.release(1)  # type: ignore[union-attr]
            (refused, error), (first, short) = sorted(await anext(answers), key=lambda each: each[0])
            assert (refused, first) == ("no", "short")
            assert isinstance(error, ValueError)
            assert "the prompt has 80 tokens" in str(error)
            assert isinstance(short, list)
            assert texts(short) == ["3"]
            engine.gate.release(1_000)  # type: ignore[union-attr]
            ((last, answer),) = await anext(answers)
            assert last == "long"
            assert isinstance(answer, list)
            assert texts(answer) == ["3456"]
            assert [few async for few in answers] == []


async def test_a_withdrawn_request_of_a_batch_ends_in_the_engine_and_the_others_continue() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine):
        async with aclosing(server.generate_each("batch", [request("a"), request("b")])) as answers:
            found: list[Any] = []

            async def take() -> None:
                found.extend([few async for few in answers])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                await trio.testing.wait_all_tasks_blocked()
                await server.withdraw("batch", ["a", "unknown"])
                await server.withdraw("other", ["b"])
                engine.gate.release(1_000)  # type: ignore[union-attr]
        ((name, answer),) = [each for few in found for each in few]
        assert name == "b"
        assert texts(answer) == ["3456$"]
        assert engine.cancelled == ["a"]


async def test_closing_a_batch_cancels_what_is_not_answered() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine):
        async with aclosing(server.generate_each("batch", [request("a", max_tokens=1), request("b")])) as answers:
            engine.gate.release(1)  # type: ignore[union-attr]
            assert [name for name, _ in await anext(answers)] == ["a"]
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await until(lambda: engine.cancelled == ["b"])


async def test_a_repetition_in_a_batch_gets_the_answer_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fray.rl.inference.server.ANSWER_TOKENS", 1)
    async with open_server() as (server, engine):
        await server.generate(request("a"))
        found = [few async for few in server.generate_each("batch", [request("a"), request("b")])]
        assert sorted(name for few in found for name, _ in few) == ["a", "b"]
        assert [len(few) for few in found] == [1, 1]
        assert engine.added == ["a", "b"]


# Streams -------------------------------------------------------------------------------------------------------------


async def test_a_stream_has_each_token_and_then_the_completion() -> None:
    async with open_server() as (server, _):
        items = [item async for item in server.stream(request("a", n=2, max_tokens=3))]
        tokens = [item for item in items if isinstance(item, TokenEvent)]
        assert [(item.index, item.token_id) for item in tokens] == [(0, 3), (1, 4), (0, 4), (1, 5), (0, 5), (1, 6)]
        assert tokens[0] == TokenEvent("a", 0, 3, -0.4, V0)
        ends = [item for item in items if isinstance(item, Completion)]
        assert [(end.index, end.token_ids, end.finish_reason) for end in ends] == [
            (0, [3, 4, 5], "length"),
            (1, [4, 5, 6], "length"),
        ]


async def test_a_stream_that_is_left_cancels_its_request() -> None:
    async with open_server(gate=threading.Semaphore(1)) as (server, engine):
        async with aclosing(server.stream(request("a"))) as items:
            async for item in items:
                assert isinstance(item, TokenEvent)
                break
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await until(lambda: engine.cancelled == ["a"])


async def test_a_stream_whose_reader_is_too_far_behind_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "UNREAD_TOKENS_LIMIT", 3)
    async with (
        open_server(gate=threading.Semaphore(1), digits=10**6, max_length=10**6) as (server, engine),
        aclosing(server.stream(request("a", max_tokens=10**5))) as items,
    ):
        await anext(items)
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await until(lambda: engine.cancelled == ["a"])
        with pytest.raises(ReaderTooSlow, match="the reader of request 'a' is 3 tokens behind"):
            await anext(items)


# Weights -------------------------------------------------------------------------------------------------------------


async def start(server: InferenceServer, engine: CountingEngine, nursery: trio.Nursery, name: str) -> list[Any]:
    """Begin a request and let it have two tokens; the list gets its completions at the end."""
    answers: list[Any] = []

    async def ask() -> None:
        answers.extend(await server.generate(request(name)))

    nursery.start_soon(ask)
    engine.gate.release(2)  # type: ignore[union-attr]
    await until(lambda: engine.steps == 2)
    return answers


@pytest.mark.parametrize(
    ("mode", "segments", "reason"),
    [("keep", [(V0, 3), (V1, 2)], "stop"), ("wait", [(V0, 5)], "stop"), ("abort", [(V0, 3)], "abort")],
)
async def test_requests_in_flight_continue_finish_or_end_when_weights_are_loaded(
    mode: Any, segments: Any, reason: str
) -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine), trio.open_nursery() as nursery:
        answers = await start(server, engine, nursery, "a")
        nursery.start_soon(server.load_weights, V1, None, b"\x01", mode)
        await trio.testing.wait_all_tasks_blocked()
        later: list[Any] = []

        async def ask() -> None:
            later.extend(await server.generate(request("b")))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await until(lambda: bool(answers and later))
        assert (answers[0].segments, answers[0].finish_reason) == (segments, reason)
        assert later[0].segments == [(V1, 5)]
        assert (await server.status())["version"] == V1


async def test_weights_may_be_a_reference() -> None:
    class Reference:
        def __await__(self) -> Any:
            return b"\x02"
            yield

    async with open_server() as (server, engine):
        await server.load_weights(V1, None, Reference())
        assert engine.offset == 2


async def test_weights_of_another_model_an_older_version_and_an_unknown_mode_are_refused() -> None:
    async with open_server() as (server, _):
        await server.load_weights(V1, None, b"\x01")
        with pytest.raises(ValueError, match=r"it lacks embed\.weight"):
            await server.load_weights(VersionName(0, 2), OtherTable(), b"\x02")
        with pytest.raises(ValueError, match=r"version 0\.0 is older than 0\.1, which the server has"):
            await server.load_weights(V0, None, b"\x00")
        with pytest.raises(ValueError, match="unknown mode 'drain'; keep, wait or abort"):
            await server.load_weights(V0, None, b"\x00", "drain")  # type: ignore[arg-type]
        assert (await server.generate(request("a")))[0].segments == [(V1, 5)]


async def test_an_aborted_request_runs_again_under_its_id() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine), trio.open_nursery() as nursery:
        answers = await start(server, engine, nursery, "a")
        engine.gate.release(1_000)  # type: ignore[union-attr]
        await server.pause("abort")
        await until(lambda: bool(answers))
        await server.resume()
        assert answers[0].finish_reason == "abort" or answers[0].finish_reason == "stop"
        again = await server.generate(request("a"))
        assert again[0].finish_reason == "stop"


async def test_an_update_that_waits_is_withdrawn_when_its_caller_is_cancelled() -> None:
    async with (
        open_server(gate=threading.Semaphore(0), digits=10**6, max_length=10**6) as (server, engine),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(server.generate, request("a", max_tokens=10**5))
        engine.gate.release(2)  # type: ignore[union-attr]
        await until(lambda: engine.steps == 2)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(server.load_weights, V1, None, b"\x01", "wait")
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
                engine.gate.release(1_000)  # type: ignore[union-attr]
        engine.gate.release(1_000)  # type: ignore[union-attr]
        later = await server.generate(request("b", max_tokens=2))  # which would wait for the update
        assert later[0].segments == [(V0, 2)]
        nursery.cancel_scope.cancel()


async def test_a_paused_server_answers_after_it_is_resumed() -> None:
    async with open_server() as (server, engine), trio.open_nursery() as nursery:
        await server.pause()
        assert await server.is_paused()
        answers: list[Any] = []

        async def ask() -> None:
            answers.extend(await server.generate(request("a")))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert (await server.status())["waiting"] == 1
        assert engine.steps == 0
        await server.resume()
        await until(lambda: bool(answers))
        assert not await server.is_paused()


async def test_the_status_counts() -> None:
    async with open_server() as (server, _):
        await server.generate_many([request("a"), request("b")])
        status = await server.status()
        assert {key: status[key] for key in ("version", "paused", "running", "waiting", "tokens", "steps")} == {
            "version": V0,
            "paused": False,
            "running": 0,
            "waiting": 0,
            "tokens": 10,
            "steps": 5,
        }
        assert status["tokens_per_s"] > 0
        assert status["busy_s"] > 0
        assert 0 < status["busy_share"] <= 1
        assert (await server.busy_time())[1] == status["busy_s"]


# Failures ------------------------------------------------------------------------------------------------------------


async def test_a_failing_engine_fails_every_request_with_its_error() -> None:
    async with open_server(fail_at=3) as (server, _):
        for ask in (
            partial(server.generate_many, [request("a"), request("b")]),
            partial(server.generate, request("c")),
            partial(server.load_weights, V1, None, b"\x01"),
            server.status,
            server.is_paused,
        ):
            with pytest.raises(ActorFailed, match="its engine failed: RuntimeError: device lost") as caught:
                await ask()
            assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(ActorFailed):
            await anext(server.stream(request("d")))


async def test_an_engine_that_cannot_be_made_fails_what_was_sent_meanwhile() -> None:
    def make() -> CountingEngine:
        raise FileNotFoundError("no weights in ./model")

    server = InferenceServer(make)
    for ask in (partial(server.generate, request("a")), server.status):
        with pytest.raises(ActorFailed, match=r"its engine failed: FileNotFoundError: no weights in \./model"):
            await ask()
    await server.aclose()


async def test_closing_fails_what_is_open() -> None:
    async with open_server(gate=threading.Semaphore(0)) as (server, engine), trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ActorFailed, match="inference server has ended"):
                await server.generate(request("a"))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as pausing:
            pausing.start_soon(server.pause, "keep")
            await trio.testing.wait_all_tasks_blocked()
            engine.gate.release(1_000)  # type: ignore[union-attr]  # after the pause was sent, else the answer may be first
        await server.aclose()


async def test_an_engine_that_is_being_made_is_not_waited_for(autojump_clock: Any) -> None:
    go_on, began = threading.Event(), trio.current_time()

    def make() -> CountingEngine:
        go_on.wait()
        return CountingEngine()

    server = InferenceServer(make)
    try:
        await server.aclose()
        assert trio.current_time() == began
        with pytest.raises(ActorFailed, match="inference server has ended"):
            await server.generate(request("a"))
    finally:
        go_on.set()
    await server._thread.ended.wait()


# As an actor ---------------------------------------------------------------------------------------------------------


async def test_as_an_actor_it_answers_streams_and_ends_with_its_scope() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        server = await scope.create_actor(InferenceServer, CountingEngine, name="server-0")
        assert texts(await server.generate(request("a"))) == ["3456$"]
        async with server.stream.stream(request("b", max_tokens=2)) as items:
            assert [type(item).__name__ async for item in items] == ["TokenEvent", "TokenEvent", "Completion"]
        await server.load_weights(V1, None, b"\x01")
        assert (await server.status())["version"] == V1
        assert any("inference server" in thread.name for thread in threading.enumerate())
    await until(lambda: not any("inference server" in thread.name for thread in threading.enumerate()))


async def test_a_failing_engine_fails_the_actor() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        make = partial(CountingEngine, fail_at=1)
        server = await scope.create_actor(InferenceServer, make, on_failure="absorb")
        with pytest.raises(ActorFailed, match="device lost"):
            await server.generate(request("a"))
        with pytest.raises((ActorFailed, fray.ActorDied), match="device lost"):
            await server.generate(request("b"))


async def test_a_cancelled_call_ends_the_request_in_the_engine() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        server = await scope.create_actor(InferenceServer, partial(CountingEngine, digits=10**9, max_length=10**9))
        endless = GenerateRequest("a", (1,), request("a", max_tokens=10**8).sampling)
        with trio.move_on_after(0.05):
            await server.generate(endless)
        while (await server.status())["running"]:  # until the thread has ended it, else the test hangs
            pass
