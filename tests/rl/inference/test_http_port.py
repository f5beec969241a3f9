"""HTTP port of an inference server: OpenAI's API, metrics, tokens, and control with the run's key."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from attrs import define

from fray import rl
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_port import server_app
from fray.rl.inference.http_settings import HttpPort
from fray.rl.inference.server import InferenceServer
from fray.rl.weights_table import WeightPlace
from tests.support.counting_engine import CountingEngine

KEY = {"Authorization": "Bearer secret"}


class LoadingEngine(CountingEngine):
    """Takes the tensor ``w`` as the first byte of its weights."""

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        if list(table.places) != ["w"]:
            raise ValueError(f"the weights are not those of this model: {sorted(table.places)}")
        self.place = table.places["w"]
        super().load(version, None, buffer[self.place.offset :])


@define
class Bench:
    engine: LoadingEngine
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@asynccontextmanager
async def serving(key: str | None = "secret", **options: Any) -> AsyncIterator[Bench]:
    engine = LoadingEngine(**options)
    server = InferenceServer(lambda: engine)
    app = server_app(server, HttpPort(rl.TinyLlama(), name="policy", key=key))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            yield Bench(engine, client)
    finally:
        await server.aclose()


async def test_a_completion_has_tokens_logprobs_versions_and_counts() -> None:
    async with serving() as bench:
        answer = await bench.post(
            "/v1/completions",
            model="policy",
            prompt=["12", [1, 2]],
            logprobs=1,
            return_token_ids=True,
            nexrl_train=True,
        )
    body = answer.json()
    first, second = body["choices"]
    assert (body["object"], body["model"], first["text"], first["finish_reason"]) == (
        *("text_completion", "policy"),
        *("3456", "stop"),
    )
    assert (first["token_ids"], first["prompt_token_ids"], first["versions"]) == (
        [3, 4, 5, 6, 13],
        [1, 2],
        [["0.0", 5]],
    )
    assert first["logprobs"]["tokens"] == ["3", "4", "5", "6", "$"]
    assert first["logprobs"]["top_logprobs"][0] == {"3": -0.4}
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert first["nexrl_train"] == {
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4, 5, 6, 13],
        "response_logprobs": [-0.4, -0.5, -0.6, -0.7, -1.4],
    }
    assert (second["index"], second["text"]) == (1, "3456")
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}


async def test_a_chat_has_logprobs_whose_tokens_may_be_ids() -> None:
    async with serving() as bench:
        answer = await bench.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "12"}],
            max_tokens=2,
            logprobs=True,
            top_logprobs=1,
            return_tokens_as_token_ids=True,
            return_token_ids=True,
        )
    body = answer.json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "34", "refusal": None}
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["token_id:3", "token_id:4"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.4
    assert (body["prompt_token_ids"], choice["finish_reason"]) == ([1, 2], "length")


def chunks_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("options", "text"), [({}, "3456"), ({"stop": "56"}, "34"), ({"max_tokens": 3}, "345")])
async def test_a_stream_has_the_text_of_the_answer_and_nothing_that_ends_it(options: Any, text: str) -> None:
    async with serving() as bench:
        whole = (await bench.post("/v1/completions", prompt="12", n=2, **options)).json()
        streamed = await bench.post("/v1/completions", prompt="12", n=2, stream=True, **options)
    chunks = [chunk["choices"][0] for chunk in chunks_of(streamed.text)]
    assert streamed.text.endswith("data: [DONE]\n\n")
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["versions"] == choice["versions"]
        assert len(own) >= 2
    assert whole["choices"][0]["text"] == text


async def test_a_repeated_id_runs_once() -> None:
    async with serving() as bench:
        headers = {"X-Request-Id": "mine"}
        for _ in range(2):
            answer = await bench.client.post("/v1/completions", json={"prompt": "12"}, headers=headers)
            assert answer.json()["id"] == "cmpl-mine"
    assert bench.engine.added == ["http/mine/0"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/completions", {"prompt": "1" * 80}, 400, "the prompt has 80 tokens, the model takes 64"),
        ("/v1/completions", {"prompt": "abc"}, 400, "no token for ['a', 'b', 'c'] in 'abc'"),
        (
            "/v1/completions",
            {"prompt": "1", "model": "gpt"},
            404,
            "there is no model 'gpt' here; this server has 'policy'",
        ),
        ("/v1/completions", {"prompt": "1", "stream": True, "max_tokens": 80}, 400, "the model takes 64"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}]}, 400, "no token for ['é']"),
        ("/tokenize", {"text": "1"}, 400, 'expected {"prompt": "text"} or {"messages": [...]}'),
        ("/tokenize", {"messages": []}, 400, "messages: expected a list with at least one message"),
        ("/pause", {}, 401, "/pause needs the key for control routes: Authorization: Bearer KEY"),
        ("/resume", {}, 401, "needs the key for control routes"),
        ("/update_weights", {}, 401, "needs the key for control routes"),
        ("/update_weights_from_disk", {}, 401, "needs the key for control routes"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_and_the_server_continues(
    path: str, body: Any, status: int, text: str
) -> None:
    async with serving() as bench:
        answer = await bench.post(path, **body)
        assert answer.status_code == status
        assert text in answer.json()["error"]["message"]
        assert (await bench.post("/v1/completions", prompt="12")).json()["choices"][0]["text"] == "3456"


async def test_an_engine_that_fails_is_an_answer_and_health_says_so() -> None:
    async with serving(fail_at=1) as bench:
        answer = await bench.post("/v1/completions", prompt="12")
        health = await bench.client.get("/health")
    for each in (answer, health):
        assert each.status_code == 503
        assert "its engine failed: RuntimeError: device lost" in each.json()["error"]["message"]


async def test_health_metrics_and_tokens() -> None:
    async with serving() as bench:
        await bench.post("/v1/completions", prompt="12")
        assert (await bench.client.get("/health")).json() == {"status": "ok", "version": "0.0"}
        metrics = (await bench.client.get("/metrics")).text
        tokens = (await bench.post("/tokenize", prompt="12=")).json()
        chat = (await bench.post("/tokenize", messages=[{"role": "user", "content": "12"}])).json()
    assert "# TYPE fray_rl_tokens_total counter\nfray_rl_tokens_total 5\n" in metrics
    assert "fray_rl_weights_version 0\n" in metrics
    assert tokens == {"count": 3, "max_model_len": 64, "tokens": [1, 2, 11]}
    assert chat["tokens"] == [1, 2]


async def test_without_a_key_control_is_off() -> None:
    async with serving(key=None) as bench:
        answer = await bench.client.post("/pause", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "control_off")


async def test_a_server_is_paused_and_resumed() -> None:
    async with serving() as bench, trio.open_nursery() as nursery:
        assert (await bench.client.post("/pause?mode=keep", headers=KEY)).json() == {"status": "paused"}
        assert (await bench.client.get("/is_paused")).json() == {"is_paused": True}
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await bench.post("/v1/completions", prompt="12"))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        await bench.client.post("/resume", headers=KEY)
        wrong = await bench.client.post("/pause?mode=kep", headers=KEY)
    assert wrong.json()["error"]["message"] == "unknown mode 'kep'; did you mean keep?; keep, wait or abort"
    assert answers[0].json()["choices"][0]["text"] == "3456"


def safetensors(tensors: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return struct.pack("<Q", len(header)) + header + data


ONE = {"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}


async def test_weights_come_as_a_file_or_from_a_directory_and_answers_name_their_version(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(ONE, b"\x02\x00"))
    async with serving() as bench:
        content = safetensors(ONE, b"\x01\x00")
        answer = await bench.client.post("/update_weights", content=content, headers=KEY)
        assert answer.json() == {"success": True, "version": "0.1"}
        one = (await bench.post("/v1/completions", prompt="12")).json()["choices"][0]
        body = {"model_path": str(tmp_path), "version": "1.4", "mode": "wait"}
        answer = await bench.client.post("/update_weights_from_disk", json=body, headers=KEY)
        assert answer.json() == {"success": True, "version": "1.4"}
        other = (await bench.post("/v1/completions", prompt="12")).json()["choices"][0]
        assert (one["text"], one["versions"]) == ("4567", [["0.1", 5]])
        assert (other["text"], other["versions"]) == ("5678", [["1.4", 5]])
        older = await bench.client.post("/update_weights?version=3", content=content, headers=KEY)
    assert older.json()["error"]["message"] == "version 0.3 is older than 1.4, which the server has"
    assert bench.engine.place == WeightPlace(bench.engine.place.offset, (2,), "uint8")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "these bytes are not of the safetensors format"),
        (b"\xff" * 40, "their header is longer than they are"),
        (safetensors({}, b""), "the weights are not those of this model: []"),
        (safetensors({"w": 5}, b""), "tensor 'w' lacks dtype, shape or data_offsets"),
        (safetensors({"w": {**ONE["w"], "dtype": "F3"}}, b"ab"), "tensor 'w' has the type 'F3'; expected one of F64"),
        (safetensors(ONE, b"a"), "tensor 'w' of shape [2] needs 2 bytes, and has 2 of 1"),
        (safetensors({"w": {**ONE["w"], "shape": [3]}}, b"ab"), "tensor 'w' of shape [3] needs 3 bytes"),
        (safetensors({"w": {**ONE["w"], "shape": [-2]}}, b"ab"), "tensor 'w' of shape [-2]"),
    ],
)
async def test_weights_that_are_damaged_are_refused(content: bytes, text: str) -> None:
    async with serving() as bench:
        answer = await bench.client.post("/update_weights", content=content, headers=KEY)
        assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True), answer.text
        assert (await bench.client.get("/health")).json()["version"] == "0.0"


async def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    async with serving() as bench:
        body = {"model_path": str(tmp_path / "none")}
        answer = await bench.client.post("/update_weights_from_disk", json=body, headers=KEY)
        wrong = await bench.client.post("/update_weights?version=x", content=b"", headers=KEY)
    assert "there is no .safetensors file in" in answer.json()["error"]["message"]
    assert wrong.json()["error"]["message"] == "version='x': expected such as '0.7' or 7"
