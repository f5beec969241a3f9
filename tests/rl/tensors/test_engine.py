"""Inference engine: completions of all kinds of models against slow references, batching, updates, ends, errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from engine_reference import check, full_logprobs  # noqa: E402

from fray.rl.core.versions import VersionName  # noqa: E402
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling  # noqa: E402
from fray.rl.model_spec import CharTokenizer  # noqa: E402
from fray.rl.tensors.engine import Engine  # noqa: E402
from fray.rl.tensors.language_model import LanguageModel  # noqa: E402

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

V0, V1 = VersionName(0, 0), VersionName(0, 1)
LENGTH = 64
COMMON: dict[str, Any] = {"vocab_size": 15, "max_position_embeddings": LENGTH, "eos_token_id": 13, "bos_token_id": None}
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, **SIZES),
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, **SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    ),
    "qwen3-sliding": lambda: transformers.Qwen3Config(
        **COMMON,
        **SIZES,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "mistral-sliding": lambda: transformers.MistralConfig(**COMMON, **SIZES, num_key_value_heads=2, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=15, n_positions=LENGTH, n_embd=16, n_head=2, n_layer=2, bos_token_id=None, eos_token_id=13
    ),
}


@cache
def model_of(name: str) -> LanguageModel:
    """A random model whose distributions are far from even."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return LanguageModel(model, CharTokenizer("0123456789+=>$ ", "$"), LENGTH, frozenset({13}))


def ask(engine: Engine, *requests: GenerateRequest) -> dict[tuple[str, int], Completion]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def drain(engine: Engine) -> dict[tuple[str, int], Completion]:
    found = {}
    while engine.has_work:
        for answer in engine.step():
            assert isinstance(answer, tuple)
            found[answer[0], answer[1].index] = answer[1]
    return found


def prompts(lengths: list[int], seed: int = 0) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(0, 13, length).tolist()) for length in lengths]


# Equal to transformers and to the trainer -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_are_those_of_transformers(name: str) -> None:
    lm = model_of(name)
    texts = prompts([1, 3, 3, 9, 20, 2])
    engine = Engine(lm, V0, slots=4)
    found = ask(
        engine,
        *(GenerateRequest(str(n), text, Sampling(max_tokens=20, temperature=0)) for n, text in enumerate(texts)),
    )
    for number, text in enumerate(texts):
        expected = lm.model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text)),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )[0, len(text) :].tolist()
        completion = found[str(number), 0]
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] == 13 else "length")


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_a_full_forward_pass_alone_and_in_a_mixed_batch(name: str) -> None:
    lm = model_of(name)
    requests = [
        GenerateRequest(f"{n}", text, Sampling(max_tokens=4 + 3 * n, seed=n, temperature=0.5 + n / 4, ignore_eos=True))
        for n, text in enumerate(prompts([1, 17, 5, 5, 30, 2]))
    ]
    together = ask(Engine(lm, V0, slots=4), *requests)
    for request in requests:
        alone = ask(Engine(lm, V0), request)[request.request_id, 0]
        mixed = together[request.request_id, 0]
        assert mixed.token_ids == alone.token_ids
        tokens = [*request.prompt_ids, *mixed.token_ids]
        rows = full_logprobs(lm, tokens, len(request.prompt_ids))
        expected = [row[token] for row, token in zip(rows, mixed.token_ids, strict=True)]
        assert mixed.logprobs == pytest.approx(expected, abs=1e-5)
        assert alone.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.full
@pytest.mark.within(900)
def test_logprobs_of_a_model_of_half_a_billion_parameters_are_those_of_a_full_forward_pass() -> None:
    # Random weights in the shape of Qwen2.5-0.5B: 2 GB.
    config = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        max_position_embeddings=1024,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=13,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert 490e6 < sum(parameter.numel() for parameter in model.parameters()) < 500e6
    lm = LanguageModel(model, CharTokenizer("0123456789+=>$ ", "$"), 1024, frozenset({13}))
    requests = [
        GenerateRequest(f"{n}", text, Sampling(max_tokens=4 + n, seed=n, ignore_eos=True))
        for n, text in enumerate(prompts([3, 160, 40]))
    ]
    together = ask(Engine(lm, V0, slots=4), *requests)
    for request in requests:
        mixed = together[request.request_id, 0]
        rows = full_logprobs(lm, [*request.prompt_ids, *mixed.token_ids], len(request.prompt_ids))
        expected = [row[token] for row, token in zip(rows, mixed.token_ids, strict=True)]
        assert mixed.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8}]
)
def test_tokens_are_distributed_as_transformers_has_it(options: dict[str, Any]) -> None:
    lm = model_of("qwen3")
    text, samples = prompts([6])[0], 6000
    found = ask(
        Engine(lm, V0, slots=1024), GenerateRequest("r", text, Sampling(max_tokens=1, n=samples, seed=3, **options))
    )
    logits = torch.tensor([full_logprobs(lm, [*text, 0], len(text))[0]])
    warpers = transformers.LogitsProcessorList()
    if "temperature" in options:
        warpers.append(transformers.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    expected = warpers(torch.tensor([text]), logits).softmax(-1)[0].double() * samples
    counts = torch.bincount(torch.tensor([each.token_ids[0] for each in found.values()]), minlength=15)
    assert len(found) == samples
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    statistic = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    freedom = torch.tensor(seen.sum().item() - 1)
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > 0.001


# Any order of requests ------------------------------------------------------------------------------------------------

SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(3, 8),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
    min_tokens=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
    stop=st.sampled_from([(), ("1",), ("55", "2+"), ("$ ",)]),
    stop_token_ids=st.sampled_from([(), (3,), (4, 5, 6)]),
    ignore_eos=st.booleans(),
    n=st.integers(1, 3),
)
ARRIVALS = st.tuples(st.integers(0, 12), st.integers(0, 5), SAMPLINGS, st.one_of(st.none(), st.integers(1, 6)))
"""Step, which prompt, how to sample, after how many steps it is cancelled."""


@settings(max_examples=40)
@given(
    name=st.sampled_from(["llama", "qwen3-sliding", "gpt2"]),
    slots=st.integers(1, 6),
    prefill_tokens=st.sampled_from([1, 24, 1000]),
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=6),
    aborted_after=st.one_of(st.none(), st.integers(0, 20)),
)
def test_whatever_comes_and_is_cancelled_each_request_is_answered_as_if_alone(
    name: str, slots: int, prefill_tokens: int, arrivals: list, aborted_after: int | None
) -> None:
    lm = model_of(name)
    engine = Engine(lm, V0, slots=slots, prefill_tokens=prefill_tokens)
    texts = prompts([1, 2, 2, 7, 12, 13])
    requests = [GenerateRequest(f"r{n}", texts[prompt], how) for n, (_, prompt, how, _) in enumerate(arrivals)]
    open_ids: set[str] = set()
    answers: dict[tuple[str, int], Completion] = {}
    step = 0
    while engine.has_work or step <= max(at for at, *_ in arrivals):
        for (at, _, _, cancelled_after), request in zip(arrivals, requests, strict=True):
            if at == step:
                engine.add(request)
                open_ids.add(request.request_id)
            if cancelled_after is not None and at + cancelled_after == step:
                is_open = any((request.request_id, index) not in answers for index in range(request.sampling.n))
                assert engine.cancel(request.request_id) == is_open
                if is_open:
                    open_ids.discard(request.request_id)
        if step == aborted_after:
            break
        for answer in engine.step():
            assert isinstance(answer, tuple)
            request_id, completion = answer
            assert request_id in open_ids
            assert (request_id, completion.index) not in answers
            assert completion.finish_reason != "abort"
            answers[request_id, completion.index] = completion
        assert engine.running <= slots
        step += 1
    for request_id, completion in engine.abort_all():
        assert completion.finish_reason == "abort"
        answers[request_id, completion.index] = completion
    assert not engine.has_work
    for request in requests:
        if request.request_id in open_ids:
            for index in range(request.sampling.n):
                completion = answers[request.request_id, index]
                check(lm, request, completion, aborted=completion.finish_reason == "abort")
