"""Trainer of a policy: trajectories to an update of the weights, with metrics. Synchronous, without Trio.

One optimizer step for each minibatch; micro batches change memory and not results. An update whose loss or gradient is
not finite is not applied.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from fray.rl.core.advantages import next_baseline
from fray.rl.nexrl_types import Batch, Trajectory
from fray.rl.tensors import flat_weights, trainer_files
from fray.rl.tensors.adapters import POLICY_ADAPTER, AdapterSet
from fray.rl.tensors.aggregation import aggregate, denominator_of
from fray.rl.tensors.corrections import Correction, reject, truncate
from fray.rl.tensors.critic import CriticTrainer, value_metrics
from fray.rl.tensors.kl import FrozenModel, Reference, kl_divergence, mismatch_k3
from fray.rl.tensors.kl_control import AdaptiveKlController, FixedKlController
from fray.rl.tensors.language_model import LanguageModel
from fray.rl.tensors.losses import LossInputs, policy_loss
from fray.rl.tensors.ranks import Ranks
from fray.rl.tensors.token_batches import TokenBatch, numbers_in_parts, score, score_in_parts
from fray.rl.tensors.token_tensors import mean_over
from fray.rl.train.batch_advantages import advantages_of, gae_of, needed_keys
from fray.rl.train.errors import NonFiniteUpdatesError
from fray.rl.train.settings import CRITIC_FOLDER, GRPO
from fray.rl.train.trajectory_checks import check_trajectory, name_of
from fray.rl.weights_table import WeightTable

NON_FINITE_LIMIT = 3
"""Updates in a row with a loss or gradient that is not finite, after which training ends."""


class PolicyTrainer:
    """Model, optimizer and settings, with which `update` trains.

    Args:
        lm: model that is trained in place, and its tokenizer. With a KL penalty its weights at this moment are copied
            and are the reference, unless there is one, so make the trainer before `load`.
        settings: algorithm and numbers.
        clock: seconds, for the rate of tokens.
        ranks: data-parallel trainers with equal models and settings, each of which is called with the same batches and
            computes a share of each. Default: this one computes all.
        dump_directory: where the batch is written after `NON_FINITE_LIMIT` updates without success; default: a new
            directory for temporary files.
        critic: model with which the critic of ``gae`` begins; default: a copy of ``lm``.
        reference: of the KL penalty; default: a copy of ``lm``, or with an adapter ``lm`` without it.

    Raises:
        ValueError: ``critic`` has another vocabulary, or takes shorter sequences.
    """

    def __init__(
        self,
        lm: LanguageModel,
        settings: GRPO,
        *,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
        dump_directory: str | Path | None = None,
        critic: LanguageModel | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.lm = lm
        self.settings = settings
        self.model = lm.model
        self._clock = clock
        self._ranks = ranks
        self._dump_directory = dump_directory
        self.adapters = None if settings.lora is None else AdapterSet(lm.model)
        """Set with the adapter that is trained; None: all weights are."""
        self.weights: Any = lm.model
        """Weights that are trained: the model, or the tensors of its adapter."""
        if self.adapters is not None and settings.lora is not None:
            self.weights = self.adapters.add(POLICY_ADAPTER, settings.lora).tensors
        self._reference = reference
        if reference is None and settings.kl is not None and settings.lora is None:
            self._reference = FrozenModel(copy.deepcopy(self.model), settings.dtype)
        self._kl_control = kl_controller(settings)
        self._dtype = getattr(torch, settings.dtype)
        if settings.gradient_checkpointing:
            _checkpoint_gradients(self.model)
        self._parameters = [tensor for _, tensor in _trained(self.weights) if tensor.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.critic: CriticTrainer | None = None
        """Critic of ``gae``; None: there is none."""
        if settings.critic_settings is not None:
            _check_fits(critic or lm, lm)
            self.critic = CriticTrainer(critic or lm, settings, self._row_limit, ranks)
        self._order = torch.Generator().manual_seed(settings.seed)
        self._baseline: float | None = None
        self.updates = 0
        """Updates that were applied."""
        self.skipped = 0
        """Batches that had nothing to learn from."""
        self.not_finite = 0
        """Updates that were not applied, as a loss or gradient was not finite."""
        self._not_finite_in_a_row = 0
        self._pending_rows: list[Trajectory] = []
        """Trajectories whose gradients wait for `optim_step`."""
        self._pending_loss = 0.0

    @cached_property
    def table(self) -> WeightTable:
        """Return the table of the flat buffer that `write_weights` fills: the model's, or the adapter's alone."""
        return flat_weights.table_of(self.weights)

    def write_weights(self, buffer: Any) -> None:
        """Copy what is trained into a buffer of ``table.total_bytes``. Raises ValueError as `flat_weights.write`."""
        flat_weights.write(self.weights, buffer, self.table)

    def write_weight_file(self, path: Path) -> WeightTable:
        """Write what is trained as a file of safetensors, which appears when it is complete; return its table."""
        return flat_weights.write_file(self.weights, path)

    def check_ranks(self) -> None:
        """Check that all ranks have the same weights, once they are connected. Raises ValueError if they have not."""
        if self._ranks is not None:
            sums = self._ranks.gather([tensor.detach().double().sum().item() for _, tensor in _trained(self.weights)])
            for index, other in enumerate(sums):
                if other != sums[0]:
                    raise ValueError(
                        f"rank {index} of the trainer has other weights than rank 0: it loaded another model"
                    )

    def check(self, trajectories: Iterable[Trajectory]) -> None:
        """Check trajectories without training. Raises ValueError as `update`."""
        # Read once: the configuration of a model of Hugging Face takes microseconds for each look at it.
        limits = {"vocabulary_size": self.lm.vocabulary_size, "max_length": self.lm.max_length}
        needs = needed_keys(self.settings)
        for index, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, needs=needs, index=index, **limits)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return the logprob of each token, nats, by the current weights; 0.0 where ``loss_mask`` is 0.

        Raises ValueError for tokens or masks that `update` would refuse.
        """
        return self._logprobs_by(trajectories, is_reference=False)

    def _logprobs_by(self, trajectories: Sequence[Trajectory], *, is_reference: bool) -> list[list[float]]:
        for index, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, vocabulary_size=self.lm.vocabulary_size, needs=(), index=index)
        batch = self._token_batch(trajectories)
        with self._adapting(POLICY_ADAPTER):
            scores = self._score_by_reference(batch) if is_reference else self._score(self.model, batch)
        return [row[:length] for row, length in zip(scores.tolist(), batch.lengths, strict=True)]

    def update(self, trajectories: Sequence[Trajectory] | Batch) -> dict[str, float]:
        """Train on a batch; return metrics of it, as docs/rl-internals.md lists them.

        The update is applied, and ``updated`` is 1, unless all advantages are zero, no token is left by the
        correction, or a loss or gradient is not finite; then weights and optimizer are as before.

        Args:
            trajectories: with ``tokens``, ``loss_mask``, ``logprobs``, ``reward``, ``group_id`` (or ``uid``), and
                ``run_id`` where an episode has several. Of a `Batch`, rows of padding are left out.

        Raises:
            ValueError: there is none, or one is invalid: the message names it.
            NonFiniteUpdatesError: this is the third update in a row that was not finite; the message says where the
                batch was written to.
        """
        rows = _rows_of(trajectories)
        if not rows:
            raise ValueError("no trajectories to train on: a batch has at least one")
        self.check(rows)
        with self._adapting(POLICY_ADAPTER):
            return self._update(rows)

    def _update(self, rows: Sequence[Trajectory]) -> dict[str, float]:
        start = self._clock()
        batch, metrics = self._with_logprobs(self._token_batch(rows))
        rewards = [float(row["reward"]) for row in rows] if all("reward" in row for row in rows) else []
        metrics |= _rollout_metrics(batch, rewards)
        outcome = "updated"
        if self.critic is not None:
            batch, of_critic = self._with_gae(batch, rows, self.critic)
            metrics |= of_critic
            outcome = "skipped" if metrics["zero_advantages"] == 1 else outcome
        elif self.settings.loss != "cross_entropy":
            penalized, of_kl = self._penalized(batch, rewards)
            advantages = advantages_of(self.settings, rows, penalized, self._baseline)
            metrics |= of_kl | {"zero_advantages": fmean(not any(of_row) for of_row in advantages)}
            batch = batch.with_columns(advantages=batch.spread(advantages))
            outcome = "skipped" if metrics["zero_advantages"] == 1 else outcome
        if outcome == "updated":
            outcome, trained = self._train(batch)
            metrics |= trained
        metrics |= self._note(outcome, rewards, metrics.get("kl", 0.0))
        seconds = self._clock() - start
        metrics |= {"seconds": seconds, "tokens_per_s": metrics["tokens"] / seconds if seconds > 0 else 0.0}
        self._raise_if_stuck(rows)
        return metrics

    def _raise_if_stuck(self, rows: Sequence[Trajectory]) -> None:
        if self._not_finite_in_a_row >= NON_FINITE_LIMIT:
            if self._ranks is not None and self._ranks.index:
                raise NonFiniteUpdatesError("too many updates in a row that were not finite: rank 0 has the batch")
            path = trainer_files.dump(rows, self._dump_directory or tempfile.mkdtemp(prefix="fray-rl-"))
            raise NonFiniteUpdatesError(
                f"loss or gradient was not finite in {self._not_finite_in_a_row} updates in a row, and none of them "
                f"was applied: the weights are those after {self.updates} updates. The last batch is in {path}"
            )

    # An update in two parts -------------------------------------------------------------------------------------------

    def forward_backward(
        self, trajectories: Sequence[Trajectory] | Batch, *, loss: str | None = None
    ) -> dict[str, float]:
        """Add the gradient of a batch to those since the last `optim_step`; return metrics of it.

        Args:
            trajectories: as of `update`, with ``advantages`` in place of ``reward``: a number, or one for each token.
            loss: one of `LOSS_OPTIONS`, with its default options; default: that of the settings, with theirs.

        Raises:
            ValueError: as `update`; with a correction, ratios and all else are those of this batch alone.
        """
        rows, settings = _rows_of(trajectories), self.settings
        if loss not in (None, settings.loss):
            self.settings = evolve(settings, loss=loss, clip_low=None, clip_high=None, loss_options={})
        try:
            with self._adapting(POLICY_ADAPTER):
                return self._forward_backward(rows)
        finally:
            self.settings = settings

    def _forward_backward(self, rows: list[Trajectory]) -> dict[str, float]:
        is_supervised = self.settings.loss == "cross_entropy"
        needs = () if is_supervised else ("logprobs", "advantages")
        limits = {"vocabulary_size": self.lm.vocabulary_size, "max_length": self.lm.max_length}
        for index, row in enumerate(rows):
            check_trajectory(row, needs=needs, index=index, **limits)
        if not rows:
            return {"trajectories": 0.0, "loss": 0.0}
        batch, metrics = self._with_logprobs(self._token_batch(rows))
        if not is_supervised:
            advantages = [_of_each_token(row["advantages"], row) for row in rows]
            batch = batch.with_columns(advantages=batch.column(advantages))
            if not bool(torch.where(batch.mask, batch.columns["advantages"], 0.0).any()):
                # Without a gradient: a step would still decay the weights.
                return metrics | _rollout_metrics(batch, []) | {"zero_advantages": 1.0, "loss": 0.0}
        sums: dict[str, float] = defaultdict(float)
        total, tokens = self._backward(batch, sums, metrics)
        self._pending_loss += total
        self._pending_rows += rows
        rewards = [float(row["reward"]) for row in rows] if all("reward" in row for row in rows) else []
        means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
        return metrics | _rollout_metrics(batch, rewards) | means | {"loss": total}

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Do an optimizer step with the gradients since the last one; return metrics of it.

        Nothing changes if there are none (``skipped``), or loss or gradient are not finite (``not_finite``).

        Args:
            lr: learning rate; default: that of the settings.

        Raises:
            NonFiniteUpdatesError: as `update`.
        """
        rate = self._learning_rate() if lr is None else lr
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        rows, loss = self._pending_rows, self._pending_loss
        self._pending_rows, self._pending_loss = [], 0.0
        is_finite, norm = self._apply_gradient(loss)
        metrics = self._count("skipped" if not rows else "updated" if is_finite else "not_finite")
        self._raise_if_stuck(rows)
        return metrics | {"lr": rate, "grad_norm": norm}

    def reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return the logprobs of the frozen reference, as `logprobs`.

        Raises:
            ValueError: there is none, as the settings have no penalty; or as `logprobs`.
        """
        if self.settings.kl is None:
            raise ValueError("no reference model: GRPO(kl=...) keeps one")
        return self._logprobs_by(trajectories, is_reference=True)

    def save(self, directory: str | Path) -> None:
        """Write model, critic, tokenizer, optimizers, schedule and generators into a directory, made if needed.

        It has the layout of Hugging Face and loads with ``from_pretrained``; of an adapter, with that of `peft`. The
        files are not written all at once: write into a new directory and rename it when this returns.
        """
        if self.adapters is None:
            self.lm.save(directory)
        else:
            self.adapters.save(POLICY_ADAPTER, directory, self.lm.name)
            self.lm.save_tokenizer(directory)
        if self.critic is not None:
            self.critic.save(Path(directory, CRITIC_FOLDER))
        trainer_files.save_state(directory, self._state(), self._optimizer)

    def load(self, directory: str | Path) -> None:
        """Continue from a directory that `save` wrote: updates are then, bit for bit, those without a stop.

        Learning rate and other settings are those of this trainer, and not those that were saved.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: the directory has another model; the message has the difference.
        """
        state = trainer_files.read_state(directory)
        if self.adapters is None:
            trainer_files.load_model_weights(directory, self.model)
        else:
            self.adapters.load(POLICY_ADAPTER, directory)
        if self.critic is not None:
            self.critic.load(Path(directory, CRITIC_FOLDER))
        # Learning rate and decay are those of the optimizer, as they may have been set to other values since.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state.pop("optimizer")})
        self.updates, self.skipped, self.not_finite = state["updates"], state["skipped"], state["not_finite"]
        self._not_finite_in_a_row = state["not_finite_in_a_row"]
        self._baseline = state["baseline"]
        self._order.set_state(state["order"])
        if self.settings.kl is not None and self.settings.kl.target is not None and state["kl_coefficient"] is not None:
            self._kl_control.value = state["kl_coefficient"]

    def _state(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "not_finite": self.not_finite,
            "not_finite_in_a_row": self._not_finite_in_a_row,
            "baseline": self._baseline,
            "order": self._order.get_state(),
            "kl_coefficient": self._kl_control.value if self.settings.kl else None,
        }

    def _adapting(self, name: str | None) -> AbstractContextManager[None]:
        """Select the adapter, or none of it, in forward and backward passes."""
        return nullcontext() if self.adapters is None else self.adapters.selected(name)

    # Before the update ------------------------------------------------------------------------------------------------

    def _token_batch(self, rows: Sequence[Trajectory]) -> TokenBatch:
        return TokenBatch.of_trajectories(rows, self.lm.tokenizer.pad_id, self.lm.device)

    def _score(self, model: Any, batch: TokenBatch) -> Tensor:
        limits = self._row_limit(batch), self.settings.micro_batch_tokens
        return score_in_parts(model, batch, *limits, self._dtype, self._ranks)

    def _score_by_reference(self, batch: TokenBatch) -> Tensor:
        if self._reference is None:  # that of an adapter is the model without it
            with self._adapting(None):
                return self._score(self.model, batch)
        limits = self._row_limit(batch), self.settings.micro_batch_tokens
        return numbers_in_parts(self._reference, batch, *limits, self._ranks)

    def _row_limit(self, batch: TokenBatch) -> int | None:
        limit = self.settings.micro_batch
        return limit if self._ranks is None else self._ranks.row_limit(len(batch), limit)

    def _with_logprobs(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """Return the batch with logprobs of trainer and reference, where they are needed before the update.

        With one forward pass in the whole update, the trainer's logprobs are those of that pass.
        """
        settings, metrics = self.settings, {}
        limits = self._row_limit(batch), settings.micro_batch_tokens
        is_one_pass = settings.minibatches == 1 and batch.is_one_part(*limits)
        is_kl_of_trainer = settings.kl is not None and settings.kl.place == "reward"
        if settings.ratio_refers_to == "trainer" and (is_kl_of_trainer or not is_one_pass):
            batch = batch.with_columns(old_logprobs=self._score(self.model, batch))
            if settings.correction is not None:
                columns = batch.columns
                correction = self._correct(columns["old_logprobs"], columns["rollout_logprobs"], batch.mask)
                batch = batch.with_columns(weights=correction.weights, kept=correction.mask)
                metrics = {f"rollout_{name}": value for name, value in correction.metrics.items()}
        if settings.kl is not None:
            batch = batch.with_columns(ref_logprobs=self._score_by_reference(batch))
        return batch, metrics

    def _correct(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        correction = self.settings.correction
        assert correction is not None
        if correction.kind == "truncate":
            return truncate(logprobs, rollout_logprobs, mask, high=correction.high, level=correction.level)
        bounds = {"low": correction.low, "high": correction.high}
        return reject(logprobs, rollout_logprobs, mask, level=correction.level, **bounds)

    def _penalized(self, batch: TokenBatch, rewards: list[float]) -> tuple[list[float], dict[str, float]]:
        """Return rewards minus the divergence from the reference, summed over tokens, if the penalty is in rewards."""
        kl = self.settings.kl
        if kl is None or kl.place != "reward":
            return rewards, {}
        policy = batch.columns["old_logprobs" if self.settings.ratio_refers_to == "trainer" else "rollout_logprobs"]
        divergence = kl_divergence(policy, batch.columns["ref_logprobs"], kl.estimator)
        sums = torch.where(batch.mask, divergence, 0.0).sum(-1).tolist()
        penalized = [reward - self._kl_control.value * total for reward, total in zip(rewards, sums, strict=True)]
        return penalized, {"kl": mean_over(divergence, batch.mask).item()}

    def _with_gae(
        self, batch: TokenBatch, rows: Sequence[Trajectory], critic: CriticTrainer
    ) -> tuple[TokenBatch, dict[str, float]]:
        """Return the batch with advantages by the critic, which is trained then, and metrics."""
        values = critic.values(batch)
        of_rows = [row[:length] for row, length in zip(values.tolist(), batch.lengths, strict=True)]
        advantages, returns = gae_of(self.settings, rows, of_rows)
        wanted = batch.column(returns)
        metrics = value_metrics(values, wanted, batch.mask)
        metrics |= critic.train(self._minibatches(batch.with_columns(values=values, returns=wanted)))
        metrics["zero_advantages"] = fmean(not any(of_row) for of_row in advantages)
        return batch.with_columns(advantages=batch.column(advantages)), metrics

    # The update -------------------------------------------------------------------------------------------------------

    def _train(self, batch: TokenBatch) -> tuple[str, dict[str, float]]:
        """Do an optimizer step for each minibatch; return what became of the update, and metrics."""
        rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        minibatches = self._minibatches(batch)
        before = self._copy_of_weights() if len(minibatches) > 1 else None
        sums: dict[str, float] = defaultdict(float)
        of_correction: dict[str, float] = {}
        outcomes = set()
        for minibatch in minibatches:
            outcomes.add(self._step(minibatch, sums, of_correction))
            if "not_finite" in outcomes:
                if before is not None:
                    self._restore(before)
                break
        outcome = next(each for each in ("not_finite", "updated", "skipped") if each in outcomes)
        trained = max(sums.pop("trained_tokens", 0.0), 1.0)
        of_steps = {name: sums.pop(name, 0.0) / len(minibatches) for name in ("loss", "grad_norm")}
        return outcome, {name: value / trained for name, value in sums.items()} | of_correction | of_steps | {
            "lr": rate
        }

    def _step(self, minibatch: TokenBatch, sums: dict[str, float], of_correction: dict[str, float]) -> str:
        """Do one optimizer step, if loss and gradient are finite; add metrics times their tokens to ``sums``.

        A correction that is computed here is that of the whole batch, and so are its metrics.
        """
        total, tokens = self._backward(minibatch, sums, of_correction)
        if not tokens:
            self._optimizer.zero_grad()
            return "skipped"
        is_finite, norm = self._apply_gradient(total)
        sums["trained_tokens"] += tokens
        sums["loss"] += total
        sums["grad_norm"] += norm
        return "updated" if is_finite else "not_finite"

    def _backward(
        self, minibatch: TokenBatch, sums: dict[str, float], of_correction: dict[str, float]
    ) -> tuple[float, float]:
        """Add the gradient of a minibatch; return its loss, and the number of tokens that count in it."""
        settings = self.settings
        parts: Sequence[TokenBatch] = minibatch.parts(self._row_limit(minibatch), settings.micro_batch_tokens)
        denominator = None
        if len(parts) > 1:
            kept = minibatch.columns.get("kept", minibatch.mask)
            denominator = denominator_of(kept, settings.aggregation, settings.aggregation_length)
        found = []
        for part in (parts if self._ranks is None else self._ranks.own(parts)) if denominator != 0 else ():
            loss, numbers = self._loss(part, denominator)
            torch.autograd.backward(loss)
            found.append(numbers)
        if self._ranks is not None:
            found = [numbers for of_rank in self._ranks.gather(found) for numbers in of_rank]
        total, tokens = 0.0, 0.0
        for numbers in found:
            total += numbers.pop("loss")
            of_part = numbers.pop("tokens")
            tokens += of_part
            for name, value in numbers.items():
                if name.startswith("rollout_"):
                    of_correction[name] = value
                else:
                    sums[name] += value * of_part
        return total, tokens

    def _apply_gradient(self, loss: float) -> tuple[bool, float]:
        """Do an optimizer step if loss and gradient are finite, and forget the gradient; return that, and its norm."""
        if self._ranks is not None:
            self._ranks.add_gradients(self._parameters)
        limit = math.inf if self.settings.grad_clip is None else self.settings.grad_clip
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return is_finite, norm

    def _loss(self, part: TokenBatch, denominator: float | None) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a part of a minibatch, and metrics of it: means over its tokens, ``tokens``, ``loss``."""
        settings = self.settings
        logprobs, entropies = score(self.model, part, self._dtype)
        rollout = part.scored_column("rollout_logprobs")
        before = part.scored_column("old_logprobs")
        before = logprobs.detach() if before is None else before
        mask, correction = part.scored, None
        if settings.correction is not None:
            assert rollout is not None
            weights, kept = part.scored_column("weights"), part.scored_column("kept")
            if weights is None or kept is None:
                correction = self._correct(before, rollout, mask)
            else:
                correction = Correction(weights, kept, {})
            mask = correction.mask
        of_all: dict[str, Any] = {"length": settings.aggregation_length, "denominator": denominator}
        loss, numbers = policy_loss(
            LossInputs(
                logprobs,
                part.scored,
                before if settings.ratio_refers_to == "trainer" else rollout,
                part.scored_column("advantages"),
                entropies,
            ),
            settings.loss,
            aggregation=settings.aggregation,
            correction=correction,
            **of_all,
            **settings.options_of_loss,
        )
        if rollout is not None and settings.ratio_refers_to == "trainer":
            numbers["mismatch_k3"] = mean_over(mismatch_k3(before, rollout), mask).item()
        reference = part.scored_column("ref_logprobs")
        if settings.kl is not None and settings.kl.place == "loss" and reference is not None:
            divergence = kl_divergence(logprobs, reference, settings.kl.estimator)
            numbers["kl"] = mean_over(divergence.detach(), mask).item()
            loss = loss + self._kl_control.value * aggregate(divergence, mask, settings.aggregation, **of_all)
            numbers["loss"] = loss.item()
        return loss, numbers

    def _minibatches(self, batch: TokenBatch) -> list[TokenBatch]:
        count = min(self.settings.minibatches, len(batch))
        if count == 1:
            return [batch]
        order = torch.randperm(len(batch), generator=self._order)
        return [batch.take(rows.tolist()) for rows in order.tensor_split(count)]

    def _learning_rate(self) -> float:
        warmup = self.settings.warmup_steps
        return self.settings.lr * (min(1.0, (self.updates + 1) / warmup) if warmup else 1.0)

    def _copy_of_weights(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [each.detach().clone() for each in self._parameters], copy.deepcopy(self._optimizer.state_dict())

    def _restore(self, before: tuple[list[Tensor], dict[str, Any]]) -> None:
        weights, moments = before
        with torch.no_grad():
            for parameter, value in zip(self._parameters, weights, strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(moments)

    def _note(self, outcome: str, rewards: list[float], kl: float) -> dict[str, float]:
        """Count what became of a batch, and adapt to it; return it as metrics."""
        metrics = self._count(outcome)
        if outcome == "updated":
            self._kl_control.update(kl, len(rewards))
            if self.settings.advantage == "reinforce" and rewards:
                self._baseline = next_baseline(self._baseline, rewards, self.settings.baseline_decay)
        return metrics

    def _count(self, outcome: str) -> dict[str, float]:
        self._not_finite_in_a_row = self._not_finite_in_a_row + 1 if outcome == "not_finite" else 0
        self.updates += outcome == "updated"
        self.skipped += outcome == "skipped"
        self.not_finite += outcome == "not_finite"
        metrics = {name: float(outcome == name) for name in ("updated", "skipped", "not_finite")}
        if self.settings.kl is not None:
            metrics["kl_coefficient"] = self._kl_control.value
        return metrics | {"updates": float(self.updates)}


def _rows_of(trajectories: Sequence[Trajectory] | Batch) -> list[Trajectory]:
    if not isinstance(trajectories, Batch):
        return list(trajectories)
    count = len(trajectories) - trajectories.metadata.get("padding_rows", 0)
    return [{name: column[row] for name, column in trajectories.values.items()} for row in range(count)]


def _of_each_token(value: Any, row: Trajectory) -> list[float]:
    """Return advantages of a trajectory, one for each token."""
    values = value.tolist() if hasattr(value, "tolist") else value
    found = [float(each) for each in values] if isinstance(values, Sequence) else [float(values)] * len(row["tokens"])
    if len(found) != len(row["tokens"]):
        raise ValueError(f"{name_of(row)}: advantages has {len(found)} numbers for {len(row['tokens'])} tokens")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{name_of(row)}: advantages has a number that is not finite")
    return found


def _rollout_metrics(batch: TokenBatch, rewards: list[float]) -> dict[str, float]:
    response = batch.mask.sum(-1)
    metrics = {
        "trajectories": float(len(batch)),
        "tokens": float(sum(batch.lengths)),
        "response_tokens_mean": response.double().mean().item(),
        "response_tokens_max": float(response.max()),
    }
    if rewards:
        metrics |= {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    return metrics


def kl_controller(settings: GRPO) -> AdaptiveKlController | FixedKlController:
    kl = settings.kl
    if kl is None:
        return FixedKlController(0.0)
    return (
        FixedKlController(kl.coefficient)
        if kl.target is None
        else AdaptiveKlController(kl.coefficient, kl.target, kl.horizon)
    )


def _trained(weights: flat_weights.Weights) -> Iterable[tuple[str, Tensor]]:
    return weights.named_parameters() if isinstance(weights, torch.nn.Module) else weights.items()


def _check_fits(critic: LanguageModel, policy: LanguageModel) -> None:
    for name in ("vocabulary_size", "max_length"):
        ours, wanted = getattr(critic, name), getattr(policy, name)
        if ours < wanted or (name == "vocabulary_size" and ours != wanted):
            raise ValueError(f"the critic's model has {name} {ours}, and the policy's {wanted}: it is of another kind")


def _checkpoint_gradients(model: Any) -> None:
    # The name of later releases, or that of earlier ones.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        # Layers look at it before they save memory. What is inside them stays in evaluation mode: dropout would make
        # the trainer's logprobs differ from the servers'.
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
