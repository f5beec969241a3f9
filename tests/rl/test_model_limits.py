"""Vocabulary and context of a model, read without torch from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fray.rl.model_spec import ModelLimits, TinyLlama
from fray.rl.tokenizers import load_limits


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"vocab_size": 100, "max_position_embeddings": 32}, ModelLimits(100, 32)),
        ({"vocab_size": 100, "n_positions": 32}, ModelLimits(100, 32)),
        ({"text_config": {"vocab_size": 100, "max_position_embeddings": 32}}, ModelLimits(100, 32)),
        ({"vocab_size": 100}, None),
    ],
)
def test_limits_are_those_of_the_configuration(
    config: dict[str, Any], limits: ModelLimits | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_limits(str(tmp_path)) == limits


def test_a_tiny_llama_knows_its_limits_and_a_name_that_is_not_in_the_cache_none(tmp_path: Path) -> None:
    assert load_limits(TinyLlama(chars="01$", max_length=32)) == ModelLimits(3, 32)
    assert load_limits("some/no-such-model", downloads=False) is None
    assert load_limits(str(tmp_path)) is None
    assert load_limits(str(tmp_path / "no such directory"), downloads=False) is None
