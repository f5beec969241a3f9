"""Model behind verbs: forward, forward_backward, optim_step, save and load. A padded batch is what they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fray.rl.nexrl_types import Batch

if TYPE_CHECKING:
    from fray.rl.tensors.policy_trainer import PolicyTrainer


class TrainServiceClient(ABC):
    """Client of a training service."""

    @abstractmethod
    def forward(self, batch: Batch, *, is_reference: bool = False) -> Any:
        """Return the logprobs of the tokens of each row, nats: a tensor as ``batch.values["input_ids"]``.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``loss_mask``, each `[batch, tokens]`.
            is_reference: those of the frozen reference, and not of the policy.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of a batch to those since the last `optim_step`; return metrics.

        Args:
            batch: as of `forward`, and ``advantages`` (`[batch]`, or for each token of the sequences or of their
                responses) and ``old_log_probs`` or ``rollout_log_probs``, which a supervised loss does without.
        """

    @abstractmethod
    def optim_step(self) -> dict[str, float]:
        """Do an optimizer step with the gradients since the last one; return metrics."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Write model, optimizer and generators into a directory."""

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a directory that `save_checkpoint` wrote."""


class TorchTrainService(TrainServiceClient):
    """Service in this process, on a `PolicyTrainer` (backend ``torch``)."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def forward(self, batch: Batch, *, is_reference: bool = False) -> Any:
        from fray.rl.tensors.padded_rows import rows_of, spread_rows

        rows = rows_of(batch)
        score = self._policy.reference_logprobs if is_reference else self._policy.logprobs
        return spread_rows(batch, score([row for _, row in rows]), [place for place, _ in rows])

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        from fray.rl.tensors.padded_rows import rows_of

        return self._policy.forward_backward([row for _, row in rows_of(batch)])

    def optim_step(self) -> dict[str, float]:
        return self._policy.optim_step()

    def save_checkpoint(self, path: str | Path) -> None:
        self._policy.save(path)

    def load_checkpoint(self, path: str | Path) -> None:
        self._policy.load(path)


class MockTrainService(TrainServiceClient):
    """Service without a model (backend ``mock``): logprobs are those of the rollout, and steps are counted."""

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[int] = []
        """Rows of each batch."""

    def forward(self, batch: Batch, *, is_reference: bool = False) -> Any:
        return batch.values["rollout_log_probs"]

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        self.batches.append(len(batch))
        return {"loss": 0.0}

    def optim_step(self) -> dict[str, float]:
        self.steps += 1
        return {"grad_norm": 0.0, "updates": float(self.steps)}

    def save_checkpoint(self, path: str | Path) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "steps").write_text(f"{self.steps}\n", encoding="utf-8")

    def load_checkpoint(self, path: str | Path) -> None:
        self.steps = int(Path(path, "steps").read_text(encoding="utf-8"))
