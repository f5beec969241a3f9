"""Low-rank adapters: against peft, several in one batch, files, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")
peft = pytest.importorskip("peft", reason="needs peft: make test-rl")

import transformers  # noqa: E402
from trainer_cases import (  # noqa: E402
    TINY,
    VOCABULARY,
    furthest,
    slow_gradients,
    tiny_model,
    trajectories_of,
    weights_of,
)

from fray.rl.core.advantages import grpo  # noqa: E402
from fray.rl.core.versions import VersionName  # noqa: E402
from fray.rl.inference.model_engine import ModelEngine  # noqa: E402
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling  # noqa: E402
from fray.rl.tensors.adapters import AdapterSet  # noqa: E402
from fray.rl.tensors.engine import Engine  # noqa: E402
from fray.rl.tensors.flat_weights import table_of  # noqa: E402
from fray.rl.tensors.language_model import LanguageModel  # noqa: E402
from fray.rl.tensors.policy_trainer import PolicyTrainer  # noqa: E402
from fray.rl.train.lora import LoRA  # noqa: E402
from fray.rl.train.settings import GRPO, KlPenalty  # noqa: E402

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

TOKENS = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))


def logits(lm: LanguageModel) -> torch.Tensor:
    return lm.model(input_ids=TOKENS).logits


def trained(adapters: AdapterSet, name: str, settings: LoRA) -> None:
    """Give an adapter weights that change something."""
    generator = torch.Generator().manual_seed(len(name) + settings.rank)
    for tensor in adapters.add(name, settings).parameters:
        with torch.no_grad():
            tensor.normal_(0, 0.3, generator=generator)


def test_a_new_adapter_changes_nothing_and_the_model_keeps_its_names_and_weights() -> None:
    lm = tiny_model()
    before, table = logits(lm), table_of(lm.model)
    adapters = AdapterSet(lm.model)
    adapters.add("a", LoRA(4))
    with adapters.selected("a"):
        assert torch.equal(logits(lm), before)
    assert table_of(lm.model) == table


def test_gradients_flow_into_the_selected_adapter_alone() -> None:
    lm = tiny_model()
    adapters = AdapterSet(lm.model)
    for name in "ab":
        trained(adapters, name, LoRA(2))
    with adapters.selected("a"):
        logits(lm).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in adapters["a"].parameters)
    assert all(tensor.grad is None for tensor in adapters["b"].parameters)
    assert all(parameter.grad is None for parameter in lm.model.parameters())


@pytest.mark.parametrize(
    "settings", [LoRA(4), LoRA(2, mlp=False, unembed=False), LoRA(8, alpha=3.0, attention=False, unembed=False)]
)
def test_what_is_saved_computes_the_same_in_peft(settings: LoRA, tmp_path: Path) -> None:
    lm = tiny_model()
    lm.save(tmp_path / "base")
    adapters = AdapterSet(lm.model)
    trained(adapters, "a", settings)
    with adapters.selected("a"), torch.no_grad():
        ours = logits(lm)
    adapters.save("a", tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    with torch.no_grad():
        assert torch.allclose(theirs(input_ids=TOKENS).logits, ours, atol=1e-12)


def test_what_peft_saved_computes_the_same_here(tmp_path: Path) -> None:
    lm = tiny_model()
    lm.save(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    adapters = AdapterSet(lm.model)
    assert adapters.load("a", tmp_path / "adapter").settings == LoRA(3, alpha=5.0, mlp=False, unembed=False)
    with adapters.selected("a"), torch.no_grad():
        assert torch.allclose(logits(lm), theirs(input_ids=TOKENS).logits, atol=1e-12)


def test_rows_of_a_batch_have_adapters_of_unlike_ranks_and_layers() -> None:
    lm = tiny_model()
    adapters = AdapterSet(lm.model)
    trained(adapters, "a", LoRA(4))
    trained(adapters, "b", LoRA(2, mlp=False, unembed=False))
    with torch.no_grad():
        alone = {}
        for name in ("a", "b", None):
            with adapters.selected(name):
                alone[name] = logits(lm)
        names = ["b", None, "a", "b"]
        with adapters.selected(names):
            mixed = logits(lm)
    for row, name in enumerate(names):
        assert torch.allclose(mixed[row], alone[name][row], atol=1e-12), name


def test_a_copy_keeps_its_weights_while_the_original_is_trained() -> None:
    lm = tiny_model()
    adapters = AdapterSet(lm.model)
    trained(adapters, "a", LoRA(2))
    copied = [tensor.clone() for tensor in adapters.copy("a", "kept").parameters]
    with torch.no_grad():
        for tensor in adapters["a"].parameters:
            tensor.add_(1)
    assert all(torch.equal(one, two) for one, two in zip(adapters["kept"].parameters, copied, strict=True))
    adapters.remove("a")
    assert [name in adapters for name in ("a", "kept")] == [False, True]


def test_loading_over_an_adapter_keeps_its_tensors_for_the_optimizer(tmp_path: Path) -> None:
    lm = tiny_model()
    adapters = AdapterSet(lm.model)
    trained(adapters, "a", LoRA(2))
    adapters.save("a", tmp_path)
    tensors = adapters["a"].parameters
    saved = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    adapters.load("a", tmp_path)
    assert all(one is two for one, two in zip(adapters["a"].parameters, tensors, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(tensors, saved, strict=True))


def test_refusals_name_what_is_wrong_and_change_nothing(tmp_path: Path) -> None:
    lm = tiny_model()
    adapters = AdapterSet(lm.model)
    trained(adapters, "policy", LoRA(2))
    with pytest.raises(ValueError, match="an adapter 'policy' already"):
        adapters.add("policy", LoRA())
    with pytest.raises(KeyError, match="no adapter 'polcy'; did you mean policy"):
        adapters["polcy"]
    with pytest.raises(KeyError, match="no adapter 'polcy'"), adapters.selected(["policy", "polcy"]):
        pass
    with pytest.raises(FileNotFoundError, match=r"has no file adapter_config\.json"):
        adapters.load("policy", tmp_path)
    adapters.save("policy", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    before = adapters["policy"]
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \[2, 16\] instead of \[3, 16\]"):
        adapters.load("policy", tmp_path)
    assert adapters["policy"] is before
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="is of type 'IA3'; expected 'LORA'"):
        adapters.load("policy", tmp_path)
    with pytest.raises(ValueError, match="adapts nothing"):
        LoRA(attention=False, mlp=False, unembed=False)
    with pytest.raises(ValueError, match=r"invalid rank=0 of LoRA: expected a whole number of 1 or more"):
        LoRA(0)


# Trainer and engine ---------------------------------------------------------------------------------------------------


def test_the_trainer_trains_the_adapter_alone_and_its_gradient_is_that_of_the_product() -> None:
    settings = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "grad_clip": None, "groups": 2, "group_size": 4}
    lm = tiny_model()
    trainer = PolicyTrainer(lm, GRPO(lora=LoRA(2, alpha=4.0), **settings))
    with torch.no_grad():
        for name, tensor in trainer.weights.items():
            tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    base = weights_of(lm.model)
    before = {name: tensor.detach().clone() for name, tensor in trainer.weights.items()}
    rows = trajectories_of(lm)

    # The model with the product added to its weights has the gradient of that product: chained to A and B by hand.
    merged = tiny_model()
    for name, weight in merged.model.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in before:
            with torch.no_grad():
                weight += 2.0 * before[f"{layer}.lora_B.weight"] @ before[f"{layer}.lora_A.weight"]
    advantages = grpo([row["reward"] for row in rows], [row["group_id"] for row in rows])
    gradients = slow_gradients(merged, rows, advantages, {})
    trainer.update(rows)
    assert furthest(weights_of(lm.model), base) == 0
    for name, tensor in trainer.weights.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        of_weight = gradients[f"{layer}.weight"]
        first, second = before[f"{layer}.lora_A.weight"], before[f"{layer}.lora_B.weight"]
        gradient = 2.0 * (second.T @ of_weight if matrix == "A" else of_weight @ first.T)
        # The first step of AdamW with these settings.
        expected = before[name] - gradient / (gradient.abs() + 1)
        assert torch.allclose(tensor, expected, atol=1e-9), name


def test_training_an_adapter_continues_from_a_save_bit_for_bit(tmp_path: Path) -> None:
    settings = GRPO(2, 4, lr=0.05, lora=LoRA(2), kl=KlPenalty(0.1))
    lm = tiny_model()
    rows = trajectories_of(lm)
    one = PolicyTrainer(lm, settings)
    one.update(rows)
    one.save(tmp_path)
    two = PolicyTrainer(tiny_model(), settings)
    two.load(tmp_path)
    metrics = [{**trainer.update(rows), "seconds": 0, "tokens_per_s": 0} for trainer in (one, two)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["kl"] > 0, "the reference is the model without its adapter"
    assert all(torch.equal(tensor, two.weights[name]) for name, tensor in one.weights.items())


def test_an_engine_that_loads_the_adapter_has_the_logprobs_of_the_trainer() -> None:
    lm = tiny_model(dtype="float32")
    trainer = PolicyTrainer(lm, GRPO(2, 4, lr=0.1, lora=LoRA(2)))
    trainer.update(trajectories_of(lm))
    buffer = bytearray(trainer.table.total_bytes)
    trainer.write_weights(buffer)
    engine = ModelEngine(TINY, lora=LoRA(2))()
    engine.load(VersionName(0, 1), trainer.table, buffer)
    (completion,) = generated(engine, [GenerateRequest("r", (1, 2, 3), Sampling(max_tokens=5, ignore_eos=True))])
    tokens = [1, 2, 3, *completion.token_ids]
    expected = trainer.logprobs([{"tokens": tokens, "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1]}])[0][3:]
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    assert trainer.table.total_bytes < table_of(lm.model).total_bytes


def test_requests_of_several_adapters_share_a_batch_and_are_answered_as_alone() -> None:
    lm = tiny_model(dtype="float32")
    adapters = AdapterSet(lm.model)
    trained(adapters, "a", LoRA(4))
    trained(adapters, "b", LoRA(2, mlp=False))
    names = ["a", "b", None, "a"]
    requests = [
        GenerateRequest(str(number), (1, 2), Sampling(max_tokens=6, seed=7, ignore_eos=True), name)
        for number, name in enumerate(names)
    ]
    together = generated(Engine(lm, VersionName(0, 0), adapters=adapters), requests)
    for request, completion in zip(requests, together, strict=True):
        (alone,) = generated(Engine(lm, VersionName(0, 0), adapters=adapters), [request])
        assert completion.token_ids == alone.token_ids
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert together[0].token_ids != together[1].token_ids
    with pytest.raises(ValueError, match="request 'x': there is no adapter 'c' here"):
        Engine(lm, VersionName(0, 0), adapters=adapters).add(GenerateRequest("x", (1,), adapter="c"))


def generated(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    """Return the completions of requests of one completion each, in their order."""
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        found.update(dict(answer for answer in engine.step() if isinstance(answer, tuple)))
    return [found[request.request_id] for request in requests]
