"""OpenAI's API of samplers with the unmodified `openai` client, compared with what the Tinker API samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import tinker
from tests.tinker.services import warm_cluster
from tests.tinker.test_tinker_api import MODEL, Api

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.torch


def saved_weights(api: Api) -> str:
    """Train a little; return the path of the saved weights."""
    model = api.model()
    for seq in (1, 3, 5):
        api.forward(model, seq, (4, 5, 6))
        api.post("optim_step", model_id=model, seq_id=seq + 1, adam_params={"learning_rate": 0.3})
    path: str = api.result(api.post("save_weights_for_sampler", model_id=model, seq_id=7, path="end"))["path"]
    return path


async def test_the_openai_client_samples_what_the_tinker_api_samples(tmp_path: Path) -> None:
    async with (
        warm_cluster() as cluster,
        tinker.serve(models=[MODEL], threads=1, directory=tmp_path, cluster=cluster, auth=True) as service,
    ):
        keys = [(await service.create_key(name)).replace("otk_", "tml-") for name in ("ada", "bob")]
        await trio.to_thread.run_sync(converse, service.url, *keys)
        await lose_the_engine(cluster, service.url, keys[0])


def converse(url: str, ada: str, bob: str) -> None:
    tokenizer = MODEL.tokenizer
    api = Api(url, ada)
    path = saved_weights(api)
    client = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=ada, max_retries=0)
    other = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=bob, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny", path]
    assert [model.id for model in other.models.list()] == ["tiny"]
    assert client.get(f"/models/{path}", cast_to=object)["id"] == path  # type: ignore[index]

    logprobs = {}
    for model, where in (("tiny", {"base_model": "tiny"}), (path, {"model_path": path})):
        chunk = {"tokens": tokenizer.encode("407>"), "type": "encoded_text"}
        params = {"max_tokens": 6, "seed": 3}
        asked = {"prompt": {"chunks": [chunk]}, "sampling_params": params, "num_samples": 2, **where}
        wanted = api.result(api.post("asample", **asked))["sequences"]
        options: Any = {"model": model, "max_tokens": 6, "seed": 3, "n": 2}
        answer = client.completions.create(prompt="407>", logprobs=0, **options)
        logprobs[model] = [choice.logprobs.token_logprobs for choice in answer.choices]
        assert logprobs[model] == [pytest.approx(each["logprobs"], abs=1e-5) for each in wanted]
        texts = [tokenizer.decode(each["tokens"]).removesuffix("$") for each in wanted]
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage.prompt_tokens == 4
        assert answer.model == model

        messages: Any = [{"role": "user", "content": "407>"}]
        chat = client.chat.completions.create(messages=messages, **options)
        assert [choice.message.content for choice in chat.choices] == texts
        streamed = ["", ""]
        for part in client.completions.create(prompt="407>", stream=True, **options):
            streamed[part.choices[0].index] += part.choices[0].text
        assert streamed == texts
        parts = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        *chunks, last = list(parts)
        assert "".join(each.choices[0].delta.content or "" for each in chunks if not each.choices[0].index) == texts[0]
        assert last.usage.completion_tokens == sum(len(each["tokens"]) for each in wanted)
    assert logprobs["tiny"] != logprobs[path], "saved weights are not those of the base model"
    two = client.completions.create(model="tiny", prompt=["4", "07"], max_tokens=2, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]

    for wrong, error, text in (
        (
            {"model": "gpt-5"},
            openai.NotFoundError,
            "there is no model 'gpt-5' here that you may use; base models: tiny",
        ),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1"),
        ({"prompt": "letters"}, openai.BadRequestError, "no token for"),
        ({"max_tokens": 1_000}, openai.BadRequestError, "max_tokens may be 252 here"),
        ({"prompt": "letters", "stream": True}, openai.BadRequestError, "no token for"),
    ):
        with pytest.raises(error, match=text):
            client.completions.create(**{"model": "tiny", "prompt": "407>", **wrong})
    for model in (path, path + "x"):
        with pytest.raises(openai.NotFoundError, match="there is no model 'tinker://"):
            other.completions.create(model=model, prompt="407>")
    with pytest.raises(openai.AuthenticationError, match="Invalid API key: expected Authorization: Bearer tml-"):
        openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-0", max_retries=0).models.list()
    api.reply(f"training_runs/{path[9:].replace('/', '/checkpoints/', 1)}/publish", {})
    assert len(other.completions.create(model=path, prompt="407>").choices) == 1, "published"
    with pytest.raises(openai.NotFoundError, match="GET /oai/api/v1/engines"):
        client.get("/engines", cast_to=object)


async def lose_the_engine(cluster: Any, url: str, key: str) -> None:
    """Kill the engine in the midst of a stream, which continues."""
    options: Any = {"model": "tiny", "prompt": "1", "max_tokens": 250, "seed": 9, "extra_body": {"ignore_eos": True}}
    client = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=key, max_retries=0)
    parts: list[str] = []
    begun = trio.Event()

    def read() -> None:
        for part in client.completions.create(**options, stream=True):
            parts.append(part.choices[0].text)
            trio.from_thread.run_sync(begun.set)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, read)
        await begun.wait()
        (job,) = [each for each in await cluster.list_jobs() if each.name.startswith("tinker-engine")]
        os.kill(job.attempts[-1].pid, signal.SIGKILL)
    whole = await trio.to_thread.run_sync(lambda: client.completions.create(**options))
    assert "".join(parts) == whole.choices[0].text
    (job,) = [each for each in await cluster.list_jobs() if each.name.startswith("tinker-engine")]
    assert len(job.attempts) == 2
