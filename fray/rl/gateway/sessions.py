"""Session: the model of one episode behind OpenAI's routes, until the episode ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import trio
from attrs import evolve

from fray.rl.inference.client import LLM
from fray.rl.inference.openai_requests import ApiError, ApiRequest
from fray.rl.inference.replies import ModelReply
from fray.rl.inference.requests import Sampling
from fray.rl.tokenizers import Tokenizer

REQUESTS_LIMIT = 64
"""Requests of one session at a time."""


class AgentSession:
    """`ApiModel` of an episode.

    Its requests have the seeds, repetitions and record of ``llm``: they are turns of the episode.

    Args:
        llm: the model of the episode.
        name: of the model.
        max_length: returns the tokens of a prompt and its reply together.
        sampling: values of `Sampling` that its requests get, whatever the agent asks for.
    """

    accepts_any_name = True
    """Agents name the model for which they were written."""

    def __init__(
        self, llm: LLM, name: str, max_length: Callable[[], Awaitable[int]], sampling: Mapping[str, Any]
    ) -> None:
        self._llm, self.name, self._max_length, self._sampling = llm, name, max_length, dict(sampling)
        # An error of these values is the episode's, and not that of its agent.
        evolve(Sampling(), **self._sampling)
        self._ended = trio.Event()
        self._scopes: set[trio.CancelScope] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def end(self) -> None:
        """Cancel the requests under way, and refuse others."""
        self._ended.set()
        for scope in self._scopes:
            scope.cancel()

    async def end_at(self, deadline: float) -> None:
        """End at a time, unless it has ended before."""
        with trio.move_on_at(deadline):
            await self._ended.wait()
        self.end()

    async def replies(self, request: ApiRequest, name: str) -> list[list[ModelReply]]:
        """Return the replies to each prompt. Raises ApiError if the session has ended, or has too many requests."""
        del name  # The requests of an episode are numbered: that gives them their seeds.
        self._check_open()
        if len(self._scopes) >= REQUESTS_LIMIT:
            text = f"this session has {REQUESTS_LIMIT} requests under way; send the next one later"
            raise ApiError(text, status=429, code="too_many_requests")
        replies: list[list[ModelReply]] = []
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                replies = await self._replies(request)
            finally:
                self._scopes.discard(scope)
        self._check_open()
        return replies

    async def stream(self, request: ApiRequest, name: str) -> AsyncIterator[tuple[int, ModelReply]]:
        """Return the replies, when all have ended: the agent does not notice a server that is lost meanwhile."""
        for number, of_prompt in enumerate(await self.replies(request, name)):
            for reply in of_prompt:
                yield number, reply

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise ended_session()

    async def _replies(self, request: ApiRequest) -> list[list[ModelReply]]:
        llm, length = self._llm, await self._max_length()
        if request.kind == "chat":
            chat = llm.chat_prompt(request.messages, request.tools)
            return [await llm.reply_to(chat, self._sampling_for(request, len(chat.prompt_ids), length))]
        replies: list[list[ModelReply]] = []
        for prompt in request.prompts:
            ids = llm.tokens_of(prompt)
            replies.append(await llm.complete(ids, self._sampling_for(request, len(ids), length)))
        return replies

    def _sampling_for(self, request: ApiRequest, prompt_tokens: int, max_length: int) -> Sampling:
        try:
            return evolve(request.sampling_for(prompt_tokens, max_length), **self._sampling)
        except ValueError as error:
            text = f"with {self._sampling}, which the episode has set for its agent: {error}"
            raise ApiError(text) from None


def ended_session() -> ApiError:
    """Return the error for a session that does not exist."""
    text = "there is no such session: its episode has ended, or the address is not one that rl.agent_url has given"
    return ApiError(text, status=404, code="session_not_found")
