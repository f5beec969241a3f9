"""Answers and streams over engines that are lost in the midst of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any

import pytest
import trio

from fray.errors import ActorDied
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling, TokenEvent
from fray.tinker.replaced_engine import ReplacedEngine

VERSION = VersionName(0, 0)


class LostOnce:
    """Engines that answer two completions of three tokens; the first one is lost after some events."""

    def __init__(self, lost_after: int) -> None:
        self.lost_after = lost_after
        self.seeds: list[int | None] = []
        self.waiting: list[int] = []

    async def up(self, after: int) -> tuple[int, Any]:
        return after + 1, after + 1

    async def generate(self, engine: int, request: GenerateRequest) -> list[Completion]:
        return [event async for event in self.stream(engine, request) if isinstance(event, Completion)]

    async def stream(self, engine: int, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Completion]:
        self.seeds.append(request.seed)
        events: list[TokenEvent | Completion] = [
            TokenEvent("", index, 10 * index + place, -1.0, VERSION) for place in range(3) for index in range(2)
        ]
        # The second one ends first.
        events += [Completion([10 * index], [-1.0], [], "length", index) for index in (1, 0)]
        for place, event in enumerate(events):
            if engine == 1 and place == self.lost_after:
                raise ActorDied("lost")
            yield event

    def streamed(self, engine: int, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        return aclosing(self.stream(engine, request))

    async def max_length(self) -> int:
        return 8

    @contextmanager
    def counted(self, count: int) -> Iterator[None]:
        self.waiting.append(count)
        yield

    def server(self) -> ReplacedEngine:
        return ReplacedEngine(self.up, self.generate, self.streamed, self.max_length, self.counted)


@pytest.mark.parametrize("lost_after", [0, 3, 7, 99])
async def test_a_stream_whose_engine_is_lost_has_each_token_once(lost_after: int) -> None:
    engines = LostOnce(lost_after)
    request = GenerateRequest("a", (1,), Sampling(n=2, max_tokens=3))
    events = [event async for event in engines.server().stream(request)]
    tokens = [(each.index, each.token_id) for each in events if isinstance(each, TokenEvent)]
    assert tokens == [(0, 0), (1, 10), (0, 1), (1, 11), (0, 2), (1, 12)]
    assert [each.index for each in events if isinstance(each, Completion)] == [1, 0]
    assert len(engines.seeds) == (1 if lost_after == 99 else 2)
    assert None not in engines.seeds
    assert len(set(engines.seeds)) == 1, "what is generated again has the same random numbers"


async def test_answers_of_a_lost_engine_come_from_the_next_and_an_error_ends_all() -> None:
    engines = LostOnce(1)
    request = GenerateRequest("a", (1,), Sampling(n=2, max_tokens=3, seed=5))
    answers = await engines.server().generate_many([request, request])
    assert [[each.index for each in of] for of in answers] == [[1, 0], [1, 0]]
    assert (engines.seeds, engines.waiting) == ([None] * 4, [2])

    async def refuse(engine: int, request: GenerateRequest) -> list[Completion]:
        if request.request_id == "bad":
            raise ValueError("too long")
        await trio.sleep_forever()
        raise AssertionError

    server = ReplacedEngine(engines.up, refuse, engines.streamed, engines.max_length, engines.counted)
    with pytest.raises(ValueError, match="too long"):
        await server.generate_many([request, GenerateRequest("bad", (1,))])
