"""Training with environment servers: episodes of several turns, servers that fail, die, or answer nonsense."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import trio

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fray import tinker  # noqa: E402
from fray.rl.core.versions import VersionName  # noqa: E402
from fray.rl.inference.requests import Sampling  # noqa: E402
from fray.tinker import game  # noqa: E402
from fray.tinker.core.environments import EnvironmentSettings, environments_of, shard_of  # noqa: E402
from fray.tinker.core.training_config import ConfigError, settings_of  # noqa: E402
from fray.tinker.environments.client import EnvironmentClient, EnvironmentFailed, read_environments  # noqa: E402
from fray.tinker.environments.episodes import AgentLoopPlan, failures_of, roll_out  # noqa: E402
from fray.tinker.opentinker.client import TrainingServiceError  # noqa: E402
from fray.tinker.wire.prompts import PromptRow  # noqa: E402
from tests.tinker.services import MODEL, running  # noqa: E402

Answer = Callable[[str, dict[str, Any]], Any]
"""Answer to a path and a body: JSON, or bytes that are sent as they are; None closes the connection."""


@contextmanager
def scripted(answer: Answer) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Serve answers of a script over real sockets; return the address and the requests."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            found = answer(self.path, body)
            if found is None:
                self.connection.close()
                return
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            status = found.get("status", 200) if isinstance(found, dict) else 200
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Copy:
    """Game of two turns: each shows a digit, and a reply that begins with it has the reward .5."""

    def reset(self, digits: str) -> str:
        self.digits, self.at = digits, 0
        return f"{digits[0]}>"

    def step(self, action: str) -> game.StepResult:
        reward = 0.5 * (action[:1] == self.digits[self.at])
        self.at += 1
        done = self.at == len(self.digits)
        return game.StepResult("" if done else f"{self.digits[self.at]}>", reward, done)

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return "="


def config_of(copy_url: str, scripted_url: str) -> dict[str, Any]:
    environments = [
        {"name": "copy", "config": {"env_endpoint": copy_url}},
        {"name": "scripted", "config": {"env_endpoint": scripted_url, "max_retries": 2}},
    ]
    text = json.dumps({"interaction": environments})
    return {
        "data": {"max_prompt_length": 8, "max_response_length": 8},
        "actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"optim": {"lr": 1e-3}}},
        "multi_turn": {"interaction_config_content": text, "max_tokens_per_turn": 2},
    }


def tasks(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"digits": "".join(rng.choices("0123456789", k=2))} for _ in range(count)]


# Configuration -------------------------------------------------------------------------------------------------------


def test_an_interaction_config_names_servers_on_consecutive_ports() -> None:
    text = """
        interaction:
          - name: gomoku
            class_name: somewhere.GymEnvironmentInteraction
            config: {env_endpoint: "http://games:8082/", env_shards: 3, env_timeout: 5, max_retries: 2}
          - name: math
            config: {env_host: "::1", env_port: 9000}
    """.replace('env_host: "::1"', "env_host: '[::1]'")
    found = read_environments(text)
    urls = ("http://games:8082", "http://games:8083", "http://games:8084")
    assert found["gomoku"] == EnvironmentSettings("gomoku", urls, 5.0, 2)
    assert found["math"].urls == ("http://[::1]:9000",)
    assert shard_of("instance", 1) == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[", "it is not YAML"),
        ("a: 1", "expected interaction: "),
        ("interaction: [{name: a}]", "interaction[0]: expected name and config"),
        ("interaction: [{config: {}}]", "interaction[0].config.env_endpoint: expected http://host:port, not None"),
        ("interaction: [{config: {env_endpoint: 'file:///etc/passwd'}}]", "expected http://host:port"),
        ("interaction: [{config: {env_endpoint: 'http://u:p@h:1'}}]", "expected http://host:port"),
        ("interaction: [{config: {env_endpoint: 'http://h:99999'}}]", "expected http://host:port"),
        (
            "interaction: [{config: {env_endpoint: 'http://h', env_shards: 2}}]",
            "env_shards=2 servers have consecutive ports",
        ),
        ("interaction: [{config: {env_endpoint: 'http://h:65535', env_shards: 2}}]", "end at 65536"),
        ("interaction: [{config: {env_port: 1, env_shards: 0}}]", "env_shards: expected an integer from 1"),
        ("interaction: [{config: {env_port: 1, env_timeout: [1]}}]", "expected seconds above 0, not a list"),
        ("interaction: [{config: {env_port: 1, max_retries: 99}}]", "max_retries: expected an integer from 1 to 20"),
        ("interaction: [{name: a, config: {env_port: 1}}, {name: a, config: {env_port: 2}}]", "that no other has"),
        ("!!python/object/apply:os.system [echo]", "it is not YAML"),
    ],
)
def test_an_interaction_config_that_cannot_be_used_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environments(text)
    assert error in str(caught.value)


def test_a_text_of_yaml_that_unfolds_is_refused_at_once() -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 20)}]" for n in range(1, 20))]
    text = "\n".join([*lines, "interaction: [{name: *a19, config: {env_port: 1}}]"])
    with pytest.raises(ConfigError, match=r"interaction\[0\].name: expected a text that no other has, not a list"):
        read_environments(text)


def test_turns_are_limited_by_either_key_and_0_is_no_limit() -> None:
    for keys, turns in (
        ({}, 10),
        ({"max_assistant_turns": 3}, 3),
        ({"max_user_turns": 2, "max_assistant_turns": 3}, 2),
        ({"max_user_turns": 0, "max_assistant_turns": 4}, 4),
    ):
        assert settings_of({"multi_turn": keys})[0].turns == turns
        assert settings_of({"actor_rollout_ref": {"rollout": {"multi_turn": keys}}})[0].turns == turns
    settings, unused = settings_of({"enable_agent_loop": True, "multi_turn": {"enable": False, "weave_project": "w"}})
    assert settings.has_agent_loop
    assert unused == ["multi_turn.weave_project"]


# Requests to servers -------------------------------------------------------------------------------------------------


def client_of(url: str, **settings: Any) -> EnvironmentClient:
    found = environments_of([{"name": "e", "config": {"env_endpoint": url, **settings}}])["e"]
    return EnvironmentClient(found, "job", sleep=lambda seconds: None)


def test_what_is_sent_has_the_task_the_ids_and_nothing_else() -> None:
    with scripted(lambda path, body: {"observation": "o", "reward": 1, "done": True}) as (url, seen):
        client = client_of(url)
        assert client.reset("i", {"digits": "42", "job_id": "another"}) == ("o", False)
        step = client.step("i", "4", 0, can_repeat=False)
        assert (step.observation, step.reward, step.done) == ("o", 1.0, True)
        client.finalize("i")
        client.close()
    ids = {"instance_id": "i", "job_id": "job"}
    assert seen == [("/reset", {"digits": "42"} | ids), ("/step", {"action": "4", "turn": 0} | ids), ("/finalize", ids)]


@pytest.mark.parametrize(
    ("answer", "error", "requests"),
    [
        ({"observation": 3}, "/step: 'reward' is missing; expected a finite number", 1),
        ({"reward": float("nan"), "done": True}, "'reward' is nan", 1),
        ({"reward": 1.0, "done": "no"}, "'done' is 'no'; expected true or false", 1),
        ({"reward": 1.0, "done": True, "observation": [1]}, "'observation' is [1]; expected a text", 1),
        (b"[1]", "status 200: [1]", 1),
        (b"\xff" * 10, "status 200: ", 1),
        (b"[" * 100_000, "status 200: [[", 1),
        (b" " * ((1 << 20) + 1), "the answer has more than 1048576 bytes", 1),
        ({"status": 302}, "status 302", 1),
        ({"status": 500, "detail": "it raised"}, "status 500: it raised", 1),
        ({"status": 503, "detail": "full"}, "status 503: full (3 tries)", 3),
        (None, "Server disconnected", 1),
    ],
)
def test_an_answer_that_is_nonsense_fails_with_its_reason(answer: Any, error: str, requests: int) -> None:
    with scripted(lambda path, body: answer) as (url, seen):
        client = client_of(url)
        with pytest.raises(EnvironmentFailed) as caught:
            client.step("i", "4", 0, can_repeat=False)
        client.close()
    assert error in str(caught.value)
    assert [path for path, _ in seen] == ["/step"] * requests, "an action is not sent twice, and no redirect followed"


def test_a_lost_answer_is_asked_for_again_where_the_server_counts_turns() -> None:
    answers: list[Any] = [None, None, {"reward": 1.0, "done": True}]
    with scripted(lambda path, body: answers.pop(0)) as (url, seen):
        client = client_of(url)
        assert client.step("i", "4", 0, can_repeat=True).reward == 1.0
        assert len(seen) == 3
        client.close()


def test_a_server_that_cannot_be_reached_is_not_waited_for_twice_in_a_batch() -> None:
    pauses: list[float] = []
    settings = EnvironmentSettings("e", ("http://127.0.0.1:9",), 1.0, 3)
    client = EnvironmentClient(settings, "job", sleep=pauses.append)
    for _ in range(4):
        with pytest.raises(EnvironmentFailed, match="3 tries"):
            client.reset("i", {})
    assert pauses == [0.5, 1.0]
    client.begin()
    with pytest.raises(EnvironmentFailed, match="3 tries"):
        client.reset("i", {})
    assert len(pauses) == 4
    client.close()


# Episodes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Any:
    from fray.rl.tensors.engine import Engine
    from fray.rl.tensors.language_model import load_model

    return Engine(load_model(MODEL), VersionName(0, 0), slots=64)


def plan_of(**settings: Any) -> AgentLoopPlan:
    values: dict[str, Any] = {
        "count": 2,
        "turns": 3,
        "max_prompt_length": 8,
        "max_response_length": 32,
        "max_turn_length": 3,
        "sampling": Sampling(max_tokens=32),
        "seed_of": lambda at, index, turn: at * 100 + index * 10 + turn,
    }
    return AgentLoopPlan(**{**values, **settings})


def rows(count: int, **fields: Any) -> list[PromptRow]:
    tokens = tuple(MODEL.tokenizer.encode("="))
    return [PromptRow(tokens, **fields) for _ in range(count)]


def test_tokens_of_the_model_count_and_those_of_observations_are_masked(engine: Any) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        observation = "7>" if path == "/reset" else f"{body['turn']}+"
        return {"observation": observation, "reward": float(body.get("turn", 0)), "done": False}

    for fields in ({}, {"messages": ({"role": "user", "content": "="},)}):
        with scripted(answer) as (url, seen):
            client = client_of(url)
            episodes = roll_out(engine, MODEL.tokenizer, rows(3, **fields), {"e": client}, plan_of())
            client.close()
        assert [(each.at, each.index) for each in episodes] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        for episode in episodes:
            (made,) = episode.trajectories
            actions = [body["action"] for path, body in seen if path == "/step" and body["instance_id"]]
            assert episode.failure == ""
            assert (episode.turns, episode.is_done, episode.reward) == (3, False, 3.0)
            assert made["step_rewards"] == [0.0, 1.0, 2.0]
            assert MODEL.tokenizer.decode(made["tokens"][:3]) == "=7>"
            text = "".join(
                char if counts else char.translate({ord(digit): "o" for digit in "0123456789+"})
                for char, counts in zip(MODEL.tokenizer.decode(made["tokens"]), made["loss_mask"], strict=True)
            )
            parts = text.split("oo")
            assert len(parts) == 3, text
            assert parts[0].startswith("=o>")
            assert all(part.rstrip("$") in actions for part in (parts[0][3:], *parts[1:]))
            counted = [logprob for logprob, counts in zip(made["logprobs"], made["loss_mask"], strict=True) if counts]
            assert all(logprob < 0 for logprob in counted)
            assert len(counted) == episode.tokens
        assert len({body["instance_id"] for path, body in seen if path == "/finalize"}) == 6


def test_episodes_repeated_from_their_records_are_equal_and_ask_no_server(engine: Any) -> None:
    failing: set[str] = set()

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/reset" and body.get("fails"):
            failing.add(body["instance_id"])
        if path == "/step" and body["turn"] == 1 and body["instance_id"] in failing:
            return {"status": 500, "detail": "by chance"}
        # Of its own for each request: threads answer them in any order.
        rng = random.Random(body["instance_id"] + path + str(body.get("turn")))
        return {
            "observation": rng.choice(["1>", "", "22+"]),
            "reward": rng.random(),
            "done": body.get("turn") == 1 and rng.random() < 0.5,
        }

    prompts = [*rows(3), *rows(1, task={"fails": True})]
    with scripted(answer) as (url, _):
        client = client_of(url)
        first = roll_out(engine, MODEL.tokenizer, prompts, {"e": client}, plan_of())
        client.close()
    records = json.loads(json.dumps([each.record for each in first]))
    unreachable = client_of("http://127.0.0.1:9")
    again = roll_out(engine, MODEL.tokenizer, prompts, {"e": unreachable}, plan_of(), records)
    shown = [(each.failure, each.reward, each.is_done, each.response) for each in first]
    assert [(each.failure, each.reward, each.is_done, each.response) for each in again] == shown
    assert [each.failure[-9:] for each in first] == [""] * 6 + ["by chance"] * 2
    for one, other in zip(first, again, strict=True):
        assert [each["tokens"] for each in one.trajectories] == [each["tokens"] for each in other.trajectories]


def test_replies_without_a_token_between_them_are_one_turn_with_both_rewards(engine: Any) -> None:
    with scripted(lambda path, body: {"observation": "", "reward": 1.0, "done": False}) as (url, _):
        client = client_of(url)
        plan = plan_of(count=4, sampling=Sampling(max_tokens=32, ignore_eos=True))
        episodes = roll_out(engine, MODEL.tokenizer, rows(1), {"e": client}, plan)
        client.close()
    assert [each.trajectories[0]["step_rewards"] for each in episodes] == [[3.0]] * 4


def test_an_episode_ends_where_the_response_has_no_room_and_fails_where_the_prompt_has_none(engine: Any) -> None:
    with scripted(lambda path, body: {"observation": "0123", "reward": 1.0, "done": False}) as (url, _):
        client = client_of(url)
        (short,) = roll_out(
            engine, MODEL.tokenizer, rows(1), {"e": client}, plan_of(count=1, turns=9, max_response_length=8)
        )
        (long,) = roll_out(engine, MODEL.tokenizer, rows(1), {"e": client}, plan_of(count=1, max_prompt_length=4))
        (other,) = roll_out(engine, MODEL.tokenizer, rows(1, task={"name": "chess"}), {"e": client}, plan_of(count=1))
        client.close()
    assert short.failure == ""
    assert short.turns < 9
    assert len(short.trajectories[0]["tokens"]) <= 5 + 8
    assert long.failure == "the prompt has 5 tokens, and data.max_prompt_length is 4"
    assert other.failure == "no environment 'chess' in the interaction config; expected one of e"


def test_an_observation_that_has_no_tokens_fails_its_sample_alone(engine: Any) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        bad = path == "/reset" and body["digits"] == "bad"
        return {"observation": "letters" if bad else "1>", "reward": 1.0, "done": True}

    with scripted(answer) as (url, _):
        client = client_of(url)
        found = [*rows(1, task={"digits": "bad"}), *rows(2, task={"digits": "1"})]
        episodes = roll_out(engine, MODEL.tokenizer, found, {"e": client}, plan_of())
        client.close()
    assert [bool(each.failure) for each in episodes] == [True, True, False, False, False, False]
    (text,) = failures_of(episodes)
    assert text.startswith("2 of 6 samples (prompt 0, sample 0, …): no token for ['e', 'l', 'r', 's', 't']")


# The service ---------------------------------------------------------------------------------------------------------


def started(url: str, config: dict[str, Any]) -> tinker.HTTPTrainingClient:
    scheduler = tinker.SchedulerClient(url, retry_delay_s=0.2)
    job = scheduler.submit_job({}, enable_agent_loop=True)
    client = tinker.HTTPTrainingClient(scheduler.wait_until_running(job["job_id"])["server_url"], retry_delay_s=0.2)
    with pytest.raises(TrainingServiceError, match="interaction config: it is not YAML"):
        client.set_config({"multi_turn.interaction_config_content": "["})
    client.set_config({"data.max_response_length": 8})
    with pytest.raises(TrainingServiceError, match="init_workers needs the environment servers first"):
        client.init_workers()
    client.set_config(config)
    client.init_workers()
    return client


def rewards_of(client: tinker.HTTPTrainingClient) -> list[float]:
    answers = [client.train_step(game.batch_of(Copy, tasks(2, step)))["metrics"] for step in range(4)]
    assert all(each["environment/turns_max"] == 2.0 for each in answers)
    assert {each["environment/failed"] for each in answers} == {0.0}
    return [each["training_step_reward"] for each in answers]


def check_failures(client: tinker.HTTPTrainingClient, state: dict[str, bool]) -> None:
    """Train with an environment whose episodes fail in part, and all."""

    def step(*digits: str) -> dict[str, Any]:
        return client.train_step(game.batch_of(Copy, [{"name": "scripted", "digits": each} for each in digits]))

    answered = step("00", "11")
    assert answered["metrics"]["environment/failed"] == 4.0
    assert answered["metrics"]["environment/episodes"] == 8.0
    assert answered["metrics"]["training_step_reward"] == 2.0
    assert answered["failures"] == [
        "4 of 8 samples (prompt 0, sample 0, …): /reset: 'observation' is ['no text']; expected a text"
    ]
    state["is_bad"] = True
    with pytest.raises(TrainingServiceError, match=r"4 of 4 samples .* status 500: lost its state"):
        step("11")
    assert client.status()["global_steps"] == 5
    validated = client.validate(game.batch_of(Copy, tasks(3)))
    assert validated["metrics"]["environment/episodes"] == 3.0
    assert validated["samples"][0]["input"][2:] == ">"


@pytest.mark.within(120)
async def test_episodes_are_trained_over_a_kill_of_the_engine_and_failures_of_servers(tmp_path: Path) -> None:
    state = {"is_bad": False}

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/step" and state["is_bad"] and body["turn"] == 1:
            return {"status": 500, "detail": "lost its state"}
        if path == "/reset" and body["digits"] == "00":
            return {"observation": ["no text"]}
        return {"observation": "1>", "reward": 1.0, "done": path == "/step" and body["turn"] == 1}

    async with running(tmp_path) as (cluster, service), game.serve(Copy) as server:
        with scripted(answer) as (url, seen):
            config = config_of(server.url, url)
            client = await trio.to_thread.run_sync(started, service.url, config)
            undisturbed = await trio.to_thread.run_sync(rewards_of, client)
            await trio.to_thread.run_sync(check_failures, client, state)
            job_id = client.server_url.rsplit("/", 1)[1].split("-")[0]
            assert {body["job_id"] for _, body in seen} == {job_id}
        client = await trio.to_thread.run_sync(started, service.url, config)
        found: list[float] = []

        async def train() -> None:
            found.extend(await trio.to_thread.run_sync(rewards_of, client))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            while True:
                job = (await service.status())["jobs"][-1]
                if (job["global_steps"] or 0) >= 2:
                    break
                await trio.sleep(0.01)
            name = f"tinker-{job['job_id']}"
            (pid,) = [each.attempts[-1].pid for each in await cluster.list_jobs() if each.name == name]
            os.kill(pid, signal.SIGKILL)
        assert found == undisturbed

        def after() -> None:
            assert list(tmp_path.glob("jobs/*/snapshots/global_step_*")), "not all steps are repeated"
            with pytest.raises(TrainingServiceError, match=r"4 of 4 samples .*\(2 tries\)"):
                client.train_step(game.batch_of(Copy, [{"name": "scripted", "digits": "11"}]))
            assert client.status()["global_steps"] == 4

        await trio.to_thread.run_sync(after)


@pytest.mark.within(120)
async def test_the_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import tinker_game

    result = await tinker_game.serve_and_train(6)
    rewards = result["rewards"]
    assert fmean(rewards[:2]) < 0.25
    assert fmean(rewards[-2:]) > fmean(rewards[:2])
    assert 0.0 <= result["validation"] <= 1.0
