"""Lines that a run prints about its updates and validations."""

from __future__ import annotations

from collections.abc import Mapping

from fray.rl.core.validation import PREFIX
from fray.rl.train.settings import GRPO


def is_validation(metrics: Mapping[str, float]) -> bool:
    """Return whether metrics are those of a validation."""
    return f"{PREFIX}samples" in metrics


def validation_text(number: int, metrics: Mapping[str, float]) -> str:
    """Return the line about a validation of the weights after an update."""
    counts = {f"{PREFIX}samples", f"{PREFIX}dropped"}
    means = [
        f"{name.removeprefix(PREFIX)} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith(PREFIX) and name not in counts
    ]
    dropped = metrics[f"{PREFIX}dropped"]
    text = f"validation after step {number}: {', '.join(means) or 'no scores'}"
    text += f" ({metrics[f'{PREFIX}samples']:.0f} samples" + (f", {dropped:.0f} dropped" if dropped else "")
    return f"{text}), {metrics['elapsed_s']:.1f} s"


def step_text(number: int, metrics: Mapping[str, float], trainer: GRPO | None, skipped: str) -> str:
    """Return the line about an update, and why it changed nothing, if it was skipped."""
    of = f"/{trainer.steps}" if trainer is not None and trainer.steps else ""
    name = next((name for name in ("reward_mean", "loss") if name in metrics), None)
    value = "" if name is None else f": {name.removesuffix('_mean')} {metrics[name]:.3f}"
    text = f"step {number}{of}{value}"
    if (busy := metrics.get("servers_busy_share")) is not None:
        text += f", servers busy {busy:.0%}"
    text += f", {metrics['elapsed_s']:.1f} s"
    return f"{text}, skipped: {skipped}" if skipped else text
