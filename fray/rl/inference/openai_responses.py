"""Replies of the model as answers of OpenAI's API: JSON, and the events of a stream; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from fray.rl.inference.openai_requests import ApiRequest
from fray.rl.inference.replies import ModelReply
from fray.rl.inference.requests import TokenEvent
from fray.rl.tokenizers import Tokenizer

DONE = b"data: [DONE]\n\n"
"""Last event of a stream that ended without an error."""
_UNFINISHED = "�"
"""Character of bytes that do not end a character yet."""
_CALL_TAG = "<tool_call>"


def event_bytes(value: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@frozen(eq=False)
class AnswerForm:
    """Form of the answers to one request.

    Args:
        request: the request.
        name: of the answer, unique.
        model: as the answers name it.
        created: seconds since 1970.
        tokenizer: of the model.
    """

    request: ApiRequest
    name: str
    model: str
    created: int
    tokenizer: Tokenizer

    def body(self, replies: Sequence[Sequence[ModelReply]]) -> dict[str, Any]:
        """Return the answer as a whole.

        Args:
            replies: to each prompt, by index.
        """
        choices = [self._choice(reply, number) for number, of_prompt in enumerate(replies) for reply in of_prompt]
        answer = {**self._head(is_chunk=False), "choices": choices, "usage": usage_of(replies)}
        if self.request.kind == "chat" and self.request.has_token_ids:
            answer["prompt_token_ids"] = list(replies[0][0].prompt_ids)
        return answer

    def _choice(self, reply: ModelReply, prompt: int) -> dict[str, Any]:
        if self.request.kind == "completion":
            return {"text": reply.text, **self._end(reply, prompt)}
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.tool_calls:
            message |= {"content": reply.content or None, "tool_calls": reply.tool_calls}
        return {"message": message, **self._end(reply, prompt)}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        is_chat = self.request.kind == "chat"
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def index_of(self, prompt: int, completion: int) -> int:
        """Return the index of a choice: completions of the first prompt, then those of the next."""
        return prompt * self.request.sampling.n + completion

    def _end(self, reply: ModelReply, prompt: int) -> dict[str, Any]:
        """Return what is known of a choice when it has ended."""
        request = self.request
        choice: dict[str, Any] = {
            "index": self.index_of(prompt, reply.completion.index),
            "finish_reason": "tool_calls" if reply.tool_calls else reply.finish_reason,
            "logprobs": self._logprobs(reply) if request.has_logprobs else None,
            "versions": [[str(version), count] for version, count in reply.segments],
        }
        if request.has_token_ids:
            choice["token_ids"] = reply.token_ids
            if request.kind == "completion":
                choice["prompt_token_ids"] = list(reply.prompt_ids)
        if request.has_train_data:
            choice["nexrl_train"] = reply["nexrl_train"]
        return choice

    def _logprobs(self, reply: ModelReply) -> dict[str, Any]:
        tops = reply.completion.top_logprobs or [[] for _ in reply.token_ids]
        texts = [self._token_text(token) for token in reply.token_ids]
        if self.request.kind == "chat":
            content = [
                {**self._token(token, logprob), "top_logprobs": [self._token(*each) for each in top]}
                for token, logprob, top in zip(reply.token_ids, reply.logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, offset = [], 0
        for token in reply.token_ids:
            offsets.append(offset)
            offset += len(self.tokenizer.decode([token]))
        by_text = [{self._token_text(token): logprob for token, logprob in top} for top in tops]
        return {
            "tokens": texts,
            "token_logprobs": reply.logprobs,
            "top_logprobs": by_text if self.request.sampling.logprobs else None,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self.request.tokens_as_ids else self.tokenizer.decode([token])


def usage_of(replies: Sequence[Sequence[ModelReply]]) -> dict[str, int]:
    """Return counts of tokens; those of a prompt count once."""
    prompts = sum(len(of_prompt[0].prompt_ids) for of_prompt in replies if of_prompt)
    made = sum(len(reply.token_ids) for of_prompt in replies for reply in of_prompt)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


@define
class _Choice:
    """Choice of a stream that has not ended.

    Attributes:
        tokens: those of which text was sent or is held back.
        sent: text that was sent.
        begun: whether anything was sent.
    """

    tokens: list[int] = field(factory=list)
    text: str = ""
    sent: int = 0
    begun: bool = False
    known: int = 0
    """Tokens whose text is in ``text``."""
    anchor: int = 0
    """Token from which the last ones are decoded together: some characters have several tokens."""


class EventWriter:
    """Events of one stream.

    Text is held back as long as it may not be part of the answer: that of the last token, which may end it; what may
    be the beginning of a stop string; with tools all from the first ``<tool_call>`` on. What a choice has besides its
    text (logprobs, token ids, versions, tool calls) is in its last event.

    Args:
        form: of the answers.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form, self._request = form, form.request
        self._choices: dict[int, _Choice] = {}
        self._ended: dict[int, list[ModelReply]] = {}
        self._slack = max((len(stop) - 1 for stop in self._request.sampling.stop), default=0)

    def take(self, prompt: int, event: TokenEvent | ModelReply) -> list[dict[str, Any]]:
        """Return the events of a token, or of the end of a choice.

        Args:
            prompt: number of the prompt.
            event: the token, or the reply with all of them.
        """
        completion = event.completion.index if isinstance(event, ModelReply) else event.index
        index = self._form.index_of(prompt, completion)
        choice = self._choices.setdefault(index, _Choice())
        if isinstance(event, ModelReply):
            self._ended.setdefault(prompt, []).append(event)
            return list(self._last(index, choice, prompt, event))
        self._decode(choice)
        choice.tokens.append(event.token_id)
        end = self._safe_end(choice.text)
        if end <= choice.sent:
            return []
        text, choice.sent = choice.text[choice.sent : end], end
        return [self._text(index, choice, text)]

    def usage(self) -> list[dict[str, Any]]:
        """Return the event with the counts of tokens, if it was asked for."""
        if not self._request.include_usage:
            return []
        replies = [self._ended[prompt] for prompt in sorted(self._ended)]
        return [{**self._form._head(is_chunk=True), "choices": [], "usage": usage_of(replies)}]

    def _decode(self, choice: _Choice) -> None:
        """Add the text of the tokens before the last one, unless it ends within a character."""
        decode = self._form.tokenizer.decode
        before = decode(choice.tokens[choice.anchor : choice.known])
        whole = decode(choice.tokens[choice.anchor :])
        if len(whole) > len(before) and not whole.endswith(_UNFINISHED):
            choice.text += whole[len(before) :]
            choice.anchor, choice.known = choice.known, len(choice.tokens)

    def _safe_end(self, text: str) -> int:
        end = len(text) - self._slack
        if self._request.tools:
            found = text.find(_CALL_TAG)
            end = min(end, found if found >= 0 else len(text) - len(_CALL_TAG) + 1)
            # Before tool calls, space at the end is left out.
            end = min(end, len(text[: max(end, 0)].rstrip()))
        return end

    def _last(self, index: int, choice: _Choice, prompt: int, reply: ModelReply) -> Iterator[dict[str, Any]]:
        content = reply.text if self._request.kind == "completion" else reply.content
        if content[choice.sent :]:
            yield self._text(index, choice, content[choice.sent :])
        delta: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
        if reply.tool_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(reply.tool_calls)]
        body = {"text": ""} if self._request.kind == "completion" else {"delta": delta}
        chunk = self._chunk({**body, **self._form._end(reply, prompt)})
        if self._request.kind == "chat" and self._request.has_token_ids:
            chunk["prompt_token_ids"] = list(reply.prompt_ids)
        yield chunk

    def _text(self, index: int, choice: _Choice, text: str) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
        if self._request.kind == "completion":
            body["text"] = text
        else:
            body["delta"] = {"content": text} if choice.begun else {"role": "assistant", "content": text}
        choice.begun = True
        return self._chunk(body)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._form._head(is_chunk=True), "choices": [choice]}
        return chunk | ({"usage": None} if self._request.include_usage else {})
