"""Generation by an engine that is started again when it is lost: a `TokenServer` for OpenAI's routes."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import trio
from attrs import evolve, field, frozen

from fray.errors import ActorDied
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent


@frozen(eq=False)
class ReplacedEngine:
    """`TokenServer` whose engine may be lost: what was under way is generated again by the next, with the same seeds.

    Args:
        up: waits until an incarnation after a number is ready; returns its number and the engine.
        generate: has an engine answer a request.
        generate_tokens: the same, token by token.
        max_length: returns the tokens of a prompt and a completion together.
        counted: counts so many requests as waiting; raises if the user has too many.
        on_tokens: called with the number of tokens of each completion.
        check: called before each part of a stream is returned; raises if its caller may have no further one.
    """

    up: Callable[[int], Awaitable[tuple[int, Any]]]
    generate: Callable[[Any, GenerateRequest], Awaitable[list[Completion]]]
    generate_tokens: Callable[[Any, GenerateRequest], AbstractAsyncContextManager[AsyncIterator[Any]]]
    max_length: Callable[[], Awaitable[int]]
    counted: Callable[[int], AbstractContextManager[object]]
    on_tokens: Callable[[int], object] = field(default=lambda tokens: None)
    check: Callable[[], object] = field(default=lambda: None)

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Return the completions of each request. Raises what `generate` raises, of the first request that fails."""
        answers = [list[Completion]() for _ in requests]
        errors: list[Exception] = []

        async def answer(number: int, request: GenerateRequest) -> None:
            try:
                answers[number] = await self._answer(_seeded(request))
            except Exception as error:  # noqa: BLE001 (raised below, without the group of the nursery)
                errors.append(error)
                nursery.cancel_scope.cancel()

        with self.counted(len(requests)):
            async with trio.open_nursery() as nursery:
                for number, request in enumerate(requests):
                    nursery.start_soon(answer, number, request)
        if errors:
            raise errors[0]
        return answers

    async def _answer(self, request: GenerateRequest) -> list[Completion]:
        incarnation = 0
        while True:
            incarnation, engine = await self.up(incarnation)
            try:
                completions = await self.generate(engine, request)
            except ActorDied:
                continue
            self.on_tokens(sum(len(each.token_ids) for each in completions))
            return completions

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        """Return tokens and completions as they are made, each once.

        Raises what `generate_tokens` and `check` raise.
        """
        request, incarnation = _seeded(request), 0
        sent, ended = Counter[int](), set[int]()
        with self.counted(1):
            while True:
                incarnation, engine = await self.up(incarnation)
                again = Counter[int]()
                try:
                    async with self.generate_tokens(engine, request) as events:
                        async for event in events:
                            if isinstance(event, TokenEvent):
                                again[event.index] += 1
                                if again[event.index] <= sent[event.index]:
                                    continue
                                sent[event.index] += 1
                            elif event.index in ended:
                                continue
                            else:
                                ended.add(event.index)
                                self.on_tokens(len(event.token_ids))
                            self.check()
                            yield event
                    return
                except ActorDied:
                    continue

    async def status(self) -> dict[str, Any]:
        """Return ``max_length``."""
        return {"max_length": await self.max_length()}


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """Return a request whose samples do not depend on how often they are generated."""
    return request if request.sampling.seed is not None else evolve(request, seed=secrets.randbits(48))
