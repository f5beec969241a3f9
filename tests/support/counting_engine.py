"""Engine of an inference server without a model: tokens follow from the prompt and the weights by counting."""

from __future__ import annotations

import threading
from typing import Any

from attrs import define, field, frozen

from fray.rl.core.versions import Segment, VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent
from fray.rl.model_spec import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=>$ ", "$")


@define
class _Sequence:
    request: GenerateRequest
    index: int
    stream: bool
    tokens: list[int] = field(factory=list)
    segments: list[Segment] = field(factory=list)


@frozen
class OtherTable:
    """A table of weights that no engine of this module has."""


class CountingEngine:
    """Token number k of completion i: (sum of the prompt + i + k + first byte of the weights) modulo 10, then `eos`.

    Args:
        digits: tokens before the end token.
        gate: a step waits for one permit of it; None: steps run freely.
        fail_at: the step, from 1, that raises RuntimeError.
        slots: completions that are decoded at once.
    """

    def __init__(
        self,
        digits: int = 4,
        *,
        gate: threading.Semaphore | None = None,
        fail_at: int = 0,
        slots: int = 64,
        max_length: int = 64,
    ) -> None:
        self.version = VersionName(0, 0)
        self.max_length = max_length
        self.offset = 0
        self.digits, self.gate, self.fail_at, self.slots = digits, gate, fail_at, slots
        self.sequences: list[_Sequence] = []
        self.added: list[str] = []
        self.cancelled: list[str] = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def add(self, request: GenerateRequest, *, stream: bool = False) -> None:
        sampling = request.sampling
        if len(request.prompt_ids) + sampling.max_tokens > self.max_length:
            raise ValueError(f"the prompt has {len(request.prompt_ids)} tokens, the model takes {self.max_length}")
        self.added.append(request.request_id)
        self.sequences += [_Sequence(request, index, stream) for index in range(sampling.n)]

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.sequences = [each for each in self.sequences if each.request.request_id != request_id]

    def step(self) -> list[TokenEvent | tuple[str, Completion]]:
        if self.gate is not None:
            self.gate.acquire()
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("device lost")
        events: list[TokenEvent | tuple[str, Completion]] = []
        for sequence in self.sequences[: self.slots]:
            events += self._next(sequence)
        return events

    def _next(self, sequence: _Sequence) -> list[TokenEvent | tuple[str, Completion]]:
        request, sampling = sequence.request, sequence.request.sampling
        count = len(sequence.tokens)
        token = (sum(request.prompt_ids) + sequence.index + count + self.offset) % 10
        if count >= max(self.digits, sampling.min_tokens) and not sampling.ignore_eos:
            token = TOKENIZER.eos_id
        sequence.tokens.append(token)
        if sequence.segments and sequence.segments[-1][0] == self.version:
            sequence.segments[-1] = self.version, sequence.segments[-1][1] + 1
        else:
            sequence.segments.append((self.version, 1))
        events: list[TokenEvent | tuple[str, Completion]] = []
        if sequence.stream:
            events.append(TokenEvent(request.request_id, sequence.index, token, logprob_of(token), self.version))
        text = TOKENIZER.decode(sequence.tokens)
        found = next((stop for stop in sampling.stop if stop in text), None)
        stopped_by = token if token == TOKENIZER.eos_id or token in sampling.stop_token_ids else found
        if stopped_by is not None or len(sequence.tokens) == sampling.max_tokens:
            self.sequences.remove(sequence)
            events.append(completion_of(sequence, "stop" if stopped_by is not None else "length", stopped_by))
        return events

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        if isinstance(table, OtherTable):
            raise ValueError("it lacks embed.weight")
        self.version, self.offset = version, buffer[0]

    def abort_all(self) -> list[tuple[str, Completion]]:
        ended = [completion_of(sequence, "abort", None) for sequence in self.sequences]
        self.sequences = []
        return ended


def logprob_of(token: int) -> float:
    return -(1 + token) / 10


def completion_of(sequence: _Sequence, reason: Any, stopped_by: str | int | None) -> tuple[str, Completion]:
    asked = sequence.request.sampling.logprobs
    top = [[(token, logprob_of(token))][:asked] for token in sequence.tokens] if asked else []
    logprobs = [logprob_of(token) for token in sequence.tokens]
    return sequence.request.request_id, Completion(
        list(sequence.tokens), logprobs, list(sequence.segments), reason, sequence.index, stopped_by, top
    )


def request(name: str, prompt: str = "12", **sampling: Any) -> GenerateRequest:
    """Return a request with a prompt of `TOKENIZER`."""
    from fray.rl.inference.requests import Sampling

    return GenerateRequest(name, tuple(TOKENIZER.encode(prompt)), Sampling(**sampling))


async def answer_of(request: GenerateRequest) -> list[Completion]:
    """Return the completions of one request by an engine of its own."""
    engine = CountingEngine()
    engine.add(request)
    ended: list[Any] = []
    while engine.has_work:
        ended += engine.step()
    return [completion for _, completion in ended]
