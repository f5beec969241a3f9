"""Model as episodes use it: completions and chats whose replies have tokens, logprobs and versions."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import fields, frozen

from fray.model.text import near_text
from fray.rl.inference.chat_messages import Message, checked_messages, key_of
from fray.rl.inference.replies import ModelReply, Reply, reply_of
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling
from fray.rl.tokenizers import Tokenizer

__all__ = ["LLM", "ChatPrompt", "ModelReply", "Reply", "continued", "sampling_of"]

SAMPLING_NAMES = [attribute.name for attribute in fields(Sampling)]


@frozen(eq=False)
class ChatPrompt:
    """A conversation to which the model shall reply.

    Attributes:
        prompt_ids: tokens of the prompt.
        keys: of the messages, by which a later turn finds this one.
        messages: for the chat template, with the replies of earlier turns as the model wrote them.
        template_ids: tokens that the template gives for them.
        tools: as JSON.
    """

    prompt_ids: tuple[int, ...]
    keys: list[str]
    messages: list[Message]
    template_ids: list[int]
    tools: str


@frozen(eq=False)
class _Turn:
    chat: ChatPrompt
    reply: ModelReply
    keys: list[str]
    """Keys of the messages, with that of the reply."""


class LLM:
    """Model of an episode.

    Args:
        send: has a request answered; it gives each an id of its own.
        tokenizer: of the model.
    """

    def __init__(self, send: Callable[[GenerateRequest], Awaitable[list[Completion]]], tokenizer: Tokenizer) -> None:
        self._send, self.tokenizer = send, tokenizer
        self._turns: list[_Turn] = []
        self.replies: list[ModelReply] = []
        """All replies, in order."""

    async def completion(self, prompt: str | Sequence[int], **sampling: Any) -> Any:
        """Complete a text or tokens.

        Args:
            prompt: text, or ids of tokens.
            sampling: values of `Sampling`, such as ``max_tokens=4, temperature=0.8``.

        Returns:
            A `ModelReply`; with ``n`` above 1 a list of them.

        Raises:
            ValueError: a value of ``sampling`` is unknown or out of its range, or the prompt is empty.
        """
        asked = {"prompt": prompt, **sampling}
        replies = await self.complete(self.tokens_of(prompt), sampling_of(sampling), asked=asked)
        return replies if len(replies) > 1 else replies[0]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Any:
        """Reply to a conversation.

        Where its messages begin with those of an earlier turn and ``reply.message``, the prompt begins with the tokens
        of that turn as they were generated: only what is new is tokenised. With ``tools``, which the chat template
        describes to the model, ``reply.tool_calls`` has the calls in its text.

        Args:
            messages: of OpenAI's form.
            tools: of OpenAI's form.
            sampling: as in `completion`.

        Returns:
            As `completion`.

        Raises:
            ValueError: as `completion`, or a message is invalid.
        """
        checked = sampling_of(sampling)
        asked = {"messages": messages, **({"tools": tools} if tools else {}), **sampling}
        replies = await self.reply_to(self.chat_prompt(messages, tools), checked, asked=asked)
        return replies if len(replies) > 1 else replies[0]

    def tokens_of(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a prompt, which may be tokens already."""
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    async def complete(
        self, prompt: tuple[int, ...], sampling: Sampling, *, asked: Mapping[str, Any] | None = None
    ) -> list[ModelReply]:
        """Return ``sampling.n`` replies to the tokens of a prompt.

        Args:
            asked: arguments of the request, for the dicts of the replies.

        Raises:
            ValueError: the prompt is empty, or the servers can never answer it.
        """
        return await self._replies(prompt, sampling, has_tools=False, asked=asked)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ChatPrompt:
        """Return the prompt of a conversation, which has the tokens of its earlier turns as they were generated.

        Raises:
            InvalidMessage: a message has no role, or its content is not text.
        """
        checked, described = checked_messages(messages), json.dumps(tools or [], sort_keys=True, default=repr)
        keys = [key_of(message) for message in checked]
        for turn in sorted(self._turns, key=lambda turn: len(turn.keys), reverse=True):
            if turn.chat.tools == described and keys[: len(turn.keys)] == turn.keys:
                raw: Message = {"role": "assistant", "content": turn.reply.text}
                known = [*turn.chat.messages, raw, *checked[len(turn.keys) :]]
                whole = self.tokenizer.apply_chat_template(known, tools or None)
                new = continued(whole, turn.chat.template_ids, turn.reply, self.tokenizer)
                if new is not None:
                    ids = (*turn.reply.prompt_ids, *turn.reply.token_ids, *new)
                    return ChatPrompt(ids, keys, known, whole, described)
        whole = self.tokenizer.apply_chat_template(checked, tools or None)
        return ChatPrompt(tuple(whole), keys, checked, whole, described)

    async def reply_to(
        self, chat: ChatPrompt, sampling: Sampling, *, asked: Mapping[str, Any] | None = None
    ) -> list[ModelReply]:
        """Return ``sampling.n`` replies to a conversation. Arguments and errors as `complete`."""
        replies = await self._replies(chat.prompt_ids, sampling, has_tools=chat.tools != "[]", asked=asked)
        for reply in replies:
            (answer,) = checked_messages([reply.message])
            self._turns.append(_Turn(chat, reply, [*chat.keys, key_of(answer)]))
        return replies

    async def _replies(
        self, prompt: tuple[int, ...], sampling: Sampling, *, has_tools: bool, asked: Mapping[str, Any] | None
    ) -> list[ModelReply]:
        request = GenerateRequest(f"request-{len(self.replies)}", prompt, sampling)
        replies = [
            reply_of(each, prompt, self.tokenizer, has_tools=has_tools, asked=asked)
            for each in await self._send(request)
        ]
        self.replies += replies
        return replies


def continued(whole: Sequence[int], before: Sequence[int], reply: ModelReply, tokenizer: Tokenizer) -> list[int] | None:
    """Return the tokens of a conversation that follow those of a reply; None if the chat template does not tell.

    Args:
        whole: template of the conversation with the reply and what follows it.
        before: template of the conversation that was replied to.
        reply: the reply.
        tokenizer: of the model.
    """
    if list(whole[: len(before)]) != list(before):
        return None
    rest, text = list(whole[len(before) :]), tokenizer.encode(reply.text)
    if rest[: len(text)] == text:
        rest = rest[len(text) :]
    elif tokenizer.eos_id in rest:  # the template writes the reply's text in another way
        rest = rest[rest.index(tokenizer.eos_id) :]
    else:
        return None
    has_end = bool(reply.token_ids) and reply.token_ids[-1] == tokenizer.eos_id
    return rest[1:] if has_end and rest[:1] == [tokenizer.eos_id] else rest


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """Return `Sampling` of its values; raises ValueError that names what is unknown, with the nearest name."""
    for name in values:
        if name not in SAMPLING_NAMES:
            raise ValueError(f"unknown sampling parameter {name!r}{near_text(name, SAMPLING_NAMES)}")
    try:
        return _sampling(
            tuple(values), *(tuple(value) if isinstance(value, list) else value for value in values.values())
        )
    except TypeError:  # a value that cannot be hashed
        return Sampling(**values)


# Checked once: the requests of a run are of a few kinds, in their thousands.
@lru_cache(maxsize=256, typed=True)
def _sampling(names: tuple[str, ...], *values: Any) -> Sampling:
    return Sampling(**dict(zip(names, values, strict=True)))
