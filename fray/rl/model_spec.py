"""Models that a run can train: of a name, of a directory, and a tiny Llama of random weights with its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attrs import field, frozen

from fray.errors import InvalidRequest
from fray.rl.train.checks import names_similar_arguments

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""Pattern of names at Hugging Face."""


def _checked_chars(spec: Any, attribute: Any, chars: str) -> None:
    twice = sorted({char for char in chars if chars.count(char) > 1})
    if not chars or twice:
        raise ValueError(f"chars={chars!r}: {f'{twice} occur more than once' if twice else 'it is empty'}; each once")


def _checked_eos(spec: Any, attribute: Any, eos: str) -> None:
    if len(eos) != 1 or eos not in spec.chars:
        raise ValueError(f"eos={eos!r} must be one of the characters of chars={spec.chars!r}")


def _positive(spec: Any, attribute: Any, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{attribute.name}={value!r}: {type(spec).__name__} needs an integer of at least 1")


@names_similar_arguments
@frozen
class TinyLlama:
    """Llama with random weights and a token for each character, for tests and first runs; nothing is downloaded.

    Equal ones have equal weights in every process.

    Args:
        layers: number of layers.
        width: of the hidden states; a multiple of ``heads``.
        chars: characters that texts have; the position of one is its token's id.
        heads: attention heads of each layer.
        mlp: width inside the feed-forward layers.
        seed: of the weights.
        max_length: tokens of a prompt and its response together.
        eos: character that ends a response.

    Raises:
        ValueError: a number is not positive, ``width`` no multiple of ``heads``, a character twice in ``chars``, or
            ``eos`` not one of them.
        TypeError: there is no argument of a name; the message has the nearest ones.
    """

    layers: int = field(default=2, validator=_positive)
    width: int = field(default=64, validator=_positive)
    chars: str = field(default="0123456789+=>$ ", validator=_checked_chars)
    heads: int = field(default=4, validator=_positive)
    mlp: int = field(default=256, validator=_positive)
    seed: int = 0
    max_length: int = field(default=256, validator=_positive)
    eos: str = field(default="$", validator=_checked_eos)

    def __attrs_post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} must be a multiple of 2 × heads = {2 * self.heads}")

    @property
    def tokenizer(self) -> CharTokenizer:
        return CharTokenizer(self.chars, self.eos)


ModelSpec: TypeAlias = str | TinyLlama
"""Name or directory of a Hugging Face model, or a `TinyLlama`."""


@frozen
class ModelLimits:
    """Limits of a model: tokens are 0 to ``vocabulary_size - 1``, and ``max_length`` are a prompt and its response."""

    vocabulary_size: int
    max_length: int


def check_model(model: object) -> None:
    """Check that a model is one of `ModelSpec`.

    A directory may be one that only the machines of a cluster have: absolute paths are looked for in `run_cluster`.

    Raises:
        InvalidRequest: it is something else.
    """
    if isinstance(model, TinyLlama):
        return
    if not isinstance(model, str):
        found = f"{model!r} ({type(model).__name__})"
        raise InvalidRequest(f"invalid model {found}: expected a name, a directory as text, or rl.TinyLlama()")
    is_name = _NAME.fullmatch(model) and not model.startswith(".")
    if not (is_name or Path(model).is_absolute() or Path(model).is_dir()) or not model:
        text = f"there is no such directory in {Path.cwd()}, and a name is such as 'Qwen/Qwen3-0.6B'"
        raise InvalidRequest(f"invalid model {model!r}: {text}")


def model_name(model: ModelSpec) -> str:
    """Return the name of a model for clients."""
    return model if isinstance(model, str) else type(model).__name__


@frozen
class CharTokenizer:
    """Tokenizer with one token for each character, whose id is the character's position in ``chars``.

    Raises:
        ValueError: a character is twice in ``chars``, or ``eos`` is not one of them.
    """

    chars: str = field(validator=_checked_chars)
    eos: str = field(validator=_checked_eos)

    @property
    def eos_id(self) -> int:
        return self.chars.index(self.eos)

    @property
    def pad_id(self) -> int:
        """Id that fills tensors where no token is; it is that of ``eos``, and masks say what counts."""
        return self.eos_id

    @property
    def vocabulary_size(self) -> int:
        return len(self.chars)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the characters; raises ValueError that names those without a token."""
        ids = [self.chars.find(char) for char in text]
        if -1 in ids:
            unknown = sorted({char for char in text if char not in self.chars})
            raise ValueError(f"no token for {unknown} in {text!r}; the tokenizer has the characters {self.chars!r}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the characters, ``eos`` included; raises ValueError that names an id outside the vocabulary."""
        ids = list(ids)
        for token in ids:
            if not 0 <= token < len(self.chars):
                raise ValueError(f"token {token} is outside the vocabulary of {len(self.chars)} characters")
        return "".join(self.chars[token] for token in ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of the messages' texts, one after the other: there are no characters to mark roles with.

        ``tools`` are ignored. Raises ValueError as `encode`.
        """
        return self.encode("".join(message.get("content") or "" for message in messages))
