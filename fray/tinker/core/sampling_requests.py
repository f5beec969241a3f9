"""Requests for samples of the Tinker API, checked, and their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from fray.rl.inference.requests import Sampling

StopReason: TypeAlias = Literal["stop", "length"]
"""Reason for an end: an end token or stop, or ``max_tokens``."""
NUM_SAMPLES_LIMIT = 1_024
TOPK_LIMIT = 100


def _tokens(value: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(value)


def _stops(value: Any) -> Any:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


@frozen(kw_only=True)
class SampleRequest:
    """Prompt, and the samples that are wanted of it.

    Attributes:
        prompt: tokens, at least one.
        num_samples: samples, which differ; 1 to `NUM_SAMPLES_LIMIT`.
        max_tokens: of each sample; None: as many as the context of the model leaves.
        temperature: by which logits are divided; 0: the most probable token.
        top_k: choose among so many of the most probable tokens; -1 or 0: all.
        top_p: choose among the most probable tokens that together have at least this probability.
        seed: of the random numbers; an equal request with equal weights gets equal samples. None: a random one.
        stop: texts, or ids of tokens, that end a sample instead of the end tokens of the model; empty: it ends with
            ``max_tokens`` alone. None: the end tokens of the model.
        prompt_logprobs: return the logprobs of the prompt's tokens.
        topk_prompt_logprobs: for each token of the prompt, return so many of the most probable; 0 to `TOPK_LIMIT`.
        weights: ``path`` of a saved sampler or checkpoint, as `AdapterEngine.execute` answers it; None: the base
            model.

    Raises:
        ValueError: a value is of another kind or out of its range; the message names it.
    """

    prompt: tuple[int, ...] = field(converter=_tokens)
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = field(default=None, converter=_stops)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    weights: str | None = None

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty: expected at least one token")
        _check_tokens("prompt", self.prompt)
        _check_whole("num_samples", self.num_samples, 1, NUM_SAMPLES_LIMIT)
        _check_whole("topk_prompt_logprobs", self.topk_prompt_logprobs, 0, TOPK_LIMIT)
        if self.stop and not all(isinstance(each, str) for each in self.stop):
            if any(isinstance(each, str) for each in self.stop):
                raise ValueError("stop has texts and ids of tokens: expected either texts or ids")
            _check_tokens("stop", self.stop)
        # The other values are checked there.
        self.sampling(1 if self.max_tokens is None else self.max_tokens)

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the settings of `fray.rl.inference` for samples of at most ``max_tokens`` tokens."""
        stops = self.stop or ()
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=self.seed,
            stop=tuple(each for each in stops if isinstance(each, str)),
            stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
            ignore_eos=self.stop is not None,
            n=self.num_samples,
            prompt_logprobs=self.prompt_logprobs or self.topk_prompt_logprobs > 0,
            top_prompt_logprobs=self.topk_prompt_logprobs,
        )


@frozen
class SampledSequence:
    """One sample.

    Attributes:
        tokens: chosen ones, with that which ended it.
        logprobs: of these, nats, at temperature 1 over all tokens.
        stop_reason: why it ended.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


@frozen
class SampleAnswer:
    """Answer to a request.

    Attributes:
        sequences: samples, by index.
        prompt_logprobs: of the prompt's tokens, None for the first; None if not asked for.
        topk_prompt_logprobs: for each token of the prompt pairs (id, logprob), most probable first, None for the
            first; None if not asked for.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


def _check_tokens(name: str, tokens: Iterable[Any]) -> None:
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name}: {token!r} at position {position}; expected ids of tokens")


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: expected an integer from {least} to {most}")
