"""Tokenizers: of characters, or of a Hugging Face model by `tokenizers`, for rollout processes, which load no torch.

The one module of `fray.rl` that imports tokenizers, huggingface_hub and jinja2, each when a model needs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fray.errors import InvalidRequest
from fray.rl.model_spec import CharTokenizer, ModelSpec, TinyLlama

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAR_FILE = "fray_char_tokenizer.json"
"""File of a saved model's directory that says which characters its tokens are."""


class Tokenizer(Protocol):
    """Texts to tokens and back."""

    @property
    def eos_id(self) -> int:
        """Token that ends a text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without any before or after it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next message begins."""


def save_char_tokenizer(tokenizer: CharTokenizer, directory: str | Path) -> None:
    """Write a tokenizer of characters into the directory of its model."""
    of_chars = {"chars": tokenizer.chars, "eos": tokenizer.eos}
    Path(directory, CHAR_FILE).write_text(json.dumps(of_chars))


def saved_char_tokenizer(directory: str | Path) -> CharTokenizer | None:
    """Return the tokenizer that `save_char_tokenizer` wrote; None if the model has another."""
    path = Path(directory, CHAR_FILE)
    return CharTokenizer(**json.loads(path.read_text())) if path.is_file() else None


def load_tokenizer(model: ModelSpec) -> Tokenizer:
    """Return the tokenizer of a model.

    Args:
        model: as for `fray.rl.Run`; the files of a name are downloaded, unless they are in the cache.

    Raises:
        InvalidRequest: a package is missing, or the model has no ``tokenizer.json``.
    """
    if isinstance(model, TinyLlama):
        return model.tokenizer
    return saved_char_tokenizer(model) or FileTokenizer(_files_of(model))


class FileTokenizer:
    """`Tokenizer` of ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        files: by the names of `FILES`; those that the model lacks are left out.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        from tokenizers import Tokenizer as HubTokenizer

        self._tokenizer = HubTokenizer.from_file(str(files["tokenizer.json"]))
        config_file = files.get("tokenizer_config.json")
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file else {}
        template_file = files.get("chat_template.jinja")
        self._template = template_file.read_text(encoding="utf-8") if template_file else config.get("chat_template")
        eos = config.get("eos_token") or ""
        self._eos = eos if isinstance(eos, str) else eos.get("content", "")
        bos = config.get("bos_token") or ""
        self._bos = bos if isinstance(bos, str) else bos.get("content", "")

    @property
    def eos_id(self) -> int:
        found = self._tokenizer.token_to_id(self._eos)
        return -1 if found is None else int(found)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation, up to where the model replies. Raises InvalidRequest without a template."""
        if not isinstance(self._template, str):
            raise InvalidRequest("the tokenizer of this model has no chat template: use llm.completion")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        text = environment.from_string(self._template).render(
            messages=messages, tools=tools, add_generation_prompt=True, eos_token=self._eos, bos_token=self._bos
        )
        return self.encode(text)


def _refuse(message: str) -> None:
    raise InvalidRequest(f"the chat template refuses the messages: {message}")


def _files_of(model: str) -> dict[str, Path]:
    directory = Path(model)
    if directory.is_dir():
        found = {name: directory / name for name in FILES if (directory / name).is_file()}
    else:
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError
        except ImportError:
            raise InvalidRequest(f"model {model!r} needs huggingface_hub: pip install 'fray[rl]'") from None
        found = {}
        for name in FILES:
            try:
                found[name] = Path(hf_hub_download(model, name))
            except EntryNotFoundError:
                continue
    if "tokenizer.json" not in found:
        raise InvalidRequest(f"model {model!r} has no tokenizer.json")
    return found
