"""Slow reference of the engine: one completion at a time, one forward pass over all of it, plain Python."""

from __future__ import annotations

import math
from typing import Any

import torch

from fray.rl.inference.requests import Completion, GenerateRequest, Sampling
from fray.rl.tensors.language_model import LanguageModel

TOLERANCE = 1e-5
"""Difference of logprobs and probabilities that is allowed: float32 sums in another order differ by less."""


def full_logprobs(lm: LanguageModel, tokens: list[int], first: int = 1) -> list[list[float]]:
    """Return the logprobs of all tokens at each place from ``first``, as a trainer computes them: without a cache."""
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1].float()
    return torch.log_softmax(logits, -1).tolist()  # type: ignore[no-any-return]


def random_number(seed: int, index: int, count: int) -> float:
    """Return the random number of token ``count`` of completion ``index``: SplitMix64, its upper 24 bits."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    key = mixed((mixed(seed) + gamma * (index + 1)) & mask)
    return (mixed((key + gamma * (count + 1)) & mask) >> 40) / 2**24


def probabilities(logprobs: list[float], sampling: Sampling, banned: set[int]) -> list[float]:
    """Return the distribution that a token is drawn from."""
    scores = [-math.inf if token in banned else value / sampling.temperature for token, value in enumerate(logprobs)]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    largest = scores[order[0]]
    weights = {token: math.exp(scores[token] - largest) for token in order}
    total = sum(weights.values())
    kept, before = {}, 0.0
    for token in order:
        if before < sampling.top_p or not kept:
            kept[token] = weights[token]
        before += weights[token] / total
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(scores))]


def check(lm: LanguageModel, request: GenerateRequest, completion: Completion, *, aborted: bool = False) -> None:
    """Assert that a completion is what this request has to be answered, token by token."""
    sampling, prompt = request.sampling, list(request.prompt_ids)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else lm.end_ids)}
    places = full_logprobs(lm, prompt + completion.token_ids, len(prompt))
    assert len(completion.logprobs) == len(completion.token_ids) == len(places)
    for count, (token, logprobs) in enumerate(zip(completion.token_ids, places, strict=True)):
        assert abs(completion.logprobs[count] - logprobs[token]) < TOLERANCE
        banned = ends if count < sampling.min_tokens else set()
        if sampling.temperature == 0:
            best = max(value for each, value in enumerate(logprobs) if each not in banned)
            assert token not in banned
            assert logprobs[token] > best - TOLERANCE
        else:
            drawn = random_number(sampling.seed or 0, completion.index, count)
            assert is_drawn(probabilities(logprobs, sampling, banned), token, drawn), (count, token, drawn)
        reason = end_reason(lm, sampling, completion.token_ids[: count + 1], ends)
        is_last = count + 1 == len(completion.token_ids)
        if is_last and not aborted:
            assert (completion.finish_reason, completion.stopped_by) == reason
        else:
            assert reason == ("", None), (count, reason)


def is_drawn(distribution: list[float], token: int, number: float) -> bool:
    """Return whether the number lies in the token's part of the cumulated distribution, up to rounding."""
    begin = sum(distribution[:token])
    return distribution[token] > 0 and begin - TOLERANCE <= number <= begin + distribution[token] + TOLERANCE


def end_reason(lm: LanguageModel, sampling: Sampling, tokens: list[int], ends: set[int]) -> tuple[str, Any]:
    """Return the finish reason and what stops a completion after these tokens; an empty reason if it continues."""
    if tokens[-1] in ends:
        return "stop", tokens[-1]
    if len(tokens) >= sampling.min_tokens:
        text, before = lm.tokenizer.decode(tokens), lm.tokenizer.decode(tokens[:-1])
        for stop in sampling.stop:
            if any(text[at : at + len(stop)] == stop and at + len(stop) > len(before) for at in range(len(text))):
                return "stop", stop
    return ("length", None) if len(tokens) == sampling.max_tokens else ("", None)
