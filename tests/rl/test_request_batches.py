"""Requests of a rollout process in batches: one message for those that begin together, and each one's own end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve

import fray
from fray.api.actors.current_actor import current_actor
from fray.api.actors.monitor import Up, monitor
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest
from fray.rl.inference.server import InferenceServer
from fray.rl.messages import ServerRoute
from fray.rl.rollout import request_batches
from fray.rl.rollout.request_batches import RequestBatches
from fray.rl.rollout.server_choice import RequestGivenUp
from tests.support.counting_engine import TOKENIZER, CountingEngine, request

ENDLESS = 10**8


class NotingServer(InferenceServer):
    """Server that notes its batches and what was withdrawn."""

    def __init__(self, make_engine: Any) -> None:
        super().__init__(make_engine)
        self.batches: list[list[str]] = []
        self.withdrawn: list[str] = []

    async def generate_each(
        self, batch: str, requests: Sequence[GenerateRequest], incarnation: str = ""
    ) -> AsyncIterator[Any]:
        self.batches.append([each.request_id for each in requests])
        async for few in super().generate_each(batch, requests, incarnation):
            yield few

    async def withdraw(self, batch: str, names: Sequence[str]) -> None:
        self.withdrawn += names
        await super().withdraw(batch, names)

    async def fail(self) -> None:
        current_actor().fail("as the test wants")
        await trio.sleep_forever()

    async def noted(self) -> tuple[list[list[str]], list[str]]:
        return self.batches, self.withdrawn


@asynccontextmanager
async def open_route() -> AsyncIterator[ServerRoute]:
    make = partial(CountingEngine, digits=10**9, max_length=10**9)
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        handle: Any = await scope.create_actor(NotingServer, make)
        yield ServerRoute("server-0", handle, VersionName(0, 0))


async def noted(route: ServerRoute) -> tuple[list[list[str]], list[str]]:
    handle: Any = route.handle
    return await handle.noted()  # type: ignore[no-any-return]


async def running(route: ServerRoute) -> int:
    handle: Any = route.handle
    return (await handle.status())["running"]  # type: ignore[no-any-return]


async def test_requests_that_begin_together_are_one_message_and_each_ends_by_itself() -> None:
    answers: dict[str, list[Completion]] = {}
    async with open_route() as route, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)

        async def ask(name: str, max_tokens: int) -> None:
            answers[name] = await batches.generate(route, request(name, max_tokens=max_tokens))

        async with trio.open_nursery() as asking:
            for name, max_tokens in (("a", 1), ("b", 3), ("endless", ENDLESS)):
                asking.start_soon(ask, name, max_tokens)
            while len(answers) < 2:
                await trio.lowlevel.checkpoint()
            assert [TOKENIZER.decode(answers[name][0].token_ids) for name in "ab"] == ["3", "345"]
            (batch,), _ = await noted(route)
            assert sorted(batch) == ["a", "b", "endless"]
            asking.cancel_scope.cancel()
        while await running(route):  # until the server has ended it, else the test hangs
            pass


async def test_a_cancelled_request_is_withdrawn_and_the_others_of_its_message_continue() -> None:
    async with open_route() as route, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)
        async with trio.open_nursery() as one, trio.open_nursery() as other:
            one.start_soon(batches.generate, route, request("one", max_tokens=ENDLESS))
            other.start_soon(batches.generate, route, request("other", max_tokens=ENDLESS))
            while await running(route) < 2:
                pass
            one.cancel_scope.cancel()
            while await running(route) == 2:
                pass
            assert (await noted(route))[1] == ["one"]
            assert await running(route) == 1
            other.cancel_scope.cancel()
        while await running(route):
            pass


async def test_requests_that_are_given_up_end_here_and_in_the_server() -> None:
    given_up, may_send = [], trio.Event()
    may_send.set()

    class HeldBatches(RequestBatches):
        async def _send(self) -> None:
            await may_send.wait()
            await super()._send()

    async with open_route() as route, trio.open_nursery() as nursery:
        batches = HeldBatches(nursery)

        async def ask(name: str, of: ServerRoute) -> None:
            with pytest.raises(RequestGivenUp):
                await batches.generate(of, request(name, max_tokens=ENDLESS))
            given_up.append(name)

        async with trio.open_nursery() as asking:
            asking.start_soon(ask, "sent", route)
            while not await running(route):
                pass
            # Another table of servers has other handles for the same ones; and this request is not sent yet.
            may_send = trio.Event()
            asking.start_soon(ask, "unsent", evolve(route))
            while not batches._unsent:
                await trio.lowlevel.checkpoint()
            batches.give_up(evolve(route))
            may_send.set()
        assert sorted(given_up) == ["sent", "unsent"]
        while await running(route):
            pass
        assert (await noted(route))[0] == [["sent"]]


async def test_a_request_that_is_refused_fails_alone() -> None:
    async with open_route() as route, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)

        async def refused() -> None:
            with pytest.raises(ValueError, match="the prompt has 1 tokens, the model takes"):
                await batches.generate(route, request("long", "1", max_tokens=10**9))

        async with trio.open_nursery() as asking:
            asking.start_soon(refused)
            (answer,) = await batches.generate(route, request("a", max_tokens=2))
        assert TOKENIZER.decode(answer.token_ids) == "34"


async def test_the_loss_of_a_server_fails_all_that_it_has() -> None:
    lost = []
    make = partial(CountingEngine, digits=10**9, max_length=10**9)
    async with fray.open_cluster("local") as cluster, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)
        async with trio.open_nursery() as asking, cluster.open_scope("run") as scope:
            handle: Any = await scope.create_actor(NotingServer, make)
            route = ServerRoute("server-0", handle, VersionName(0, 0))

            async def ask(name: str) -> None:
                with pytest.raises(fray.ActorDied):
                    await batches.generate(route, request(name, max_tokens=ENDLESS))
                lost.append(name)

            asking.start_soon(ask, "a")
            asking.start_soon(ask, "b")
            while await running(route) < 2:
                pass
    assert sorted(lost) == ["a", "b"]


async def test_requests_for_an_incarnation_that_has_ended_are_not_answered_by_the_next_one() -> None:
    make = partial(CountingEngine, digits=10**9, max_length=10**9)
    local = fray.open_cluster("local")
    async with local as cluster, cluster.open_scope("run") as scope, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)
        handle: Any = await scope.create_actor(NotingServer, make, max_restarts=1)
        routes = []
        async with monitor(handle) as events:
            async for event in events:
                if isinstance(event, Up):
                    routes.append(ServerRoute("server-0", handle, VersionName(0, 0), incarnation=event.incarnation))
                    (answer,) = await batches.generate(routes[-1], request(event.incarnation, max_tokens=2))
                    assert TOKENIZER.decode(answer.token_ids) == "34"
                    if len(routes) == 2:
                        break
                    with pytest.raises(fray.ActorFailed):
                        await handle.fail()
        with pytest.raises(fray.ActorDied, match="the incarnation for which the requests are has ended"):
            await batches.generate(routes[0], request("late", max_tokens=2))


async def test_many_long_prompts_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_batches, "BATCH_TOKENS", 4)
    async with open_route() as route, trio.open_nursery() as nursery:
        batches = RequestBatches(nursery)
        async with trio.open_nursery() as asking:
            for name, prompt in (("a", "12"), ("b", "12"), ("c", "1"), ("d", "1" * 9)):
                asking.start_soon(batches.generate, route, request(name, prompt, max_tokens=1))
        sizes = {"a": 2, "b": 2, "c": 1, "d": 9}
        sent, _ = await noted(route)
        assert sorted(name for batch in sent for name in batch) == ["a", "b", "c", "d"]
        assert len(sent) > 1
        assert all(len(batch) == 1 or sum(sizes[name] for name in batch) <= 4 for batch in sent)
