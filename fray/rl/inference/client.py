"""Model as episodes use it: completions and chats whose replies have tokens, logprobs and versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import field, fields, frozen

from fray.model.text import near_text
from fray.rl.core.versions import Segment
from fray.rl.inference.requests import Completion, FinishReason, GenerateRequest, Sampling
from fray.rl.tokenizers import Tokenizer


@frozen(eq=False)
class ModelReply:
    """ModelReply of the model.

    Attributes:
        text: without the token or string that ended it.
        token_ids: its tokens, with the one that ended it.
        logprobs: of the tokens, nats, at temperature 1.
        segments: versions of the weights that made the tokens, with their numbers of tokens.
        prompt_ids: tokens of the prompt, those of earlier turns included.
        finish_reason: "stop" or "length".
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def message(self) -> dict[str, str]:
        """Message of the conversation that this reply is."""
        return {"role": "assistant", "content": self.text}


Reply: TypeAlias = ModelReply
"""Name of the replies for users, in episodes; effects of the scheduler have a class of this name."""


@frozen(eq=False)
class _Turn:
    messages: list[Mapping[str, Any]]
    reply: ModelReply = field()


class LLM:
    """Model of an episode.

    Args:
        send: has a request answered; it gives each an id of its own.
        tokenizer: of the model.
    """

    def __init__(self, send: Callable[[GenerateRequest], Awaitable[list[Completion]]], tokenizer: Tokenizer) -> None:
        self._send, self._tokenizer = send, tokenizer
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
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        replies = await self._replies(tuple(ids), sampling)
        return replies if len(replies) > 1 else replies[0]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Any:
        """ModelReply to a conversation.

        Where its messages begin with those of an earlier turn and ``reply.message``, the prompt begins with the tokens
        of that turn as they were generated: only what is new is tokenised. Arguments, result and errors as
        `completion`; ``tools`` are for the chat template.
        """
        prompt = self._prompt_of(messages, tools)
        replies = await self._replies(prompt, sampling)
        self._turns += [_Turn([dict(message) for message in messages], reply) for reply in replies]
        return replies if len(replies) > 1 else replies[0]

    async def _replies(self, prompt: tuple[int, ...], values: Mapping[str, Any]) -> list[ModelReply]:
        request = GenerateRequest(f"request-{len(self.replies)}", prompt, sampling_of(values))
        replies = [reply_of(each, prompt, self._tokenizer) for each in await self._send(request)]
        self.replies += replies
        return replies

    def _prompt_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        whole = self._tokenizer.apply_chat_template(messages, tools)
        for turn in sorted(self._turns, key=lambda turn: len(turn.messages), reverse=True):
            known = [*turn.messages, turn.reply.message]
            if len(messages) > len(known) - 1 and [dict(each) for each in messages[: len(known)]] == known:
                before = self._tokenizer.apply_chat_template(turn.messages, tools)
                new = continued(whole, before, turn.reply, self._tokenizer)
                if new is not None:
                    return (*turn.reply.prompt_ids, *turn.reply.token_ids, *new)
        return tuple(whole)


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
    names = [attribute.name for attribute in fields(Sampling)]
    for name in values:
        if name not in names:
            raise ValueError(f"unknown sampling parameter {name!r}{near_text(name, names)}")
    return Sampling(**values)


def reply_of(completion: Completion, prompt: tuple[int, ...], tokenizer: Tokenizer) -> ModelReply:
    """Return the reply that a completion is."""
    text = text_of(completion, tokenizer)
    return ModelReply(
        text, completion.token_ids, completion.logprobs, completion.segments, prompt, completion.finish_reason
    )


def text_of(completion: Completion, tokenizer: Tokenizer) -> str:
    """Return the text of a completion, without the token or string that ended it."""
    ids, by = completion.token_ids, completion.stopped_by
    text = tokenizer.decode(ids[:-1] if isinstance(by, int) else ids)
    return text[: text.rindex(by)] if isinstance(by, str) and by in text else text
