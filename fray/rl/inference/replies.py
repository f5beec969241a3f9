"""Reply of the model: text, tokens, logprobs and versions, and the dict of NexRL's guide."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, TypeAlias

from fray.rl.core.versions import Segment
from fray.rl.inference.requests import Completion, FinishReason
from fray.rl.inference.tool_calls import split_tool_calls
from fray.rl.tokenizers import Tokenizer


class ModelReply(dict[str, Any]):
    """Reply of the model: its attributes are for programs of Fray; as a dict it is that of NexRL's guide.

    As a dict it has ``response`` (the text), ``finish_reason``, ``tool_calls`` for chats, the arguments of the request,
    and ``nexrl_train``: ``prompt_tokens``, ``response_tokens``, ``response_logprobs``.

    Args:
        completion: what the server has answered.
        prompt_ids: tokens of the prompt, those of earlier turns included.
        text: without the token or string that ended it.
        has_tools: whether tool calls are looked for in the text.
        asked: arguments of the request, for the dict.
    """

    def __init__(
        self,
        completion: Completion,
        prompt_ids: tuple[int, ...],
        text: str,
        *,
        has_tools: bool = False,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        self.completion, self.prompt_ids, self.text = completion, prompt_ids, text
        self.content, self.tool_calls = (text, list[dict[str, Any]]())
        if has_tools and "<tool_call>" in text:
            name = sha256(repr((prompt_ids, completion.token_ids)).encode()).hexdigest()
            self.content, self.tool_calls = split_tool_calls(text, f"{name}/{completion.index}")
        super().__init__(asked or {})
        self |= {
            "response": text,
            "finish_reason": completion.finish_reason,
            "nexrl_train": {
                "prompt_tokens": list(prompt_ids),
                "response_tokens": completion.token_ids,
                "response_logprobs": completion.logprobs,
            },
        }
        if "messages" in self:
            self |= {"response": self.content, "tool_calls": self.tool_calls}

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the reply, with the one that ended it."""
        return self.completion.token_ids

    @property
    def tokens(self) -> list[int]:
        """The same as `token_ids`."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> list[float]:
        """Logprobs of the tokens, nats, at temperature 1."""
        return self.completion.logprobs

    @property
    def segments(self) -> list[Segment]:
        """Versions of the weights that made the tokens, with their numbers of tokens."""
        return self.completion.segments

    @property
    def versions(self) -> list[Segment]:
        """The same as `segments`."""
        return self.completion.segments

    @property
    def finish_reason(self) -> FinishReason:
        """Reason for its end: "stop" or "length"."""
        return self.completion.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """Message of the conversation that this reply is; its tool calls are not in ``content``."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


Reply: TypeAlias = ModelReply
"""Name of the replies for users, in episodes; effects of the scheduler have a class of this name."""


def reply_of(
    completion: Completion,
    prompt_ids: tuple[int, ...],
    tokenizer: Tokenizer,
    *,
    has_tools: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> ModelReply:
    """Return the reply that a completion is. Arguments as `ModelReply`."""
    text = text_of(completion, tokenizer)
    return ModelReply(completion, prompt_ids, text, has_tools=has_tools, asked=asked)


def text_of(completion: Completion, tokenizer: Tokenizer) -> str:
    """Return the text of a completion, without the token or string that ended it."""
    ids, by = completion.token_ids, completion.stopped_by
    text = tokenizer.decode(ids[:-1] if isinstance(by, int) else ids)
    return text[: text.rindex(by)] if isinstance(by, str) and by in text else text
