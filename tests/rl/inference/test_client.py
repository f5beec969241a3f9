"""The model of an episode: replies, three turns without tokenising twice, parameters that are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fray.rl.core.versions import VersionName
from fray.rl.inference.client import LLM, sampling_of
from fray.rl.inference.requests import Completion, GenerateRequest
from tests.support.counting_engine import TOKENIZER, answer_of


class Bench:
    """A model whose requests are answered at once by a `CountingEngine`."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.llm = LLM(self.send, TOKENIZER)

    async def send(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        return await answer_of(request)


async def test_a_reply_has_text_tokens_logprobs_and_versions() -> None:
    bench = Bench()
    reply = await bench.llm.completion("12")
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("3456", [3, 4, 5, 6, TOKENIZER.eos_id], "stop")
    assert (reply.prompt_ids, reply.segments) == ((1, 2), [(VersionName(0, 0), 5)])
    assert bench.llm.replies == [reply]


async def test_the_text_ends_before_a_stop_string_and_replies_of_n_are_a_list() -> None:
    bench = Bench()
    assert (await bench.llm.completion("12", stop="5")).text == "34"
    assert [each.text for each in await bench.llm.completion([1, 2], n=2, max_tokens=2)] == ["34", "45"]


async def test_three_turns_keep_the_tokens_of_the_earlier_ones() -> None:
    bench = Bench()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "12="}]
    replies = []
    for question in ("+7=", "+8=", ""):
        reply = await bench.llm.chat(messages)
        replies.append(reply)
        messages += [reply.message, {"role": "user", "content": question}]
    for earlier, later in itertools.pairwise(replies):
        own = (*earlier.prompt_ids, *earlier.token_ids)
        assert later.prompt_ids[: len(own)] == own
        assert later.prompt_ids[len(own) :] in (tuple(TOKENIZER.encode("+7=")), tuple(TOKENIZER.encode("+8=")))


async def test_a_conversation_that_was_changed_is_tokenised_as_a_whole() -> None:
    bench = Bench()
    reply = await bench.llm.chat([{"role": "user", "content": "12="}])
    other = [{"role": "user", "content": "13="}, reply.message, {"role": "user", "content": "1"}]
    changed = await bench.llm.chat(other)
    assert changed.prompt_ids == tuple(TOKENIZER.encode("13=" + reply.text + "1"))


async def test_an_unknown_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'temprature'; did you mean temperature\?"):
        await Bench().llm.completion("12", temprature=1)


def test_requests_that_ask_for_the_same_share_what_was_checked() -> None:
    asked = {"max_tokens": 1, "stop": ["a"]}
    assert sampling_of(asked) is sampling_of({"max_tokens": 1, "stop": ("a",)})
    for wrong in (True, 1.0, [1]):  # equal values of other types are not taken for what was checked
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            sampling_of({"max_tokens": wrong})
    with pytest.raises(ValueError, match=r"max_tokens=\{\}: expected an integer"):
        sampling_of({"max_tokens": {}})
