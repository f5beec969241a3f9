"""Agents at the model of an episode: their turns keep their tokens, and end with the episode."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
from attrs import define, field

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.gateway import sessions
from fray.rl.gateway.sessions import AgentSession, ended_session
from fray.rl.inference import openai_app
from fray.rl.inference.openai_app import api_app, api_routes
from fray.rl.rollout.scores import score, trajectories_of
from tests.support.scripted_chat import EOS, PAIR, ROLES, PairTokenizer, ScriptedModel

TOKENIZER = PairTokenizer()
USER, ASSISTANT = ROLES["user"], ROLES["assistant"]


@define
class Bench:
    """A session behind the routes."""

    model: ScriptedModel
    llm: rl.LLM
    session: AgentSession
    client: httpx.AsyncClient
    messages: list[dict[str, Any]] = field(factory=list)

    async def post(self, path: str = "chat/completions", **body: Any) -> httpx.Response:
        return await self.client.post(f"/sessions/id/v1/{path}", json={"model": "gpt-any", **body})

    async def say(self, text: str, **body: Any) -> dict[str, Any]:
        """Send the conversation with another message, and append the answer as OpenAI's client dumps it."""
        self.messages.append({"role": "user", "content": text})
        answer = await self.post(messages=self.messages, **body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        dumped = {**choice["message"], "annotations": None, "audio": None, "function_call": None}
        self.messages.append(dumped)
        return choice  # type: ignore[no-any-return]


@asynccontextmanager
async def serving(model: ScriptedModel, **sampling: Any) -> AsyncIterator[Bench]:
    async def max_length() -> int:
        return 900

    llm = rl.LLM(model.send, TOKENIZER)
    session = AgentSession(llm, "policy", max_length, sampling)

    def find(path: Any) -> AgentSession:
        if path["session"] != "id":
            raise ended_session()
        return session

    app = api_app(api_routes("/sessions/{session}/v1", find))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        yield Bench(model, llm, session, client)


def letters(text: str) -> list[int]:
    return list(map(ord, text))


async def test_three_turns_of_an_agent_that_sends_texts_keep_the_tokens_that_were_generated() -> None:
    async with serving(ScriptedModel("aabb", "ccc", "dd")) as bench:
        for text in ("u", "vv", "w"):
            await bench.say(text, max_tokens=9)
    first, second, third = (list(request.prompt_ids) for request in bench.model.requests)
    assert first == [USER, ord("u"), EOS, ASSISTANT]
    assert TOKENIZER.encode("aabb") == [ord("a") + PAIR, ord("b") + PAIR]  # not what the model has written
    assert second == [*first, *letters("aabb"), EOS, USER, ord("v") + PAIR, EOS, ASSISTANT]
    assert third == [*second, *letters("ccc"), EOS, USER, ord("w"), EOS, ASSISTANT]
    (trajectory,) = trajectories_of(score(reward=1.0), bench.llm.replies)
    assert trajectory["tokens"] == [*third, *letters("dd"), EOS]
    trained = [token for token, mask in zip(trajectory["tokens"], trajectory["loss_mask"], strict=True) if mask]
    assert trained == [*letters("aabb"), EOS, *letters("ccc"), EOS, *letters("dd"), EOS]
    assert [count for _, count in trajectory["versions"]] == [5, 4, 3]
    assert trajectory["logprobs"][4] == -0.1
    assert trajectory["logprobs"][-1] == -0.3


async def test_a_conversation_whose_history_is_edited_is_a_trajectory_of_its_own() -> None:
    async with serving(ScriptedModel("aabb", "cc")) as bench:
        await bench.say("u", max_tokens=9)
        bench.messages[1]["content"] = "aab"
        await bench.say("v", max_tokens=9)
    assert list(bench.model.requests[1].prompt_ids)[4:6] == [ord("a") + PAIR, ord("b")]
    first, second = trajectories_of(score(reward=0.5, metrics={"x": 1}), bench.llm.replies)
    assert first["tokens"] == [USER, ord("u"), EOS, ASSISTANT, *letters("aabb"), EOS]
    assert second["loss_mask"] == [0] * (len(second["tokens"]) - 3) + [1] * 3
    assert first["reward"] == second["reward"] == 0.5
    assert first["metrics"] == {"x": 1}


async def test_a_turn_that_two_others_continue_is_trained_once() -> None:
    async with serving(ScriptedModel("a", "b", "c")) as bench:
        await bench.say("u", max_tokens=9)
        root = list(bench.messages)
        await bench.say("v", max_tokens=9)
        bench.messages = root
        await bench.say("w", max_tokens=9)
    one, other = trajectories_of(score(reward=1.0), bench.llm.replies)
    assert (sum(one["loss_mask"]), sum(other["loss_mask"])) == (4, 2)
    assert one["tokens"][:6] == other["tokens"][:6]


async def test_an_episode_without_a_request_has_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="it has asked the model nothing"):
        trajectories_of(score(reward=1.0), [])


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_tool_call_comes_back_without_its_tokens_and_keeps_them() -> None:
    async with serving(ScriptedModel(CALL, "2")) as bench:
        choice = await bench.say("1+1?", tools=TOOLS)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1}'})
        call["function"]["arguments"] = '{"a":1}'  # some agents write it again
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        answer = await bench.post(messages=[*bench.messages, result], tools=TOOLS)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    first, second = (list(request.prompt_ids) for request in bench.model.requests)
    assert second == [*first, *letters(CALL), EOS, ROLES["tool"], ord("2"), EOS, ASSISTANT]
    assert len(trajectories_of(score(reward=1.0), bench.llm.replies)) == 1


@pytest.mark.parametrize("text", ["<tool_call>{", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 5}</tool_call>'])
async def test_what_is_not_a_tool_call_stays_text(text: str) -> None:
    async with serving(ScriptedModel(text)) as bench:
        choice = await bench.say("u", tools=TOOLS)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last, end = answer.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_stream_has_the_text_the_calls_and_the_counts() -> None:
    async with serving(ScriptedModel(CALL)) as bench:
        messages = [{"role": "user", "content": "u"}]
        options = {"stream_options": {"include_usage": True}}
        answer = await bench.post(messages=messages, tools=TOOLS, stream=True, **options)
    *chunks, usage = events(answer)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "I add."}
    assert deltas[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "tool_calls"]
    assert usage["usage"]["completion_tokens"] == len(CALL) + 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in chunks} == {"gpt-any"}


async def test_completions_of_several_prompts_and_samples_are_choices_in_order() -> None:
    async with serving(ScriptedModel("a", "b", "c", "d")) as bench:
        answer = await bench.post("completions", prompt=["x", [USER]], n=2, max_tokens=4, logprobs=1)
    body = answer.json()
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.1, -0.1]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert len(trajectories_of(score(reward=1.0), bench.llm.replies)) == 4


async def test_values_of_the_episode_replace_those_of_the_agent() -> None:
    async with serving(ScriptedModel("aaaaaa", "b"), temperature=1.0, max_tokens=3) as bench:
        assert (await bench.say("u", temperature=0, max_tokens=500))["message"]["content"] == "aaa"
    assert bench.model.requests[0].sampling.temperature == 1.0
    with pytest.raises(ValueError, match="top_p=2: expected a number above 0"):
        async with serving(ScriptedModel(), top_p=2):
            pass


async def test_a_chat_without_max_tokens_may_fill_the_context() -> None:
    async with serving(ScriptedModel("a")) as bench:
        await bench.say("u")
    assert bench.model.requests[0].sampling.max_tokens == 900 - 4


# Ends and errors -----------------------------------------------------------------------------------------------------


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["message"], error["code"]


async def test_a_session_that_does_not_exist_or_has_ended_is_not_found() -> None:
    async with serving(ScriptedModel("a")) as bench:
        other = await bench.client.post("/sessions/other/v1/chat/completions", json={})
        bench.session.end()
        ended = await bench.post(messages=[{"role": "user", "content": "u"}])
    for answer in (other, ended):
        status, text, code = error_of(answer)
        assert (status, code) == (404, "session_not_found")
        assert text.startswith("there is no such session: its episode has ended")


async def test_requests_under_way_are_cancelled_when_the_session_ends() -> None:
    model = ScriptedModel("a", gate=trio.Event())
    async with serving(model) as bench, trio.open_nursery() as nursery:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await bench.post(messages=[{"role": "user", "content": "u"}]))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        bench.session.end()
        await model.cancelled.wait()
    assert error_of(answers[0])[0] == 404
    assert bench.llm.replies == []


async def test_a_session_ends_at_its_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(ScriptedModel("a")) as bench:
        await bench.session.end_at(trio.current_time() + 5)
        assert error_of(await bench.post(messages=[{"role": "user", "content": "u"}]))[0] == 404


async def test_requests_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REQUESTS_LIMIT", 1)
    gate = trio.Event()
    async with serving(ScriptedModel("a", gate=gate)) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(bench.say, "u")
        await trio.testing.wait_all_tasks_blocked()
        answer = await bench.post(messages=[{"role": "user", "content": "u"}])
        gate.set()
    assert error_of(answer) == (
        429,
        "this session has 1 requests under way; send the next one later",
        "too_many_requests",
    )


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"{", 400, "the body is not JSON: "),
        (b"[" * 100_000, 400, "the body is not JSON: nested too deeply"),
        (b"\xff", 400, "the body is not JSON: "),
        (b"x" * 2_000, 413, "the body has more than 1000 bytes"),
        (b'{"messages": []}', 400, "messages: expected a list with at least one message"),
    ],
)
async def test_a_body_that_is_wrong_is_refused(
    content: bytes, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 413:
        monkeypatch.setattr(openai_app.body_of, "__defaults__", (1_000,))
    async with serving(ScriptedModel("a")) as bench:
        found, message, _ = error_of(await bench.client.post("/sessions/id/v1/chat/completions", content=content))
        assert (found, text in message) == (status, True)
        await bench.say("u")  # the server is as before


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    async with serving(ScriptedModel("a")) as bench:
        status, text, _ = error_of(await bench.post("completions", prompt="xy" * 600))
    assert (status, text) == (400, "the prompt has 1200 tokens, the model takes 1000")


async def test_an_error_of_the_model_is_an_answer() -> None:
    async with serving(ScriptedModel()) as bench:
        status, text, code = error_of(await bench.post("completions", prompt="x"))
    assert (status, text, code) == (500, "IndexError: pop from empty list", "internal_error")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "nothing", 404), ("GET", "completions", 405)])
async def test_a_path_or_method_that_is_wrong_has_an_answer_of_the_same_shape(
    method: str, path: str, status: int
) -> None:
    async with serving(ScriptedModel()) as bench:
        answer = await bench.client.request(method, f"/sessions/id/v1/{path}")
    assert error_of(answer)[:2] == (status, f"{method} /sessions/id/v1/{path}: {answer.reason_phrase}")


async def test_the_models_are_that_of_the_run() -> None:
    async with serving(ScriptedModel()) as bench:
        listed = (await bench.client.get("/sessions/id/v1/models")).json()
        one = (await bench.client.get("/sessions/id/v1/models/org/any")).json()
    assert [model["id"] for model in listed["data"]] == ["policy"]
    assert one["id"] == "policy"


def test_an_address_outside_an_episode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"rl.agent_url\(task\) is for the function of an episode"):
        rl.agent_url({})
