"""HTTP port of a server with a model, over loopback: the unmodified OpenAI client, NexRL's, and clients that leave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-rl")

import httpx
import openai
import trio

import fray
from fray import rl
from fray.http_server import serve_http
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_port import server_app
from fray.rl.inference.http_settings import HttpPort
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.server import InferenceServer
from fray.rl.tensors.language_model import load_model
from tests.support.counting_engine import CountingEngine

pytestmark = pytest.mark.torch
MODEL = rl.TinyLlama(layers=1, width=16, heads=2, mlp=32)


def use_openai(url: str) -> dict[str, Any]:
    """Use the client as its users do; return what was found."""
    found: dict[str, Any] = {}
    extra: Any = {"ignore_eos": True, "return_token_ids": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", http_client=httpx.Client(verify=False)) as client:
        found["models"] = [model.id for model in client.models.list()]
        options: Any = {"model": "TinyLlama", "max_tokens": 6, "temperature": 0, "extra_body": extra}
        found["completion"] = client.completions.create(prompt="407>", logprobs=2, **options)
        parts = client.completions.create(prompt="407>", stream=True, **options)
        found["streamed"] = "".join(part.choices[0].text for part in parts)
        messages: Any = [{"role": "user", "content": "407>"}]
        found["chat"] = client.chat.completions.create(messages=messages, logprobs=True, n=2, **options)
        chunks = list(
            client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **options
            )
        )
        found["chat_streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        found["usage"] = chunks[-1].usage
        stop = found["completion"].choices[0].text[2]
        found["stopped"] = client.completions.create(prompt="407>", stop=stop, **options).choices[0]
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="407>", model="TinyLlama", temperature=-1)
        found["refused"] = refused.value
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o' here"):
            client.completions.create(prompt="407>", model="gpt-4o")
    return found


async def test_the_openai_client_works_unmodified_and_control_loads_a_saved_model(tmp_path: Path) -> None:
    other = load_model(rl.TinyLlama(layers=1, width=16, heads=2, mlp=32, seed=1))
    other.save(tmp_path)
    async with fray.open_cluster("local") as cluster, cluster.open_scope("serve") as scope:
        server = await scope.create_actor(InferenceServer, ModelEngine(MODEL, threads=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_http, HttpPort(MODEL, key="secret"))
            url = await server.http_url()
            found = await trio.to_thread.run_sync(use_openai, url)
            client = rl.LLMServiceClient({"backend": "vllm", "url": f"{url}/v1", "model": "TinyLlama"})
            options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
            reply = await trio.to_thread.run_sync(lambda: client.completion("407>", **options))
            async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer secret"}) as control:
                answer = await control.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
                assert answer.json() == {"success": True, "version": "0.1"}
                body = {"prompt": "407>", **options}
                after = (await control.post("/v1/completions", json=body)).json()["choices"][0]
            nursery.cancel_scope.cancel()
    completion = found["completion"]
    (choice,) = completion.choices
    assert found["models"] == ["TinyLlama"]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 6)
    assert len(choice.text) == len(choice.logprobs.token_logprobs) == len(choice.token_ids) == 6
    assert choice.versions == [["0.0", 6]]
    texts = {found["streamed"], found["chat_streamed"], *(each.message.content for each in found["chat"].choices)}
    assert texts == {choice.text}
    assert found["chat"].choices[0].logprobs.content[0].logprob == choice.logprobs.token_logprobs[0]
    assert found["usage"].total_tokens == 10
    assert (found["stopped"].text, found["stopped"].finish_reason) == (
        choice.text[: choice.text.index(choice.text[2])],
        "stop",
    )
    assert (found["refused"].param, found["refused"].status_code) == ("temperature", 400)
    assert reply["response"] == choice.text
    assert reply["nexrl_train"]["response_tokens"] == choice.token_ids
    assert reply["nexrl_train"]["response_logprobs"] == choice.logprobs.token_logprobs
    assert after["versions"] == [["0.1", 6]]
    assert after["text"] != choice.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stream: bool, nursery: trio.Nursery) -> None:
    gate = threading.Semaphore(0)
    engine = CountingEngine(digits=10**6, max_length=10**6, gate=gate)
    server = InferenceServer(lambda: engine)
    address = await nursery.start(serve_http, server_app(server, HttpPort(rl.TinyLlama())))
    try:
        async with httpx.AsyncClient(base_url=address.url) as client, trio.open_nursery() as asking:
            body = {"prompt": "12", "max_tokens": 100_000, "stream": stream}
            asking.start_soon(lambda: client.post("/v1/completions", json=body))
            while not engine.added:
                await trio.lowlevel.checkpoint()
            gate.release(2)
            while engine.steps < 2:
                await trio.lowlevel.checkpoint()
            asking.cancel_scope.cancel()
        while not engine.cancelled:
            gate.release()
            await trio.lowlevel.checkpoint()
        assert engine.version == VersionName(0, 0)
    finally:
        gate.release(1_000)
        await server.aclose()
