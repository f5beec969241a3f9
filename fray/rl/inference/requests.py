"""Requests to an inference server and their answers: how to sample, completions, tokens of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from fray.rl.core.versions import Segment, VersionName

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Reason for an end: an end token or stop string, ``max_tokens``, or the server ended it."""

SEED_LIMIT = 2**64
"""Seeds are integers from 0 to below this."""


def _as_tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (str, int)) else tuple(value)


@frozen(kw_only=True)
class Sampling:
    """Choice of the tokens of a request's completions, and of their end.

    Args:
        max_tokens: of each completion.
        temperature: by which logits are divided; 0 chooses the most probable token.
        top_p: choose among the most probable tokens that together have at least this probability; from above 0 to 1.
        top_k: choose among so many of the most probable tokens; 0 means all.
        min_tokens: a completion ends only after so many; until then, tokens that would end it are not chosen.
        seed: of the random numbers, from 0 to below 2⁶⁴; a request with equal prompt, sampling and weights gets equal
            tokens, whatever else the server does. None: a random one.
        stop: strings; a completion ends with the token that completes one of them, which is part of ``token_ids``.
        stop_token_ids: tokens that end a completion besides those of the model.
        ignore_eos: the model's own end tokens do not end a completion.
        n: number of completions; each has random numbers of its own.
        logprobs: number of most probable tokens to report at each place, besides the chosen one.
        prompt_logprobs: report the logprobs of the prompt's tokens, too.
        top_prompt_logprobs: number of most probable tokens to report at each place of the prompt; needs
            ``prompt_logprobs``.

    Raises:
        ValueError: a value is of another kind or out of its range; the message names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), converter=_as_tuple)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_as_tuple)
    ignore_eos: bool = False
    n: int = 1
    logprobs: int = 0
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0

    def __attrs_post_init__(self) -> None:
        numbers = {"max_tokens": 1, "top_k": 0, "min_tokens": 0, "n": 1, "logprobs": 0, "top_prompt_logprobs": 0}
        for name, least in numbers.items():
            _check(name, getattr(self, name), least, math.inf, f"an integer of at least {least}", whole=True)
        if self.top_prompt_logprobs and not self.prompt_logprobs:
            raise ValueError(f"top_prompt_logprobs={self.top_prompt_logprobs} needs prompt_logprobs=True")
        _check("temperature", self.temperature, 0, 1e6, "a number of at least 0 (1 samples from the model as it is)")
        _check("top_p", self.top_p, math.nextafter(0, 1), 1, "a number above 0, at most 1 (1 means all tokens)")
        if self.seed is not None:
            _check("seed", self.seed, 0, SEED_LIMIT - 1, "an integer from 0 to below 2**64, or None", whole=True)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r}: expected strings that are not empty")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, 0, math.inf, "ids of tokens", whole=True)


def _check(name: str, value: Any, least: float, most: float, expected: str, *, whole: bool = False) -> None:
    """Raise ValueError unless the value is a number in the range; NaN is in none."""
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: expected {expected}")


class PromptTooLong(ValueError):
    """A prompt leaves no room for a response in the model's context; the servers can never answer it."""


@frozen
class GenerateRequest:
    """Prompt, and how to complete it.

    Args:
        request_id: name of the request; one that is repeated elsewhere keeps it.
        prompt_ids: tokens of the prompt, at least one.
        sampling: how to choose the tokens.
        adapter: name of the low-rank adapter that answers; None: the server's own weights.
        seed: of the random numbers, where ``sampling`` has none; so requests that differ in nothing else share one
            `Sampling`, which is checked and sent once.

    Raises:
        ValueError: the prompt is empty.
    """

    request_id: str
    prompt_ids: tuple[int, ...] = field(converter=_as_tuple)
    sampling: Sampling = Sampling()
    adapter: str | None = None
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id!r}: the prompt is empty; expected at least one token")


@frozen
class Completion:
    """One answer to a request.

    Attributes:
        token_ids: chosen tokens, with the one that ended it.
        logprobs: of the chosen tokens, nats, at temperature 1 over the full vocabulary: those that the trainer has.
        segments: versions of the weights that made the tokens: (version, number of tokens), in order.
        finish_reason: why it ended.
        index: which of the request's ``n`` completions.
        stopped_by: the stop string or the id of the token that ended it, if one did.
        top_logprobs: for each token ``Sampling.logprobs`` pairs (id, logprob), most probable first; empty if not asked
            for.
        prompt_logprobs: of the prompt's tokens, None for the first; empty if not asked for.
        top_prompt_logprobs: as ``top_logprobs``, for each token of the prompt but the first.
    """

    token_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    finish_reason: FinishReason
    index: int = 0
    stopped_by: str | int | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(factory=list)
    prompt_logprobs: list[float | None] = field(factory=list)
    top_prompt_logprobs: list[list[tuple[int, float]]] = field(factory=list)


@frozen
class TokenEvent:
    """A token of a completion that is still generated; made only for requests added with ``stream=True``."""

    request_id: str
    index: int
    token_id: int
    logprob: float
    version: VersionName
