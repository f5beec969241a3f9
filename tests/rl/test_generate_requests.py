"""Requests to inference servers: what is refused, and why."""

from __future__ import annotations

import math
import re

import pytest

from fray.rl.inference.requests import GenerateRequest, Sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected an integer of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: expected an integer of at least 1"),
        ({"temperature": -1}, "temperature=-1: expected a number of at least 0"),
        ({"temperature": math.nan}, "temperature=nan: expected a number of at least 0"),
        ({"top_p": 0}, "top_p=0: expected a number above 0, at most 1"),
        ({"top_p": 1.1}, "top_p=1.1: expected a number above 0, at most 1"),
        ({"top_k": -1}, "top_k=-1: expected an integer of at least 0"),
        ({"seed": -3}, "seed=-3: expected an integer from 0 to below 2**64, or None"),
        ({"seed": True}, "seed=True: expected an integer from 0 to below 2**64, or None"),
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
        ({"stop": ("a", "")}, "stop=('a', ''): expected strings that are not empty"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1: expected ids of tokens"),
        ({"n": 0}, "n=0: expected an integer of at least 1"),
        ({"logprobs": -1}, "logprobs=-1: expected an integer of at least 0"),
    ],
)
def test_sampling_that_cannot_be_done_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**options)


def test_one_stop_string_or_token_may_be_given_alone() -> None:
    sampling = Sampling(stop="ab", stop_token_ids=3)
    assert (sampling.stop, sampling.stop_token_ids) == (("ab",), (3,))


def test_a_request_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="request 'r1': the prompt is empty; expected at least one token"):
        GenerateRequest("r1", ())
    assert GenerateRequest("r1", [1, 2]).prompt_ids == (1, 2)
