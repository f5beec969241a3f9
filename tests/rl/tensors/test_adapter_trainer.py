"""Training of adapters by requests: against a loop of torch, apart from each other, saved and continued."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from trainer_cases import VOCABULARY, tiny_model  # noqa: E402

from fray.rl.tensors.adapter_trainer import AdapterTrainer, finished  # noqa: E402
from fray.rl.train.datums import AdamParams, Datum, ServiceLoss  # noqa: E402
from fray.rl.train.lora import LoRA  # noqa: E402

pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def data_of(seed: int, count: int = 5) -> list[Datum]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        length = rng.randint(1, 7)
        found.append(
            Datum(
                [rng.randrange(VOCABULARY) for _ in range(length)],
                [rng.randrange(VOCABULARY) for _ in range(length)],
                {
                    "weights": [rng.choice([0.0, 0.5, 1.0]) for _ in range(length)],
                    "logprobs": [rng.uniform(-4, -1) for _ in range(length)],
                    "advantages": [rng.uniform(-1, 1) for _ in range(length)],
                },
            )
        )
    return found


def trainer_of(*names: str, **options: Any) -> AdapterTrainer:
    trainer = AdapterTrainer(tiny_model(), **options)
    for number, name in enumerate(names):
        trainer.create(name, LoRA(2 + number, seed=number))
        with torch.no_grad():
            for tensor in trainer.adapters[name].parameters:
                tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return trainer


def slow_loss(name: str, logprob: Any, column: dict[str, float], config: dict[str, float]) -> Any:
    """Return the loss of one token, by the formulas."""
    if name == "cross_entropy":
        return -column["weights"] * logprob
    ratio, advantage = torch.exp(logprob - column["logprobs"]), column["advantages"]
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -ratio * advantage
    if name == "ppo":
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if name == "cispo":
        return -ratio.detach().clamp(low, high) * advantage * logprob
    return -(logprob * advantage - 0.5 * config.get("beta", 0.05) * (logprob - column["logprobs"]) ** 2)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        ("cispo", {}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_losses_logprobs_and_gradients_are_those_of_a_loop_over_tokens(name: str, config: dict[str, float]) -> None:
    trainer, data = trainer_of("a", slice_tokens=10), data_of(1)
    output = finished(trainer.forward("a", data, ServiceLoss(name, config), backward=True))
    gradients = [tensor.grad for tensor in trainer.adapters["a"].parameters]

    other = trainer_of("a")
    parameters = other.adapters["a"].parameters
    total = torch.zeros((), dtype=torch.float64)
    for number, datum in enumerate(data):
        with other.adapters.selected("a"):
            logits = other.lm.model(input_ids=torch.tensor([datum.tokens])).logits[0]
        for place, target in enumerate(datum.targets):
            logprob = logits[place, target] - logits[place].logsumexp(-1)
            columns = {key: values[place] for key, values in datum.columns.items()}
            loss = slow_loss(name, logprob, columns, config)
            assert output.logprobs[number][place] == pytest.approx(logprob.item(), abs=1e-6)
            assert output.losses[number][place] == pytest.approx(loss.item(), abs=1e-6)
            total = total + loss
    assert output.loss == pytest.approx(total.item(), abs=1e-9)
    expected = torch.autograd.grad(total, parameters)
    assert all(torch.allclose(one, two, atol=1e-9) for one, two in zip(gradients, expected, strict=True))


def test_two_requests_before_a_step_add_their_gradients_and_a_step_is_that_of_adamw() -> None:
    params = AdamParams(0.01, 0.8, 0.9, 1e-6, 0.1, 0.5)
    trainer = trainer_of("a")
    loss = ServiceLoss("cross_entropy")
    for _ in range(2):
        for seed in (1, 2):
            finished(trainer.forward("a", data_of(seed), loss, backward=True))
        trainer.step("a", params)

    other = trainer_of("a")
    parameters = other.adapters["a"].parameters
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(2):
        finished(other.forward("a", [*data_of(1), *data_of(2)], loss, backward=True))
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    both = zip(trainer.adapters["a"].parameters, parameters, strict=True)
    assert all(torch.allclose(one, two, atol=1e-9) for one, two in both)


def test_requests_of_several_adapters_that_alternate_give_what_each_gives_alone() -> None:
    loss, params = ServiceLoss("importance_sampling"), AdamParams(0.01)
    together = trainer_of("a", "b", slice_tokens=8)
    works = {name: together.forward(name, data_of(seed), loss, backward=True) for seed, name in enumerate("ab")}
    while works:
        for name in list(works):
            if next(works[name], "end") == "end":
                del works[name]
    for name in "ab":
        together.step(name, params)
    for seed, name in enumerate("ab"):
        alone = trainer_of("a", "b", slice_tokens=8)
        finished(alone.forward(name, data_of(seed), loss, backward=True))
        alone.step(name, params)
        both = zip(together.adapters[name].parameters, alone.adapters[name].parameters, strict=True)
        assert all(torch.equal(one, two) for one, two in both), name


def test_a_forward_pass_and_a_learning_rate_of_0_change_nothing() -> None:
    trainer, loss = trainer_of("a"), ServiceLoss("cross_entropy")
    before = [tensor.detach().clone() for tensor in trainer.adapters["a"].parameters]
    one = finished(trainer.forward("a", data_of(1), loss))
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in trainer.adapters["a"].parameters)
    finished(trainer.forward("a", data_of(1), loss, backward=True))
    trainer.step("a", AdamParams(0.0))
    assert finished(trainer.forward("a", data_of(1), loss)).loss == one.loss
    assert all(torch.equal(*both) for both in zip(before, trainer.adapters["a"].parameters, strict=True))


def test_a_saved_adapter_continues_with_its_optimizer_as_without_a_stop(tmp_path: Path) -> None:
    loss, params = ServiceLoss("cross_entropy"), AdamParams(0.01)

    def steps(trainer: AdapterTrainer, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            losses.append(finished(trainer.forward("a", data_of(seed), loss, backward=True)).loss)
            trainer.step("a", params)
        return losses

    one = trainer_of("a")
    steps(one, range(3))
    one.save("a", tmp_path)
    two = AdapterTrainer(tiny_model())
    two.load("a", tmp_path)
    assert steps(one, range(3, 6)) == steps(two, range(3, 6))
    three = AdapterTrainer(tiny_model())
    three.load("a", tmp_path, optimizer=False)
    assert steps(three, range(3, 6)) != steps(two, range(3, 6))


@pytest.mark.parametrize(
    ("datum", "loss", "message"),
    [
        (Datum([1, 2], [1]), "cross_entropy", r"data\[0\]: target_tokens has 1 tokens, but the input has 2"),
        (Datum([1], [99], {"weights": [1]}), "cross_entropy", r"token 99 at position 0 of target_tokens is outside"),
        (Datum([1], [1]), "ppo", r"data\[0\]: loss 'ppo' needs logprobs; it has none of these"),
        (
            Datum([1], [1], {"logprobs": [0], "advantages": []}),
            "ppo",
            r"advantages has 0 numbers, but target_tokens has 1",
        ),
        (Datum([1], [1], {"weights": [float("nan")]}), "cross_entropy", r"weights at position 0 is nan"),
        (Datum([], []), "cross_entropy", r"0 input tokens; the model takes 1 to"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_datum_and_position(datum: Datum, loss: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        finished(trainer_of("a").forward("a", [datum], ServiceLoss(loss), backward=True))


def test_unknown_losses_and_settings_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown loss 'crossentropy'; did you mean cross_entropy"):
        ServiceLoss("crossentropy")
    with pytest.raises(
        ValueError, match=r"unknown setting 'clip_low' of loss 'ppo'.*; it has clip_low_threshold, clip_high"
    ):
        ServiceLoss("ppo", {"clip_low": 1.0})
    with pytest.raises(ValueError, match=r"invalid beta1=1\.0 of AdamParams"):
        AdamParams(beta1=1.0)
