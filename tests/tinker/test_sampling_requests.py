"""Requests for samples and names: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from fray.tinker.core.adapter_operations import LoadWeights, SaveWeights
from fray.tinker.core.sampling_requests import SampleRequest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": []}, "prompt is empty: expected at least one token"),
        ({"prompt": [1, -2]}, "prompt: -2 at position 1; expected ids of tokens"),
        ({"num_samples": 0}, "num_samples=0: expected an integer from 1 to 1024"),
        ({"max_tokens": 0}, "max_tokens=0: expected an integer of at least 1"),
        ({"top_k": -2}, "top_k=-2: expected an integer of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan: expected a number of at least 0"),
        ({"stop": ["a", 3]}, "stop has texts and ids of tokens: expected either texts or ids"),
        ({"stop": [""]}, "expected strings that are not empty"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs=101: expected an integer from 0 to 100"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        SampleRequest(**{"prompt": [1], **values})


def test_stops_replace_the_end_tokens_of_the_model() -> None:
    assert not SampleRequest(prompt=[1]).sampling(4).ignore_eos
    assert SampleRequest(prompt=[1], stop=[]).sampling(4).ignore_eos
    assert SampleRequest(prompt=[1], stop="ab").sampling(4).stop == ("ab",)
    assert SampleRequest(prompt=[1], stop=[3, 4]).sampling(4).stop_token_ids == (3, 4)
    assert SampleRequest(prompt=[1], top_k=-1).sampling(4).top_k == 0


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a" * 129, 3])
def test_a_name_that_is_no_directory_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="expected 1 to 128 letters"):
        SaveWeights(name)


@pytest.mark.parametrize("path", ["a", "a/weights", "a/weights/../b", "a/other/b", "/a/weights/b", "../weights/b"])
def test_a_path_outside_the_saved_weights_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected MODEL/weights/NAME or MODEL/sampler_weights/NAME"):
        LoadWeights(path)
