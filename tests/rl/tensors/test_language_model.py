"""Language models: equal weights of equal specifications, models of directories with their tokenizers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

import tokenizers  # noqa: E402
import transformers  # noqa: E402

from fray.rl.model_spec import TinyLlama  # noqa: E402
from fray.rl.tensors.language_model import HuggingFaceTokenizer, load_model  # noqa: E402
from fray.rl.tokenizers import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def parameters(model: object) -> list:
    return list(model.parameters())  # type: ignore[attr-defined]


def equal(first: object, second: object) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))


def test_a_tiny_llama_has_the_weights_of_its_seed_and_leaves_other_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (load_model(TinyLlama(seed=seed)).model for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), before)
    assert equal(first, second)
    assert not equal(first, other)
    assert sum(parameter.numel() for parameter in parameters(first)) == 133_312


def test_models_that_load_at_once_have_the_weights_of_their_seeds() -> None:
    def weights(seed: int) -> float:
        model = load_model(TinyLlama(layers=1, width=16, heads=2, mlp=32, seed=seed)).model
        return float(sum(each.detach().double().abs().sum() for each in model.parameters()))

    expected = [weights(0), weights(1)]
    with ThreadPoolExecutor(2) as threads:
        assert [list(threads.map(weights, (0, 1))) for _ in range(20)] == [expected] * 20


def test_a_tiny_llama_that_was_saved_is_loaded_from_its_directory(tmp_path: Path) -> None:
    made = load_model(TinyLlama(max_length=40, eos=">"))
    made.save(tmp_path)
    loaded = load_model(str(tmp_path))
    assert equal(made.model, loaded.model)
    assert equal(made.model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.tokenizer == made.tokenizer
    assert (loaded.max_length, loaded.vocabulary_size, loaded.end_ids) == (40, 15, {12})


def test_a_directory_of_hugging_face_has_its_tokenizer_template_and_all_end_tokens(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["<unk>", "<end>", "<turn>", "user", "assistant", "hi", "ho"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)
    config = transformers.Qwen3Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_id=[1, 2],
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)

    loaded = load_model(str(tmp_path), dtype="bfloat16")
    assert parameters(loaded.model)[0].dtype == torch.bfloat16
    assert (loaded.end_ids, loaded.max_length, loaded.vocabulary_size) == ({1, 2}, 64, 8)
    assert loaded.tokenizer.encode("hi ho") == [5, 6]
    assert loaded.tokenizer.decode([5, 6, 1]) == "hi ho"
    assert (loaded.tokenizer.eos_id, loaded.tokenizer.pad_id) == (1, 1)
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == [3, 5, 4]


def test_a_tokenizer_without_transformers_is_that_of_the_model(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["<unk>", "<end>", "<start>", "user", "assistant", "hi", "ho"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing("<start> $A", special_tokens=[("<start>", 2)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<start>", eos_token="<end>", chat_template=TEMPLATE
    )
    fast.save_pretrained(tmp_path)
    with_transformers = HuggingFaceTokenizer(transformers.AutoTokenizer.from_pretrained(tmp_path), "it")
    without = load_tokenizer(str(tmp_path))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for each in (with_transformers, without):
        assert each.eos_id == 1
        assert each.encode("hi ho") == [5, 6]
        assert each.decode([5, 6, 1]) == "hi ho"
        assert each.apply_chat_template(talk) == [3, 5, 4, 6, 4]


def test_a_tokenizer_of_characters_is_found_in_the_directory_of_its_model(tmp_path: Path) -> None:
    made = load_model(TinyLlama(eos=">"))
    made.save(tmp_path)
    assert load_tokenizer(str(tmp_path)) == made.tokenizer


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='int8': expected one of float32, bfloat16, float16, float64"):
        load_model(TinyLlama(), dtype="int8")
