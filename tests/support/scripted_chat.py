"""Model of a chat that answers with given texts, and a tokenizer whose texts have several tokenisations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest

EOS = 0
ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
TOOLS = 5
PAIR = 100_000
"""Token of a pair of equal letters: this and the letter's number."""


class PairTokenizer:
    """Tokens are letters; `encode` takes two equal ones as one token, which models that write letter by letter do not.

    The template is a token of the role, the content and `EOS` for each message, as ChatML has it.
    """

    eos_id = EOS

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            if ids and ids[-1] == ord(letter):
                ids[-1] += PAIR
            else:
                ids.append(ord(letter))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) if one < PAIR else chr(one - PAIR) * 2 for one in ids if one > TOOLS)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        ids = [TOOLS] if tools else []
        for message in messages:
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            ids += [ROLES[message["role"]], *self.encode(message["content"] + "".join(calls)), EOS]
        return [*ids, ROLES["assistant"]]


class ScriptedModel:
    """Answers requests with texts, letter by letter, each with its number of the request as version.

    Args:
        texts: of the answers, in order.
        gate: each answer waits for it.
    """

    def __init__(self, *texts: str, gate: trio.Event | None = None) -> None:
        self.texts, self.gate = list(texts), gate
        self.requests: list[GenerateRequest] = []
        self.cancelled = trio.Event()

    async def send(self, request: GenerateRequest) -> list[Completion]:
        if request.sampling.max_tokens + len(request.prompt_ids) > 1_000:
            raise ValueError(f"the prompt has {len(request.prompt_ids)} tokens, the model takes 1000")
        self.requests.append(request)
        number = len(self.requests)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except trio.Cancelled:
                self.cancelled.set()
                raise
        answers = []
        for index in range(request.sampling.n):
            ids = [*map(ord, self.texts.pop(0)), EOS][: request.sampling.max_tokens]
            has_ended = ids[-1] == EOS
            answers.append(
                Completion(
                    ids,
                    [-number / 10] * len(ids),
                    [(VersionName(0, number), len(ids))],
                    "stop" if has_ended else "length",
                    index,
                    EOS if has_ended else None,
                    [[(one, -number / 10)] for one in ids] if request.sampling.logprobs else [],
                )
            )
        return answers
