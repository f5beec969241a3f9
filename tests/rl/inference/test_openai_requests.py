"""Bodies of OpenAI's API: what they become, and which field is named when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from fray.rl.inference.openai_requests import ApiError, Kind, parse_request
from fray.rl.inference.requests import Sampling

USER = [{"role": "user", "content": "12"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("12", ("12",)),
        ([1, 2], ((1, 2),)),
        (["1", "2"], ("1", "2")),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["1", [2]], ("1", (2,))),
    ],
)
def test_a_prompt_is_a_text_tokens_or_a_list_of_either(prompt: Any, expected: Any) -> None:
    assert parse_request("completion", {"prompt": prompt}).prompts == expected


def test_fields_become_sampling_and_null_is_as_missing() -> None:
    body = {"temperature": 0.5, "top_p": None, "stop": "x", "n": 2, "logprobs": 3, "max_tokens": 7, "user": "me"}
    request = parse_request("completion", {"prompt": "1", "model": "m", **body})
    assert request.sampling == Sampling(temperature=0.5, stop=("x",), n=2, logprobs=3, max_tokens=7)
    assert (request.model, request.has_logprobs, request.has_max_tokens) == ("m", True, True)
    assert not parse_request("completion", {"prompt": "1", "logprobs": None}).has_logprobs
    assert parse_request("completion", {"prompt": "1", "logprobs": 0}).has_logprobs


def test_a_chat_has_messages_of_templates_and_tools() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    request = parse_request("chat", {"messages": messages, "tools": [tool], "max_completion_tokens": 5})
    assert request.messages[0] == {"role": "system", "content": "a\nb"}
    assert request.messages[1]["content"] == ""
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (request.tools, request.sampling.max_tokens) == ([tool], 5)
    assert parse_request("chat", {"messages": messages, "tools": [tool], "tool_choice": "none"}).tools == []


def test_a_chat_without_max_tokens_may_fill_the_context() -> None:
    assert parse_request("chat", {"messages": USER}).sampling_for(10, 64).max_tokens == 54
    assert parse_request("chat", {"messages": USER, "max_tokens": 3}).sampling_for(10, 64).max_tokens == 3
    assert parse_request("completion", {"prompt": "1"}).sampling_for(10, 64).max_tokens == 16


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "prompt", "prompt: expected a text, a list of token ids, or a list of either, found nothing"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "found list"),
        ({"prompt": [[]]}, "prompt", "prompt is empty"),
        ({"prompt": [1.5]}, "prompt", "found list"),
        ({"prompt": [True]}, "prompt", "found list"),
        ({"prompt": [-1]}, "prompt", "found list"),
        ({"prompt": ["1"] * 65}, "prompt", "prompt has 65 prompts; expected at most 64"),
        ({"temperature": -1}, "temperature", "temperature=-1: expected a number of at least 0"),
        ({"temperature": "hot"}, "temperature", "temperature='hot': expected a number"),
        ({"temperature": float("nan")}, "temperature", "temperature=nan: expected a number"),
        ({"top_p": 0}, "top_p", "top_p=0: expected a number above 0"),
        ({"top_k": 1.5}, "top_k", "top_k=1.5: expected an integer"),
        ({"n": 0}, "n", "n=0: expected an integer from 1 to 128"),
        ({"n": 129}, "n", "n=129: expected an integer from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: expected an integer of at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "max_tokens='9': expected an integer"),
        ({"min_tokens": 40}, "min_tokens", "min_tokens=40 is more than max_tokens=16"),
        ({"seed": -1}, "seed", "seed=-1: expected an integer from 0"),
        ({"stop": 5}, "stop", "stop=5: expected a text or a list of texts"),
        ({"stop": [5]}, "stop", "stop=(5,): expected strings that are not empty"),
        ({"stop": ["x"] * 17}, "stop", "stop has 17 texts; expected at most 16"),
        ({"stop_token_ids": 7}, "stop_token_ids", "stop_token_ids=7: expected a list of ids of tokens"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids='a': expected ids of tokens"),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos=1: expected true or false"),
        ({"logprobs": 21}, "logprobs", "logprobs=21: expected an integer from 0 to 20"),
        ({"stream": "yes"}, "stream", "stream='yes': expected true or false"),
        ({"stream_options": []}, "stream_options", "stream_options=[]: expected an object"),
        ({"model": 5}, "model", "model=5: expected a text"),
        ({"echo": True}, "echo", "echo=True is not supported; expected False, or leave it out"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty=0.5 is not supported; expected 0"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean temperature?"),
        ({"messages": USER}, "messages", "unknown field 'messages'"),
    ],
)
def test_a_completion_that_is_wrong_is_refused_with_the_field(body: dict[str, Any], param: str, text: str) -> None:
    _check("completion", {} if not body else {"prompt": "1", **body}, param, text)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": []}, "messages", "messages: expected a list with at least one message, found an empty list"),
        ({"messages": "hello"}, "messages", "found str"),
        ({"messages": [5]}, "messages[0]", "messages[0]: expected an object with role and content, found int"),
        ({"messages": [{"role": "cat"}]}, "messages[0].role", "expected one of system, developer"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role", "expected one of system, developer"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "found int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "messages[0].content[0]: expected a part of text, found 'image_url'",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls", "expected a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", '"function"'),
        ({"tools": {}}, "tools", "tools: expected a list"),
        ({"tools": [{"name": "add"}]}, "tools[0]", 'tools[0]: expected {"type": "function"'),
        ({"tool_choice": "required"}, "tool_choice", "would need constrained decoding"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "expected 'auto' or 'none'"),
        ({"logprobs": 3}, "logprobs", "logprobs=3: expected true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens=-1: expected an integer"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ],
)
def test_a_chat_that_is_wrong_is_refused_with_the_field(body: dict[str, Any], param: str, text: str) -> None:
    _check("chat", {"messages": USER, **body}, param, text)


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    _check("chat", body, None, "expected a JSON object")


def _check(kind: Kind, body: Any, param: str | None, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, body)
    error = caught.value.body()["error"]
    assert (error["param"], error["type"], caught.value.status) == (param, "invalid_request_error", 400)
    assert text in error["message"]
