"""Runs whose episodes are agents: an unmodified OpenAI client in a thread, asyncio, another process; and their end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl
from fray.rl.journal_file import read_failures
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]
MODEL = rl.TinyLlama(layers=1, width=16, mlp=32)
EXAMPLES = Path(__file__).parents[3] / "examples"
IN_A_PROCESS = """
import json, sys, urllib.request
body = {"messages": [{"role": "user", "content": "7>"}], "max_tokens": 2, "ignore_eos": True}
request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode())
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def two_turns(url: str) -> str:
    import httpx
    import openai

    extra: Any = {"ignore_eos": True}
    with openai.OpenAI(base_url=url, api_key="-", http_client=httpx.Client(verify=False)) as client:
        messages: Any = [{"role": "user", "content": "7>"}]
        first = client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=3, extra_body=extra)
        messages += [first.choices[0].message, {"role": "user", "content": "+8>"}]
        parts = client.chat.completions.create(
            model="gpt-4o", messages=messages, max_tokens=2, stream=True, extra_body=extra
        )
        return "".join(part.choices[0].delta.content or "" for part in parts)


async def two_at_a_time(url: str) -> str:
    import httpx
    import openai

    connections = httpx.AsyncClient(verify=False)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", http_client=connections) as client:
        asked = [client.completions.create(model="any", prompt=f"{digit}>", max_tokens=2) for digit in "34"]
        return "".join(answer.choices[0].text for answer in await asyncio.gather(*asked))


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    url = rl.agent_url(task)
    assert url == rl.agent_url(task)
    match task["agent"]:
        case "thread":
            text = await trio.to_thread.run_sync(two_turns, rl.agent_url(task))
        case "asyncio":
            text = await trio.to_thread.run_sync(lambda: asyncio.run(two_at_a_time(rl.agent_url())))
        case _:
            done = await trio.run_process([sys.executable, "-c", IN_A_PROCESS, url], capture_stdout=True)
            text = done.stdout.decode().removesuffix("\n")
    last = "".join(reply.text for reply in llm.replies)[-len(text) :]
    assert sorted(text) == sorted(last), (task, text, last)  # those of asyncio come in any order
    return rl.score(reward=1.0, agent=task["agent"])


def test_agents_are_trained_on_the_turns_that_the_servers_recorded() -> None:
    run = rl.Run(
        model=MODEL,
        data=[{"agent": name} for name in ("thread", "asyncio", "process")],
        rollout=solve,
        trainer=None,
        max_attempts=1,
        shuffle=False,
        progress=False,
    )
    result = trio.run(run.main)
    assert result.status is not None
    assert result.status.dropped == {"collected": 3}, result.status.last_failure
    found: dict[str, list[Any]] = {}
    for trajectory in result.trajectories:
        found.setdefault(trajectory["agent"], []).append(trajectory)
    (merged,) = found["thread"]  # its second turn continues the first
    assert merged["loss_mask"] == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert len(found["asyncio"]) == 2
    assert [one["loss_mask"] for one in found["process"]] == [[0, 0, 1, 1]]
    assert all(len(one["logprobs"]) == len(one["tokens"]) for one in result.trajectories)


WITH_VARIABLES = """
import json, os, urllib.request
body = {"messages": [{"role": "user", "content": "7>"}], "max_tokens": 2, "ignore_eos": True}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), key)
json.load(urllib.request.urlopen(request))
"""


def status_of(url: rl.AgentUrl, path: str, key: str) -> int:
    body, context = (
        json.dumps({"prompt": "7>", "max_tokens": 1}).encode(),
        ssl.create_default_context(cafile=url.ca_file),
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{path}/completions", body, headers)
        with urllib.request.urlopen(request, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def solve_elsewhere(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    url = rl.agent_url(task)
    assert url.startswith("https://127.0.0.2:")
    assert url.api_key not in repr(url)
    await trio.run_process([sys.executable, "-c", WITH_VARIABLES], env={**os.environ, **url.env})
    server = f"https://127.0.0.2:{task['port']}/v1"
    asked = [(url, ""), (url, "other"), (url, url.api_key), (server, "other"), (server, url.api_key)]
    answers = [await trio.to_thread.run_sync(status_of, url, *each) for each in asked]
    return rl.score(reward=1.0, answers=answers, turns=len(llm.replies))


def test_agents_and_clients_on_other_machines_use_tls_and_the_key_of_the_run(tmp_path: Path) -> None:
    port = free_port("127.0.0.2")
    run = rl.Run(
        model=MODEL,
        data=[{"port": port}],
        rollout=solve_elsewhere,
        trainer=None,
        max_attempts=1,
        http_host="127.0.0.2",
        inference_port=port,
        output=tmp_path,
        progress=False,
    )
    result = trio.run(run.main)
    assert result.status is not None
    assert result.status.dropped == {"collected": 1}, result.status.last_failure
    found = {(one["turns"], *one["answers"]) for one in result.trajectories}
    # Requests to a server itself are of no episode.
    assert found == {(2, 401, 401, 200, 401, 200)}
    key = (tmp_path / "http" / "key").read_text()
    others = [one for one in tmp_path.rglob("*") if one.is_file() and one != tmp_path / "http" / "key"]
    assert others
    assert not [one for one in others if key.encode() in one.read_bytes()]


def ask_on(url: str) -> None:
    import httpx
    import openai

    connections = httpx.Client(verify=False)
    with openai.OpenAI(base_url=url, api_key="-", http_client=connections, max_retries=0) as client:
        while True:
            client.completions.create(model="any", prompt="7>", max_tokens=50)


async def never_ends(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    await trio.to_thread.run_sync(ask_on, rl.agent_url(task))
    raise AssertionError


def test_an_agent_that_asks_on_ends_with_its_episode() -> None:
    run = rl.Run(
        model=MODEL,
        data=[{}],
        rollout=never_ends,
        trainer=None,
        max_attempts=1,
        rollout_timeout_s=2.0,
        on_error="continue",
        progress=False,
    )
    status = trio.run(run.main).status
    assert status is not None
    # The thread ends by the error that its client gets, and with it the episode: Trio waits for threads.
    assert status.dropped == {"timeout": 1}
    assert "there is no such session: its episode has ended" in status.last_failure


@pytest.mark.parametrize("example", ["rl_agent.py", "rl_tools.py"])
def test_an_example_is_trained_for_three_updates(example: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / example), "--steps", "3", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["updated"] == 1 for line in lines)
    assert all(line["mismatch_k3"] < 1e-5 for line in lines)


def ask_once(url: str, prompt: str) -> None:
    import httpx
    import openai

    connections = httpx.Client(verify=False)
    with openai.OpenAI(base_url=url, api_key="-", http_client=connections, max_retries=0) as client:
        client.completions.create(model="any", prompt=prompt, max_tokens=2)


async def asks_once(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    await trio.to_thread.run_sync(ask_once, rl.agent_url(task), task["prompt"])
    if task["prompt"] == "1>":
        await trio.to_thread.run_sync(ask_once, rl.agent_url(task), "1" * 300)  # a later turn: its own mistake
    return rl.score(reward=1.0)


def test_a_task_of_an_agent_whose_prompt_is_too_long_is_dropped_at_once(tmp_path: Path) -> None:
    run = rl.Run(
        model=MODEL,
        data=[{"prompt": prompt} for prompt in ("7>", "3" * 300, "12345>", "1>")],
        rollout=asks_once,
        trainer=None,
        max_attempts=2,
        max_prompt_length=5,
        shuffle=False,
        on_error="continue",
        output=tmp_path,
        progress=False,
    )
    status = trio.run(run.main).status
    assert status is not None
    assert status.dropped == {"collected": 1, "PromptTooLong": 2, "BadRequestError": 1}
    assert status.repeated == {"BadRequestError": 1}
    details = {one["task"]: one["detail"] for one in read_failures(tmp_path / "rollouts")}
    assert details["0-1-0"].endswith("PromptTooLong: the prompt has 300 tokens; max_prompt_length is 5")
    assert details["0-2-0"].endswith("PromptTooLong: the prompt has 6 tokens; max_prompt_length is 5")
    assert "openai.BadRequestError" in details["0-2-0"]
