"""NexRL's client of the model: by actor calls in threads, and over HTTP with repetitions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.inference import http_service
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.service_client import EpisodeBackend
from tests.support.counting_engine import TOKENIZER, answer_of

TRAIN = {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "response_logprobs": [-0.4, -0.5]}


async def in_a_thread(call: Any) -> Any:
    return await trio.to_thread.run_sync(call)


async def test_a_completion_is_the_dict_of_the_guide_and_has_what_training_needs() -> None:
    llm = rl.LLM(answer_of, TOKENIZER)
    client = rl.LLMServiceClient({"model_tag": "policy"}, EpisodeBackend(llm))
    asked = {"prompt": "12", "max_tokens": 2, "temperature": 0.5}
    answer = await in_a_thread(lambda: client.completion(**asked))
    assert {name: answer[name] for name in ("prompt", "max_tokens", "temperature")} == asked
    assert (answer["response"], answer["finish_reason"], answer["nexrl_train"]) == ("34", "length", TRAIN)
    assert isinstance(answer, rl.ModelReply)
    assert (answer.text, answer.tokens, client.model_tag) == ("34", [3, 4], "policy")
    assert llm.replies == [answer]


async def test_a_chat_has_messages_response_and_tool_calls() -> None:
    client = rl.LLMServiceClient({}, EpisodeBackend(rl.LLM(answer_of, TOKENIZER)))
    messages = [{"role": "user", "content": "12"}]
    answer = await in_a_thread(lambda: client.generate(messages, max_tokens=8))
    assert (answer["messages"], answer["response"], answer["tool_calls"]) == (messages, "3456", [])
    assert answer["finish_reason"] == "stop"


async def test_a_field_that_is_wrong_is_refused_before_the_loop_is_asked() -> None:
    client = rl.LLMServiceClient({}, EpisodeBackend(rl.LLM(answer_of, TOKENIZER)))
    with pytest.raises(ApiError, match=r"unknown field 'temprature'; did you mean temperature\?"):
        client.completion("12", temprature=1)
    with pytest.raises(ApiError, match="n: a reply is one dict; ask for one at a time"):
        client.completion("12", n=2)


async def test_requests_wait_while_the_controller_says_block() -> None:
    class Controller:
        def __init__(self) -> None:
            self.answers = ["block", "block", "continue"]

        def check_rollout_service_status(self, model_tag: str) -> str:
            return self.answers.pop(0)

    controller = Controller()
    client = rl.LLMServiceClient({}, EpisodeBackend(rl.LLM(answer_of, TOKENIZER)))
    client.set_weight_sync_controller(controller)
    assert (await in_a_thread(lambda: client.completion("12")))["response"] == "3456"
    assert controller.answers == []
    client = rl.LLMServiceClient({"freeze_for_weight_sync": False}, EpisodeBackend(rl.LLM(answer_of, TOKENIZER)))
    client.set_weight_sync_controller(controller)
    assert (await in_a_thread(lambda: client.completion("12")))["response"] == "3456"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backend": "vlm"}, "unknown backend 'vlm' of the inference service; expected one of fray, openai, vllm"),
        ({"inference_service": {"backend": "vllm"}}, "invalid url None of the inference service"),
        ({"backend": "openai", "url": "localhost:8000"}, "expected http://HOST:PORT/v1"),
    ],
)
def test_a_config_that_is_wrong_is_refused(config: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        rl.LLMServiceClient(config)


def test_a_client_without_servers_says_so() -> None:
    with pytest.raises(InvalidRequest, match="this LLMServiceClient has no servers"):
        rl.LLMServiceClient({}).completion("12")


# Over HTTP -----------------------------------------------------------------------------------------------------------


class Service:
    """HTTP service that gives its answers in order."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.answers, self.requests = answers, list[dict[str, Any]]()

    def answer(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        key, name = headers["Authorization"], headers["X-Request-Id"]
        self.requests.append({"path": path, "key": key, "id": name, "body": body})
        return self.answers.pop(0)


@contextmanager
def serving(*answers: tuple[int, Any]) -> Iterator[tuple[Service, str]]:
    service = Service(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = service.answer(self.path, self.headers, body)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield service, f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


OF_VLLM = {
    "choices": [
        {
            "text": "34",
            "finish_reason": "length",
            "prompt_token_ids": [1, 2],
            "token_ids": [3, 4],
            "logprobs": {"token_logprobs": [-0.4, -0.5]},
        }
    ]
}
CHAT_OF_VLLM = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "message": {"role": "assistant", "content": "34", "tool_calls": None},
            "finish_reason": "stop",
            "token_ids": [3, 4],
            "logprobs": {"content": [{"token": "3", "logprob": -0.4}, {"token": "4", "logprob": -0.5}]},
        }
    ],
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "BACKOFF_S", 0.001)


def test_vllm_gives_token_ids_and_logprobs() -> None:
    with serving((200, OF_VLLM), (200, CHAT_OF_VLLM)) as (service, url):
        client = rl.LLMServiceClient({"backend": "vllm", "url": url, "model": "m", "api_key": "secret"})
        answer = client.completion("12", max_tokens=2)
        chat = client.generate([{"role": "user", "content": "12"}])
    wanted = {"model": "m", "prompt": "12", "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
    first, second = service.requests
    assert (first["path"], first["key"], first["body"]) == ("/v1/completions", "Bearer secret", wanted)
    assert (second["path"], second["body"]["logprobs"]) == ("/v1/chat/completions", True)
    assert (answer["response"], answer["prompt"], answer["nexrl_train"]) == ("34", "12", TRAIN)
    assert (chat["response"], chat["tool_calls"], chat["nexrl_train"]) == ("34", [], TRAIN)


def test_openai_gets_the_fields_of_the_caller_alone() -> None:
    with serving((200, {"choices": [{"text": "5", "finish_reason": "stop"}]})) as (service, url):
        answer = rl.LLMServiceClient({"backend": "openai", "url": url}).completion("12")
    assert service.requests[0]["body"] == {"prompt": "12"}
    assert "nexrl_train" not in answer


def test_a_request_that_failed_for_a_reason_that_passes_is_repeated_with_its_id() -> None:
    aborted = {"choices": [{"text": "3", "finish_reason": "abort"}]}
    with serving((503, "starting"), (429, {}), (200, aborted), (200, OF_VLLM)) as (service, url):
        answer = rl.LLMServiceClient({"backend": "vllm", "url": url}).completion("12")
    assert answer["response"] == "34"
    assert len({request["id"] for request in service.requests}) == 1


@pytest.mark.parametrize(
    ("status", "content", "text"),
    [
        (400, {"error": {"message": "no", "param": "n"}}, "answered 400: no"),
        (404, "not here", "answered 404: not here"),
        (200, "<html>", "did not answer as OpenAI's API does"),
        (200, {"choices": []}, "did not answer as OpenAI's API does"),
    ],
)
def test_other_answers_are_errors_at_once(status: int, content: Any, text: str) -> None:
    with serving((status, content)) as (_, url), pytest.raises(ApiError, match=text):
        rl.LLMServiceClient({"backend": "vllm", "url": url}).completion("12")


def test_a_service_that_is_not_there_is_named_after_all_attempts() -> None:
    with serving() as (_, url):
        pass
    with pytest.raises(ConnectionError, match=r"no answer from .*/v1/ after 3 attempts: ConnectError"):
        rl.LLMServiceClient({"backend": "vllm", "url": url, "max_retries": 2}).completion("12")
