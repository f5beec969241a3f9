"""Language models with their tokenizers: from Hugging Face, or a tiny Llama of random weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from attrs import frozen

from fray.rl.model_spec import CharTokenizer, ModelSpec, TinyLlama
from fray.rl.tokenizers import Tokenizer, save_char_tokenizer, saved_char_tokenizer

# Held while a model is made: threads share torch's generator and default dtype, and the actors of a local cluster load
# their models in several threads.
_LOADING = threading.Lock()


class PaddingTokenizer(Tokenizer, Protocol):
    """`Tokenizer` with a token for the places of tensors where no token is."""

    @property
    def pad_id(self) -> int: ...


@frozen(eq=False)
class HuggingFaceTokenizer:
    """`PaddingTokenizer` of a model's directory; special tokens are left out of texts."""

    inner: Any
    name: str

    @property
    def eos_id(self) -> int:
        if self.inner.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {self.name} has no end token: set eos_token in its tokenizer_config.json"
            )
        return int(self.inner.eos_token_id)

    @property
    def pad_id(self) -> int:
        return self.eos_id if self.inner.pad_token_id is None else int(self.inner.pad_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation; raises ValueError if the model has no chat template."""
        if not self.inner.chat_template:
            raise ValueError(
                f"the tokenizer of {self.name} has no chat template: use completion(prompt) instead of chat"
            )
        text = self.inner.apply_chat_template(
            [dict(message) for message in messages], tools=tools, tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)


@frozen(eq=False)
class LanguageModel:
    """Causal language model of Hugging Face with its tokenizer.

    Attributes:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        max_length: tokens of a prompt and its response together.
        end_ids: tokens that end a response.
        name: name or directory of the model; empty for a `TinyLlama`.
    """

    model: Any
    tokenizer: PaddingTokenizer
    max_length: int
    end_ids: frozenset[int]
    name: str = ""

    @property
    def vocabulary_size(self) -> int:
        """Number of the model's logits; a tokenizer may have fewer tokens."""
        return int(self.model.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return torch.device(next(iter(self.model.parameters())).device)

    def save(self, directory: str | Path) -> None:
        """Write the model and its tokenizer into a directory that `load_model` and ``from_pretrained`` read."""
        self.model.save_pretrained(directory)
        self.save_tokenizer(directory)

    def save_tokenizer(self, directory: str | Path) -> None:
        """Write the tokenizer alone."""
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            self.tokenizer.inner.save_pretrained(directory)
        elif isinstance(self.tokenizer, CharTokenizer):
            save_char_tokenizer(self.tokenizer, directory)


def load_model(spec: ModelSpec, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
    """Return the model of a specification, in evaluation mode.

    Args:
        spec: name or directory of a Hugging Face model, or a `TinyLlama`.
        dtype: of the weights: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: as torch has it: ``cpu``, ``cuda``, ``cuda:1``.

    Raises:
        ValueError: unknown dtype, the device is not there, or the tokenizer has no end token.
        OSError: there is no such model; the message is that of transformers.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype not in dtypes:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(dtypes)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ValueError(
            f"device={device!r}: torch {torch.__version__} finds no GPU in this process (CUDA_VISIBLE_DEVICES is "
            f"{visible!r}); expected resources that reserve one, a build of torch with CUDA, or device='cpu'"
        )
    tokenizer: PaddingTokenizer
    if isinstance(spec, TinyLlama):
        with _LOADING:
            model, tokenizer = _tiny_llama(spec), spec.tokenizer
    else:
        model = pretrained(spec, torch.float32)
        tokenizer = saved_char_tokenizer(spec) or HuggingFaceTokenizer(
            transformers.AutoTokenizer.from_pretrained(spec), str(spec)
        )
    model = model.to(device=device, dtype=dtypes[dtype]).eval()
    length, name = int(model.config.max_position_embeddings), "" if isinstance(spec, TinyLlama) else str(spec)
    return LanguageModel(model, tokenizer, length, _end_ids(model, tokenizer), name)


def pretrained(place: str | Path, dtype: torch.dtype) -> Any:
    """Return the causal language model of a name or directory. Raises OSError, as transformers has it."""
    with _LOADING:
        return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype)


def pretrained_backbone(place: str | Path, dtype: torch.dtype) -> Any:
    """Return a model without the layer that makes logits. Raises OSError, as transformers has it."""
    with _LOADING:
        return transformers.AutoModel.from_pretrained(place, dtype=dtype)


def usable_device(wanted: str) -> str:
    """Return the device that is wanted, or ``cpu`` where there is no GPU."""
    return wanted if torch.cuda.is_available() else "cpu"


def set_threads(count: int) -> None:
    """Let torch compute with so many threads in this process. Raises RuntimeError if it is not positive."""
    torch.set_num_threads(count)


def hide_progress() -> None:
    """Let transformers show no progress bars in this process: several processes share a terminal."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]


def _tiny_llama(spec: TinyLlama) -> Any:
    tokenizer = spec.tokenizer
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=spec.width,
        intermediate_size=spec.mlp,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=None,  # an embedding of padding would be kept at zero, and this token means more than padding
    )
    # The weights are drawn from torch's global generator, which is as before afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return transformers.LlamaForCausalLM(config)


def _end_ids(model: Any, tokenizer: PaddingTokenizer) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's, and those of the model's configuration."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return frozenset((tokenizer.eos_id, *more))
