"""Tiny models and trajectories for tests of the trainer, and a slow update of one sequence at a time."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from fray.rl.model_spec import TinyLlama
from fray.rl.tensors.language_model import LanguageModel, load_model

TINY = TinyLlama(layers=1, width=16, heads=2, mlp=32)
VOCABULARY = len(TINY.chars)


def tiny_model(spec: TinyLlama = TINY, dtype: str = "float64") -> LanguageModel:
    return load_model(spec, dtype=dtype)


def token_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logprob of each token but the first, by a forward pass of this sequence alone."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return torch.stack(
        [
            logits[place].double()[tokens[place + 1]] - logits[place].double().logsumexp(-1)
            for place in range(len(tokens) - 1)
        ]
    )


def trajectories_of(
    lm: LanguageModel, count: int = 8, group_size: int = 4, seed: int = 0, noise: float = 0.3, longest: int = 6
) -> list[dict[str, Any]]:
    """Return random sequences of several lengths and turns, whose logprobs are those of the model plus noise."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt, response = rng.randint(1, 4), rng.randint(1, longest)
        tokens = [rng.randrange(VOCABULARY) for _ in range(prompt + response)]
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(response - 1)] + [1]
        with torch.no_grad():
            exact = [0.0, *token_logprobs(lm.model, tokens).tolist()]
        logprobs = [
            min(logprob + rng.uniform(-noise, noise), 0.0) if counts else 0.0
            for logprob, counts in zip(exact, mask, strict=True)
        ]
        made.append(
            {
                "tokens": tokens,
                "loss_mask": mask,
                "logprobs": logprobs,
                "reward": rng.choice([0.0, 0.25, 1.0]),
                "group_id": f"g{index // group_size}",
                "run_id": index,
                "task_id": f"t{index // group_size}",
            }
        )
    return made


def weights_of(lm: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in lm.model.named_parameters()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two weights."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def slow_gradients(
    lm: LanguageModel, trajectories: list[dict[str, Any]], advantages: list[float], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the gradients of the clipped loss, a sequence and a token at a time.

    Options: ``low``, ``high``, ``aggregation``, ``length``; ``truncate`` or ``reject`` with the bounds of ratios of
    trainer to rollout, to which the clipped ratio then does not refer; ``kl`` and ``reference``, a model, with the
    estimator ``mse``.
    """
    sequences = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        logprobs = token_logprobs(lm.model, trajectory["tokens"])
        if "reference" in options:
            with torch.no_grad():
                of_reference = token_logprobs(options["reference"].model, trajectory["tokens"])
        terms = []
        for place in range(1, len(trajectory["tokens"])):
            if not trajectory["loss_mask"][place]:
                continue
            logprob, rollout = logprobs[place - 1], trajectory["logprobs"][place]
            mismatch = math.exp(logprob.item() - rollout)
            weight, old = 1.0, rollout
            if "truncate" in options:
                weight, old = min(mismatch, options["truncate"]), logprob.item()
            if "reject" in options:
                bottom, top = options["reject"]
                if not bottom <= mismatch <= top:
                    continue
                weight, old = mismatch, logprob.item()
            ratio = torch.exp(logprob - old)
            bounded = min(max(ratio.item(), 1 - options.get("low", 0.2)), 1 + options.get("high", 0.2))
            term = (
                -ratio * advantage
                if -ratio.item() * advantage >= -bounded * advantage
                else torch.tensor(-bounded * advantage)
            )
            term = weight * term
            if "kl" in options:
                term = term + options["kl"] * 0.5 * (logprob - of_reference[place - 1]) ** 2
            terms.append(term)
        if terms:
            sequences.append(terms)
    sums = [sum(terms) for terms in sequences]
    match options.get("aggregation", "token-mean"):
        case "token-mean":
            loss = sum(sums) / sum(len(terms) for terms in sequences)
        case "seq-mean-token-mean":
            loss = sum(total / len(terms) for total, terms in zip(sums, sequences, strict=True)) / len(sequences)
        case "seq-mean-token-sum":
            loss = sum(sums) / len(sequences)
        case _:
            loss = sum(sums) / len(sequences) / options["length"]
    lm.model.zero_grad()
    torch.autograd.backward(loss)
    return {name: value.grad.clone() for name, value in lm.model.named_parameters()}
