"""Vocabulary and context of a model, read without torch from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fray.errors import InvalidRequest
from fray.rl.model_spec import ModelLimits, TinyLlama
from fray.rl.tokenizers import load_limits, load_tokenizer


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


def test_a_model_without_its_tokenizer_is_refused_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, message in (
        (str(tmp_path), "has no tokenizer.json$"),
        (str(tmp_path / "none"), "there is no such directory on this machine"),
        ("some/no-such-model", "or it cannot be downloaded, and is not in the cache of Hugging Face"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            load_tokenizer(model)
