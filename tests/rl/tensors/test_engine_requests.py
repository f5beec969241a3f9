"""Inference engine: updates in flight, streams, shared prompts, ends, what is refused, counters, random numbers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from engine_reference import full_logprobs, random_number  # noqa: E402

from fray.rl.core.versions import VersionName  # noqa: E402
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling, TokenEvent  # noqa: E402
from fray.rl.model_spec import CharTokenizer, TinyLlama  # noqa: E402
from fray.rl.tensors import flat_weights  # noqa: E402
from fray.rl.tensors.engine import Engine  # noqa: E402
from fray.rl.tensors.language_model import LanguageModel, load_model  # noqa: E402
from fray.rl.tensors.sampling import stream_key, uniform  # noqa: E402

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

V0, V1, V2 = (VersionName(0, number) for number in range(3))
PROMPT = (1, 2, 3)


def fresh(seed: int = 0) -> LanguageModel:
    """A model of its own, as tests change its weights."""
    lm = load_model(TinyLlama(width=16, mlp=16, heads=2, max_length=64, seed=seed))
    with torch.no_grad():
        for parameter in lm.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return lm


def drain(engine: Engine) -> list[Completion]:
    found = []
    while engine.has_work:
        found += [answer[1] for answer in engine.step() if isinstance(answer, tuple)]
    return sorted(found, key=lambda completion: completion.index)


def complete(engine: Engine, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> list[Completion]:
    engine.add(GenerateRequest("r", prompt, Sampling(**{"seed": 0, **sampling})))
    return drain(engine)


def test_an_update_in_flight_makes_segments_and_continues_with_the_keys_of_before() -> None:
    lm, other = fresh(0), fresh(1)
    table = flat_weights.table_of(other.model)
    weights = bytearray(table.total_bytes)
    flat_weights.write(other.model, weights, table)
    engine = Engine(lm, V0)
    engine.add(GenerateRequest("r", PROMPT, Sampling(max_tokens=7, temperature=0, ignore_eos=True)))
    for _ in range(3):
        assert engine.step() == []
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    engine.load(V1, table, bytes(weights))
    engine.load(V2, table, bytes(weights))
    (completion,) = drain(engine)
    assert completion.segments == [(V0, 3), (V2, 4)]
    assert engine.version == V2

    # The same with transformers' own cache.
    first = fresh(0)
    assert all(torch.equal(tensor, first.model.state_dict()[name]) for name, tensor in before.items())
    kept = transformers.DynamicCache(config=first.model.config)
    tokens, logprobs = list(PROMPT), []
    with torch.no_grad():
        for number in range(7):
            model = first.model if number < 3 else other.model
            new = tokens if number == 0 else tokens[-1:]
            logits = model(input_ids=torch.tensor([new]), past_key_values=kept, use_cache=True).logits[0, -1]
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
    assert completion.token_ids == tokens[3:]
    assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_requests_after_an_update_are_answered_by_the_new_weights_alone() -> None:
    lm, other = fresh(0), fresh(1)
    table = flat_weights.table_of(other.model)
    weights = bytearray(table.total_bytes)
    flat_weights.write(other.model, weights, table)
    engine = Engine(lm, V0)
    complete(engine, max_tokens=3)
    engine.load(V1, table, weights)
    (completion,) = complete(engine, max_tokens=6, ignore_eos=True)
    assert completion.segments == [(V1, 6)]
    rows = full_logprobs(other, [*PROMPT, *completion.token_ids], len(PROMPT))
    expected = [row[token] for row, token in zip(rows, completion.token_ids, strict=True)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_weights_of_another_model_are_refused_and_change_nothing() -> None:
    engine = Engine(fresh(), V0)
    other = load_model(TinyLlama(layers=1))
    table = flat_weights.table_of(other.model)
    before = complete(engine, max_tokens=5)
    with pytest.raises(ValueError, match="the weights are not those of this model"):
        engine.load(V1, table, bytearray(table.total_bytes))
    assert [each.token_ids for each in complete(engine, max_tokens=5)] == [each.token_ids for each in before]
    assert engine.version == V0


def test_completions_and_requests_of_one_prompt_compute_it_once() -> None:
    engine = Engine(fresh(), V0, slots=10)
    engine.add(GenerateRequest("a", PROMPT, Sampling(max_tokens=2, n=4, ignore_eos=True)))
    engine.add(GenerateRequest("b", PROMPT, Sampling(max_tokens=2, n=2, ignore_eos=True)))
    engine.add(GenerateRequest("c", (4,), Sampling(max_tokens=2, ignore_eos=True)))
    engine.step()
    assert (engine.running, engine.waiting) == (7, 0)
    assert engine.busy.prompt_tokens == len(PROMPT) + 1
    drain(engine)
    assert (engine.busy.tokens, engine.busy.steps) == (14, 2)


def test_more_completions_than_slots_wait_for_a_free_one() -> None:
    engine = Engine(fresh(), V0, slots=3)
    found = complete(engine, max_tokens=3, n=8, ignore_eos=True)
    assert [completion.index for completion in found] == list(range(8))
    at_once = complete(Engine(fresh(), V0, slots=8), max_tokens=3, n=8, ignore_eos=True)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in at_once]
    assert engine.busy.steps == 9


def test_the_tokens_of_a_seed_do_not_depend_on_the_slot_and_other_seeds_have_others() -> None:
    requests = [GenerateRequest(f"{n}", PROMPT, Sampling(max_tokens=12, seed=n, ignore_eos=True)) for n in range(6)]
    answers = []
    for order in (requests, requests[::-1]):
        engine = Engine(fresh(), V0)
        for request in order:
            engine.add(request)
        found = [answer for _ in range(12) for answer in engine.step() if isinstance(answer, tuple)]
        answers.append({request_id: tuple(completion.token_ids) for request_id, completion in found})
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) == 6


def test_the_seed_of_a_request_counts_where_its_sampling_has_none() -> None:
    def tokens(seed: int | None, of_sampling: int | None) -> list[int]:
        engine = Engine(fresh(), V0)
        engine.add(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, seed=of_sampling, ignore_eos=True), seed=seed))
        return drain(engine)[0].token_ids

    assert tokens(7, None) == tokens(None, 7) == tokens(8, 7)
    assert tokens(8, None) != tokens(7, None)


def test_requests_without_a_seed_have_different_random_numbers() -> None:
    first, second = (complete(Engine(fresh(), V0), seed=None, max_tokens=40, temperature=2)[0] for _ in range(2))
    assert first.token_ids != second.token_ids


def test_a_stream_reports_each_token_with_its_version_before_the_completion() -> None:
    engine = Engine(fresh(), V0)
    engine.add(GenerateRequest("quiet", PROMPT, Sampling(max_tokens=4, ignore_eos=True)))
    engine.add(GenerateRequest("s", PROMPT, Sampling(max_tokens=4, seed=1, n=2, ignore_eos=True)), stream=True)
    answers = [answer for _ in range(4) for answer in engine.step()]
    completions = [answer[1] for answer in answers if isinstance(answer, tuple) and answer[0] == "s"]
    events = [answer for answer in answers if isinstance(answer, TokenEvent)]
    for completion in completions:
        expected = [
            TokenEvent("s", completion.index, token, logprob, V0)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert [event for event in events if event.index == completion.index] == expected
    assert len(events) == 8
    assert not isinstance(answers[-1], TokenEvent)


def test_most_probable_tokens_and_logprobs_of_the_prompt_are_reported_where_asked_for() -> None:
    lm = fresh()
    engine = Engine(lm, V0)
    engine.add(GenerateRequest("plain", (5, 6), Sampling(max_tokens=5, seed=1, ignore_eos=True)))
    for name, prompt in (("a", PROMPT), ("b", (7,)), ("c", (1, 2, 3, 4))):
        sampling = Sampling(
            max_tokens=5, seed=1, n=2, logprobs=3, prompt_logprobs=True, top_prompt_logprobs=2, ignore_eos=True
        )
        engine.add(GenerateRequest(name, prompt, sampling))
    answers = [answer for _ in range(5) for answer in engine.step()]
    for name, prompt in (("a", PROMPT), ("b", (7,)), ("c", (1, 2, 3, 4))):
        found = [answer[1] for answer in answers if isinstance(answer, tuple) and answer[0] == name]
        assert len(found) == 2
        for completion in found:
            tokens = [*prompt, *completion.token_ids]
            rows = full_logprobs(lm, tokens)
            assert completion.prompt_logprobs[0] is None
            expected = [row[token] for row, token in zip(rows, prompt[1:], strict=False)]
            assert completion.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-5)
            assert [len(top) for top in completion.top_logprobs] == [3] * 5
            assert [len(top) for top in completion.top_prompt_logprobs] == [2] * (len(prompt) - 1)
            for top, row in zip([*completion.top_prompt_logprobs, *completion.top_logprobs], rows, strict=True):
                ordered = sorted(range(15), key=lambda token, row=row: -row[token])[: len(top)]
                assert [token for token, _ in top] == ordered
                assert [value for _, value in top] == pytest.approx([row[token] for token in ordered], abs=1e-5)
    (plain,) = (answer[1] for answer in answers if isinstance(answer, tuple) and answer[0] == "plain")
    assert (plain.top_logprobs, plain.prompt_logprobs, plain.top_prompt_logprobs) == ([], [], [])


def test_a_completion_says_what_stopped_it() -> None:
    lm = fresh()
    (free,) = complete(Engine(lm, V0), max_tokens=30, ignore_eos=True, seed=5, temperature=2)
    text = lm.tokenizer.decode(free.token_ids)
    stop = text[6:8]
    (by_text,) = complete(Engine(lm, V0), max_tokens=30, ignore_eos=True, seed=5, temperature=2, stop=("@", stop))
    assert (by_text.finish_reason, by_text.stopped_by) == ("stop", stop)
    assert lm.tokenizer.decode(by_text.token_ids) == text[: text.index(stop) + 2]
    token = free.token_ids[4]
    (by_token,) = complete(Engine(lm, V0), max_tokens=30, ignore_eos=True, seed=5, temperature=2, stop_token_ids=token)
    assert (by_token.finish_reason, by_token.stopped_by) == ("stop", token)
    assert by_token.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    (late,) = complete(
        Engine(lm, V0), max_tokens=30, ignore_eos=True, seed=5, temperature=2, stop_token_ids=token, min_tokens=20
    )
    assert token not in late.token_ids[:20]


class ByteTokenizer:
    """Each token is a byte of UTF-8, so that a character may need several."""

    eos_id = pad_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: Any, tools: Any = None) -> list[int]:
        raise NotImplementedError


def test_a_stop_string_may_have_characters_of_several_tokens() -> None:
    tokenizer = ByteTokenizer()
    wanted = tokenizer.encode("aé€b")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Without what layers add, the embedding of a token leads to the logits of the one that follows it.
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(256))
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise([1, *wanted]):
            model.lm_head.weight[following, token] = 1
    lm = LanguageModel(model, tokenizer, 64, frozenset({0}))
    for stop, expected in (("é", "aé"), ("é€", "aé€"), ("€", "aé€"), ("b", "aé€b")):
        (completion,) = complete(Engine(lm, V0), (1,), temperature=0, max_tokens=20, stop=(stop,))
        assert (tokenizer.decode(completion.token_ids), completion.stopped_by) == (expected, stop)


def test_a_long_completion_beside_short_ones_widens_the_cache_for_all() -> None:
    lm = load_model(TinyLlama(width=16, mlp=16, heads=2, max_length=300))
    engine = Engine(lm, V0, slots=3)
    engine.add(GenerateRequest("long", PROMPT, Sampling(max_tokens=290, seed=1, ignore_eos=True)))
    for number in range(8):
        engine.add(GenerateRequest(f"{number}", PROMPT, Sampling(max_tokens=20, seed=number, ignore_eos=True)))
    while engine.has_work:
        for answer in engine.step():
            assert isinstance(answer, tuple)
            rows = full_logprobs(lm, [*PROMPT, *answer[1].token_ids], len(PROMPT))
            expected = [row[token] for row, token in zip(rows, answer[1].token_ids, strict=True)]
            assert answer[1].logprobs == pytest.approx(expected, abs=1e-5)


# Ends without an answer, and what is refused --------------------------------------------------------------------------


def test_abort_returns_what_there_is_of_each_completion() -> None:
    engine = Engine(fresh(), V0, slots=2)
    engine.add(GenerateRequest("a", PROMPT, Sampling(max_tokens=9, seed=4, ignore_eos=True)))
    engine.add(GenerateRequest("b", PROMPT, Sampling(max_tokens=9, n=2, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    aborted = engine.abort_all()
    assert [(name, each.index, len(each.token_ids), each.segments) for name, each in aborted] == [
        ("a", 0, 3, [(V0, 3)]),
        ("b", 0, 3, [(V0, 3)]),
        ("b", 1, 0, []),
    ]
    assert {each.finish_reason for _, each in aborted} == {"abort"}
    assert not engine.has_work
    assert engine.step() == engine.abort_all() == []
    (again,) = complete(engine, max_tokens=9, seed=4, ignore_eos=True)
    assert again.token_ids[:3] == aborted[0][1].token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((1, 15), {}, "request 'r': token 15 in its prompt is outside the vocabulary of 15 tokens"),
        ((-1, 3), {}, "request 'r': token -1 in its prompt is outside the vocabulary of 15 tokens"),
        ((1,), {"stop_token_ids": (99,)}, "request 'r': token 99 in its stop_token_ids is outside the vocabulary"),
        (
            (1,) * 64,
            {},
            "request 'r': the prompt has 64 tokens; at most 63 leave room for a response in the context of 64",
        ),
        (
            (1,) * 60,
            {"max_tokens": 5},
            "60 tokens of prompt and max_tokens=5 are more than the context of 64; max_tokens may be 4 here",
        ),
        ((1,), {"logprobs": 16}, "request 'r': logprobs=16, but the vocabulary has 15 tokens"),
        (
            (1,),
            {"stop_token_ids": tuple(range(15)), "min_tokens": 1},
            "request 'r': min_tokens=1, but every token ends the completion",
        ),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(prompt: tuple, options: dict, message: str) -> None:
    engine = Engine(fresh(), V0)
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.add(GenerateRequest("r", prompt, Sampling(**options)))
    assert not engine.has_work


def test_the_last_place_of_the_context_can_be_used() -> None:
    (completion,) = complete(Engine(fresh(), V0), (1,) * 60, max_tokens=4, ignore_eos=True)
    assert len(completion.token_ids) == 4


def test_an_id_can_be_used_again_only_when_its_request_has_ended() -> None:
    engine = Engine(fresh(), V0, slots=1)
    engine.add(GenerateRequest("r", PROMPT, Sampling(max_tokens=1, n=2)))
    engine.step()
    with pytest.raises(ValueError, match="request 'r' is open already; each needs an id of its own"):
        engine.add(GenerateRequest("r", PROMPT))
    engine.step()
    engine.add(GenerateRequest("r", PROMPT, Sampling(max_tokens=1)))
    assert engine.cancel("r")
    assert not engine.cancel("r")
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots=0: expected at least 1"),
        ({"max_length": 65}, "max_length=65: expected 2 to 64, the context of the model"),
    ],
)
def test_an_engine_of_impossible_size_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(fresh(), V0, **options)


def test_models_with_other_state_than_keys_and_values_are_refused() -> None:
    tokenizer = CharTokenizer("ab$", "$")
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=3, hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(
        ValueError, match="MambaForCausalLM cannot be run by the engine: its forward pass does not take"
    ):
        Engine(LanguageModel(mamba, tokenizer, 64, frozenset({2})), V0)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=3, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match="BloomForCausalLM cannot be run by the engine: its forward pass does not take"
    ):
        Engine(LanguageModel(bloom, tokenizer, 64, frozenset({2})), V0)


# Counters and random numbers ------------------------------------------------------------------------------------------


def test_counters_measure_by_the_clock_that_they_are_given() -> None:
    engine = Engine(fresh(), V0, clock=itertools.count().__next__)
    complete(engine, max_tokens=3, ignore_eos=True)
    # Each step reads the clock at its two ends, and at those of its forward pass.
    assert (engine.busy.steps, engine.busy.forward_s, engine.busy.step_s) == (3, 3, 9)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**20))
def test_random_numbers_are_those_of_splitmix64(seed: int, index: int, count: int) -> None:
    (number,) = uniform(np.array([stream_key(seed, index)], np.uint64), np.array([count])).tolist()
    assert number == random_number(seed, index, count)
    assert 0 <= number < 1


def test_random_numbers_are_spread_evenly_over_seeds_completions_and_tokens() -> None:
    keys = np.array([stream_key(seed, index) for seed in range(20) for index in range(20)], np.uint64)
    numbers = np.stack([uniform(keys, np.full(len(keys), count)) for count in range(20)])
    for axis_mean in (numbers.mean(0), numbers.mean(1)):
        assert abs(axis_mean - 0.5).max() < 0.29
    counts = np.bincount((numbers.ravel() * 16).astype(int), minlength=16)
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert torch.special.gammaincc(torch.tensor(7.5), torch.tensor(statistic / 2)) > 0.001
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.04
