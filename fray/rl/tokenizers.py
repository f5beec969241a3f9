"""Tokenizers: of characters, or of a Hugging Face model by `tokenizers`, for rollout processes, which load no torch.

And limits of models, which are in their ``config.json``.

The one module of `fray.rl` that imports tokenizers, huggingface_hub and jinja2, each when a model needs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fray.errors import InvalidRequest
from fray.rl.model_spec import CharTokenizer, ModelLimits, ModelSpec, TinyLlama

CONFIG_FILE = "config.json"
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
    """Write a tokenizer of characters into the directory of its model, also for ``transformers``."""
    of_chars = {"chars": tokenizer.chars, "eos": tokenizer.eos}
    Path(directory, CHAR_FILE).write_text(json.dumps(of_chars))
    # A character without a token is an error there, too: there is none for unknown ones.
    ids = {char: number for number, char in enumerate(tokenizer.chars)}
    pieces = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    words = {"type": "WordLevel", "vocab": ids, "unk_token": ""}
    hub = {"version": "1.0", "added_tokens": [], "pre_tokenizer": pieces, "decoder": {"type": "Fuse"}, "model": words}
    Path(directory, FILES[0]).write_text(json.dumps(hub))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos, "pad_token": tokenizer.eos}
    Path(directory, FILES[1]).write_text(json.dumps({**config, "clean_up_tokenization_spaces": False}))


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


def load_limits(model: ModelSpec, *, downloads: bool = True) -> ModelLimits | None:
    """Return the limits of a model; None if its ``config.json`` does not say them.

    Args:
        model: as for `load_tokenizer`.
        downloads: whether the file of a name is downloaded. False: None, unless it is in the cache.

    Raises:
        InvalidRequest: huggingface_hub is missing.
    """
    if isinstance(model, TinyLlama):
        return ModelLimits(model.tokenizer.vocabulary_size, model.max_length)
    path = Path(model, CONFIG_FILE) if Path(model).is_dir() else _hub_file(model, CONFIG_FILE, downloads)
    if path is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    # As transformers reads them: some models have those of GPT-2, or of their text, under names of their own.
    text = {**config, **(config.get("text_config") or {})}
    size, length = text.get("vocab_size"), text.get("max_position_embeddings", text.get("n_positions"))
    return ModelLimits(size, length) if isinstance(size, int) and isinstance(length, int) else None


def check_lengths(
    model: ModelSpec, max_length: int | None, max_prompt_length: int | None, validation_sampling: Mapping[str, Any]
) -> None:
    """Check settings of a run against the context of its model, where that is known without a download.

    Args:
        model, max_length, max_prompt_length, validation_sampling: as for `fray.rl.Run`.

    Raises:
        InvalidRequest: one of them is too long, or leaves no room for a response.
    """
    limits = load_limits(model, downloads=False)
    most = None if limits is None else limits.max_length
    if max_length is not None:
        if max_length < 2 or (most is not None and max_length > most):
            text = "expected 2 or more" if most is None else f"expected 2 to {most}, the context of the model"
            raise InvalidRequest(f"invalid max_length {max_length!r}: {text}, or None")
        most = max_length
    if max_prompt_length is not None and not 1 <= max_prompt_length < (most or max_prompt_length + 1):
        text = "expected 1 or more" if most is None else f"expected 1 to {most - 1}, which leave room for a response"
        raise InvalidRequest(f"invalid max_prompt_length {max_prompt_length!r}: {text}, or None")
    asked = validation_sampling.get("max_tokens")
    if most is not None and isinstance(asked, int) and asked >= most:
        text = f"expected less than {most}, which are a prompt and its response"
        raise InvalidRequest(f"invalid validation_sampling: found max_tokens {asked}; {text}")


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
    elif directory.is_absolute():
        raise InvalidRequest(f"model {model!r}: there is no such directory on this machine")
    else:
        paths = {name: _hub_file(model, name) for name in FILES}
        found = {name: path for name, path in paths.items() if path is not None}
    if "tokenizer.json" not in found:
        unless = "" if directory.is_dir() else ", or it cannot be downloaded, and is not in the cache of Hugging Face"
        raise InvalidRequest(f"model {model!r} has no tokenizer.json{unless}")
    return found


def _hub_file(model: str, name: str, downloads: bool = True) -> Path | None:
    """Return a file of a model by its name; None if there is none, or it is not in the cache and nothing downloads."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    except ImportError:
        if not downloads:
            return None
        raise InvalidRequest(f"model {model!r} needs huggingface_hub: pip install 'fray[rl]'") from None
    try:
        found = hf_hub_download(model, name) if downloads else try_to_load_from_cache(model, name)
    except EntryNotFoundError:
        return None
    except HFValidationError:  # not a name: what loads the model says so
        if downloads:
            raise
        return None
    return Path(found) if isinstance(found, str) else None
