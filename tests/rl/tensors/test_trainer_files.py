"""Saving and loading a trainer: continuing is bit-identical, other models are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from trainer_cases import TINY, furthest, tiny_model, trajectories_of, weights_of  # noqa: E402

from fray.rl.model_spec import TinyLlama  # noqa: E402
from fray.rl.tensors.language_model import load_model  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from fray.rl.train.settings import GRPO, KlPenalty  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("advantage", ["grpo", "reinforce"])
def test_continuing_from_a_save_is_bit_for_bit_as_without_a_stop(advantage: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    penalty = KlPenalty(0.1, "mse", target=1e-3, horizon=50)
    choices = GRPO(2, 4, lr=1e-2, warmup_steps=4, minibatches=3, advantage=advantage, kl=penalty)
    batches = [trajectories_of(tiny_model(), seed=seed) for seed in range(5)]
    straight = PolicyTrainer(tiny_model(dtype="float32"), choices)
    for batch in batches[:2]:
        straight.update(batch)
    straight.save(tmp_path)
    resumed = PolicyTrainer(tiny_model(dtype="float32"), choices)
    resumed.load(tmp_path)
    assert resumed.updates == 2
    for batch in batches[2:]:
        one, other = straight.update(batch), resumed.update(batch)
        assert {name: one[name] for name in one if name not in ("seconds", "tokens_per_s")} == {
            name: other[name] for name in other if name not in ("seconds", "tokens_per_s")
        }
    assert furthest(weights_of(straight.lm), weights_of(resumed.lm)) == 0
    assert furthest(weights_of(straight.lm), weights_of(tiny_model(dtype="float32"))) > 1e-3


def test_a_save_is_a_model_of_its_own_with_its_tokenizer(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tiny_model(dtype="float32"), GRPO(lr=1e-2))
    trainer.update(trajectories_of(trainer.lm))
    trainer.save(tmp_path)
    loaded = load_model(str(tmp_path))
    assert furthest(weights_of(loaded), weights_of(trainer.lm)) == 0
    assert loaded.tokenizer.encode("12=") == TINY.tokenizer.encode("12=")


def test_settings_are_those_of_the_new_trainer(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tiny_model(dtype="float32"), GRPO(lr=1e-2))
    trainer.update(trajectories_of(trainer.lm))
    trainer.save(tmp_path)
    resumed = PolicyTrainer(tiny_model(dtype="float32"), GRPO(lr=1e-3))
    resumed.load(tmp_path)
    assert resumed.update(trajectories_of(resumed.lm, seed=1))["lr"] == 1e-3


def test_the_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    wide = TinyLlama(layers=1, width=32, heads=2, mlp=32)
    PolicyTrainer(tiny_model(wide, "float32"), GRPO()).save(tmp_path)
    trainer = PolicyTrainer(tiny_model(dtype="float32"), GRPO())
    before = weights_of(trainer.lm)
    with pytest.raises(ValueError, match=r"is of another model: .*embed_tokens.weight has shape \[15, 32\] instead of"):
        trainer.load(tmp_path)
    assert furthest(before, weights_of(trainer.lm)) == 0


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of a trainer in .*: it has no file trainer_state.pt"):
        PolicyTrainer(tiny_model(dtype="float32"), GRPO()).load(tmp_path)
