"""Requests of a rollout process: which server gets them, and what happens when that one is lost or silent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import trio
import trio.testing

from fray.errors import ActorDied
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling
from fray.rl.messages import ServerRoute, TaskGrant
from fray.rl.rollout.process import GENERATING, OWN_CODE, EpisodePlan, EpisodeRequests
from fray.rl.rollout.server_choice import RequestGivenUp, ServerChoice


class Servers:
    """Servers that answer when they are allowed to; a server of no name in `answers` is silent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.lost: set[str] = set()
        self.answers = trio.Event()
        self.silent: set[str] = set()
        self.given_up: dict[str, trio.Event] = defaultdict(trio.Event)

    def give_up(self, route: ServerRoute) -> None:
        self.given_up[route.name].set()

    async def call(self, route: ServerRoute, request: GenerateRequest) -> list[Completion]:
        self.sent.append((route.name, request.request_id))
        if route.name in self.lost:
            raise ActorDied(f"{route.name} is gone")
        if route.name in self.silent:
            await self.given_up[route.name].wait()
            raise RequestGivenUp
        await self.answers.wait()
        return [Completion([1], [0.0], [(route.version, 1)], "stop", 0)]


def route(name: str, accepts: bool = True, leaves: bool = False) -> ServerRoute:
    handle: Any = None
    return ServerRoute(name, handle, VersionName(0, 0), accepts, leaves)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, (1,), Sampling())


async def solve(task: dict[str, Any], llm: Any) -> None:
    raise NotImplementedError


async def max_length(route: ServerRoute) -> int:
    return 256


async def test_an_episode_generates_until_it_has_its_answers() -> None:
    servers = Servers()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a")])
    grant = TaskGrant("0.1", "0-0-0", "0-0", 0, {}, 1)
    requests = EpisodeRequests(grant, EpisodePlan(solve, "model", 1, 60.0, 0), choice)
    assert requests.does == OWN_CODE
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.send, request("x"))
        await trio.testing.wait_all_tasks_blocked()
        assert requests.does == GENERATING
        servers.answers.set()
    assert requests.does == OWN_CODE


async def test_the_server_with_the_fewest_requests_gets_the_next() -> None:
    servers = Servers()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a"), route("b")])
    async with trio.open_nursery() as nursery:
        for name in ("1", "2", "3"):
            nursery.start_soon(choice.send, request(name))
            await trio.testing.wait_all_tasks_blocked()
        servers.answers.set()
    assert servers.sent == [("a", "1"), ("b", "2"), ("a", "3")]


async def test_requests_of_a_silent_server_go_to_another_at_once() -> None:
    servers = Servers()
    servers.silent.add("a")
    servers.answers.set()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a")])
    found: list[list[Completion]] = []

    async def send() -> None:
        found.append(await choice.send(request("1")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        # With no other server it may still be answered.
        choice.set_routes([route("a", accepts=False)])
        await trio.testing.wait_all_tasks_blocked()
        assert servers.sent == [("a", "1")]
        choice.set_routes([route("a", accepts=False), route("b")])
    assert servers.sent == [("a", "1"), ("b", "1")]
    assert len(found) == 1


async def test_a_silent_server_gets_no_requests() -> None:
    servers = Servers()
    servers.answers.set()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a", accepts=False)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(choice.send, request("1"))
        await trio.testing.wait_all_tasks_blocked()
        assert servers.sent == []
        choice.set_routes([route("a")])
    assert servers.sent == [("a", "1")]


async def test_requests_of_a_lost_server_go_to_another() -> None:
    servers = Servers()
    servers.lost.add("a")
    servers.answers.set()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a"), route("b")])
    await choice.send(request("1"))
    assert servers.sent == [("a", "1"), ("b", "1")]


async def test_a_server_that_leaves_answers_what_it_has_and_gets_nothing_more() -> None:
    servers = Servers()
    choice = ServerChoice(servers.call, servers.give_up, max_length)
    choice.set_routes([route("a")])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(choice.send, request("1"))
        await trio.testing.wait_all_tasks_blocked()
        choice.set_routes([route("a", accepts=False, leaves=True), route("b")])
        nursery.start_soon(choice.send, request("2"))
        await trio.testing.wait_all_tasks_blocked()
        servers.answers.set()
    assert servers.sent == [("a", "1"), ("b", "2")]
