"""Slow reference implementations of losses, KL divergences, corrections and aggregations: floats, token by token.

Written from the formulas of the papers. Where a formula stops the gradient, the logprob in that place is the argument
``frozen``, so that finite differences of these functions are the gradients that the fast ones must have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp

Rows = Sequence[Sequence[float]]
Mask = Sequence[Sequence[bool]]


def bounded(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ratio(log_ratio: float) -> float:
    return exp(bounded(log_ratio, -20, 20))


def token_loss(
    loss: str, new: Rows, frozen: Rows, old: Rows, advantages: Rows, mask: Mask, row: int, column: int, options: dict
) -> float:
    """The loss of one token; ``options`` has every option of the loss."""
    logprob, a = new[row][column], advantages[row][column]
    r = ratio(logprob - old[row][column])
    low, high = 1 - options.get("low", 0), 1 + options.get("high", 0)
    if loss == "cross_entropy":
        return -logprob
    if loss == "importance_sampling":
        return -r * a
    if loss == "dro":
        return -logprob * a + options["beta"] / 2 * (logprob - old[row][column]) ** 2
    if loss == "cispo":
        return -bounded(ratio(frozen[row][column] - old[row][column]), low, high) * a * logprob
    if loss == "gspo":
        counting = [c for c in range(len(mask[row])) if mask[row][c]]
        mean = sum(frozen[row][c] - old[row][c] for c in counting) / len(counting)
        r = ratio(mean) * exp(logprob - frozen[row][column])
    surrogate = min(r * a, bounded(r, low, high) * a)
    if loss == "dual_clip" and a < 0:
        surrogate = max(surrogate, options["bound"] * a)
    return -surrogate


def aggregated(losses: Rows, mask: Mask, aggregation: str, length: int | None = None) -> float:
    rows = [[x for x, keep in zip(*pair, strict=True) if keep] for pair in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation == "token-mean":
        tokens = [x for row in rows for x in row]
        return sum(tokens) / len(tokens)
    of_row: dict[str, Callable[[list[float]], float]] = {
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum": sum,
        "constant-length": lambda row: sum(row) / (length or 0),
    }
    return sum(of_row[aggregation](row) for row in rows) / len(rows)


def kl(logprob: float, reference: float, estimator: str) -> float:
    d = logprob - reference
    if estimator == "low_var_kl":
        back = bounded(-d, -5, 5)
        return bounded(exp(back) - 1 - back, -10, 10)
    return {"kl": d, "abs": abs(d), "mse": d * d / 2}[estimator]


def ratios(trainer: Rows, rollout: Rows, mask: Mask, level: str) -> list[list[float]]:
    result = []
    for of_trainer, of_rollout, keep in zip(trainer, rollout, mask, strict=True):
        logs = [t - r if k else 0.0 for t, r, k in zip(of_trainer, of_rollout, keep, strict=True)]
        if level == "sequence":
            logs = [sum(logs)] * len(logs)
        elif level == "geometric":
            logs = [sum(logs) / max(sum(keep), 1)] * len(logs)
        result.append([ratio(log) for log in logs])
    return result
