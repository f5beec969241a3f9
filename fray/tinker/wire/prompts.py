"""Prompts of a batch: their tokens, and what a reward function gets with their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from fray.tinker.wire.dataproto import DataProto, DataProtoError, encode_value


class PromptTokenizer(Protocol):
    """Part of a tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@frozen
class PromptRow:
    """A prompt, and what its reward depends on; JSON values.

    Attributes:
        tokens: of the prompt.
        data_source: for the reward function, as are the next two.
        ground_truth: likewise.
        extra_info: likewise.
        messages: of which the tokens are; empty: they are not of a conversation.
        task: what an environment gets when it is reset.
    """

    tokens: tuple[int, ...]
    data_source: Any = ""
    ground_truth: Any = None
    extra_info: Any = None
    messages: tuple[dict[str, Any], ...] = ()
    task: dict[str, Any] = field(factory=dict)


def rows_of(data: DataProto, tokenizer: PromptTokenizer, place: str = "batch_data") -> list[PromptRow]:
    """Return the prompts of a batch.

    The tokens are those of ``raw_prompt_ids``, else of ``input_ids`` where ``attention_mask`` is 1, else those of
    ``raw_prompt`` (messages, or a text).

    Raises:
        DataProtoError: there are none, or one is empty; the message has its place.
    """
    prompts = _tokens_of(data, tokenizer, place)
    if not prompts:
        raise DataProtoError(f"{place}: no rows; a batch has at least one prompt")
    for at, tokens in enumerate(prompts):
        if not tokens:
            raise DataProtoError(f"{place}: prompt {at} has no tokens")
    sources, models, extras = (
        _column(data, name, len(prompts)) for name in ("data_source", "reward_model", "extra_info")
    )
    truths = _column(data, "ground_truth", len(prompts))
    messages = _column(data, _prompt_column(data) or "raw_prompt", len(prompts))
    tasks = _tasks_of(data, extras, place)
    return [
        PromptRow(
            tuple(tokens),
            "" if sources[at] is None else sources[at],
            models[at].get("ground_truth") if isinstance(models[at], dict) else truths[at],
            extras[at],
            tuple(messages[at]) if isinstance(messages[at], list) else (),
            tasks[at],
        )
        for at, tokens in enumerate(prompts)
    ]


def _tokens_of(data: DataProto, tokenizer: PromptTokenizer, place: str) -> list[list[int]]:
    columns = data.non_tensor_batch
    if "raw_prompt_ids" in columns:
        return [_token_list(row, f"{place}.non_tensor_batch['raw_prompt_ids']") for row in columns["raw_prompt_ids"]]
    if "input_ids" in data.batch:
        return _unpadded(data, place)
    name = _prompt_column(data)
    if name is None:
        raise DataProtoError(
            f"{place}: no prompts; expected batch['input_ids'] with batch['attention_mask'], or raw_prompt_ids or "
            f"raw_prompt in non_tensor_batch; it has {sorted([*data.batch, *columns])}"
        )
    found = []
    for at, row in enumerate(columns[name]):
        try:
            value = encode_value(row)
            found.append(tokenizer.encode(value) if isinstance(value, str) else tokenizer.apply_chat_template(value))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DataProtoError(f"{place}.non_tensor_batch[{name!r}][{at}]: {error}") from None
    return found


def _prompt_column(data: DataProto) -> str | None:
    """Return the name of the column with texts or messages, if there is one."""
    return next((each for each in ("raw_prompt", "raw_prompts") if each in data.non_tensor_batch), None)


def _tasks_of(data: DataProto, extras: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Return what the environment of each row gets: ``interaction_kwargs``, of its own or in ``extra_info``."""
    name = next((each for each in ("interaction_kwargs", "env_kwargs") if each in data.non_tensor_batch), None)
    if name is None:
        found = [extra.get("interaction_kwargs") if isinstance(extra, dict) else None for extra in extras]
    else:
        found = _column(data, name, len(extras))
    for at, task in enumerate(found):
        if task is not None and not isinstance(task, dict):
            where = f"{place}.non_tensor_batch[{name or 'extra_info'!r}][{at}]"
            raise DataProtoError(f"{where}: expected an object with the arguments of reset, not {task!r:.100}")
    return [task or {} for task in found]


def _unpadded(data: DataProto, place: str) -> list[list[int]]:
    ids = data.batch["input_ids"].array
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise DataProtoError(f"{place}.batch['input_ids']: expected integers of shape [rows, tokens], not {ids.shape}")
    record = data.batch.get("attention_mask")
    if record is None:
        raise DataProtoError(f"{place}.batch: 'attention_mask' is missing, which says what of input_ids is padding")
    if record.array.shape != ids.shape:
        raise DataProtoError(f"{place}.batch['attention_mask']: shape {record.array.shape}, but input_ids {ids.shape}")
    return [row[mask != 0].tolist() for row, mask in zip(ids, record.array, strict=True)]


def _token_list(row: Any, place: str) -> list[int]:
    value = row.tolist() if isinstance(row, np.ndarray) else row.array.tolist() if hasattr(row, "array") else row
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise DataProtoError(f"{place}: expected lists of tokens, not {value!r:.100}")
    return value


def _column(data: DataProto, name: str, rows: int) -> list[Any]:
    if name not in data.non_tensor_batch:
        return [None] * rows
    return [encode_value(value) for value in data.non_tensor_batch[name]]
