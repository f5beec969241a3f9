"""`ApiModel` of a server that generates tokens, without its port: for those that have routes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from attrs import field, frozen

from fray.rl.inference.openai_app import PromptEvent
from fray.rl.inference.openai_requests import ApiRequest
from fray.rl.inference.replies import ModelReply, reply_of
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.tokenizers import Tokenizer


class TokenServer(Protocol):
    """Part of an inference server that answers requests."""

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]: ...
    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]: ...
    async def status(self) -> dict[str, Any]: ...


@frozen(eq=False)
class ServedModel:
    """`ApiModel` of an inference server.

    Args:
        server: the server.
        name: of the model.
        tokenizer: of the model.
    """

    server: TokenServer
    name: str
    tokenizer: Tokenizer
    accepts_any_name: bool = field(default=False, init=False)

    async def replies(self, request: ApiRequest, name: str) -> list[list[ModelReply]]:
        """Return the replies to each prompt. Raises what `InferenceServer.generate` raises."""
        requests = await self._requests(request, name)
        answers = await self.server.generate_many(requests)
        return [
            [self._reply(each, asked, request) for each in completions]
            for asked, completions in zip(requests, answers, strict=True)
        ]

    async def stream(self, request: ApiRequest, name: str) -> AsyncIterator[PromptEvent]:
        """Return tokens and replies, prompt after prompt. Raises what `InferenceServer.stream` raises."""
        for number, asked in enumerate(await self._requests(request, name)):
            async with aclosing(self.server.stream(asked)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield number, event if isinstance(event, TokenEvent) else self._reply(event, asked, request)

    async def tokens_of(self, request: ApiRequest) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt of a request, or of its conversation."""
        if request.kind == "chat":
            return [tuple(self.tokenizer.apply_chat_template(request.messages, request.tools or None))]
        return [
            tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt for prompt in request.prompts
        ]

    async def _requests(self, request: ApiRequest, name: str) -> list[GenerateRequest]:
        length = (await self.server.status())["max_length"]
        return [
            GenerateRequest(f"http/{name}/{number}", ids, request.sampling_for(len(ids), length))
            for number, ids in enumerate(await self.tokens_of(request))
        ]

    def _reply(self, completion: Completion, asked: GenerateRequest, request: ApiRequest) -> ModelReply:
        return reply_of(completion, asked.prompt_ids, self.tokenizer, has_tools=bool(request.tools))
