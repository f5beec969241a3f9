"""Fray's client for OpenTinker's protocol and rewards of a reward server, against a plain HTTP server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("httpx", reason="needs httpx: make test-tinker")

from fray import tinker
from fray.tinker.http_client import JsonConnection, ServerUnreachable
from fray.tinker.opentinker.client import MAX_RETRIES, TrainingServiceError, _Retries
from fray.tinker.rewards.remote import TRIES, RemoteReward
from fray.tinker.rewards.uploaded import RewardError
from fray.tinker.training_runner import TrainingRunner
from fray.tinker.wire.dataproto import encode_data_proto
from tests.tinker.services import MODEL

pytestmark = pytest.mark.torch

LOST = -1
"""Status that stands for a connection which ends without an answer."""


class Server:
    """HTTP server that answers what it is given, the last one again and again, and keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, {})]
        self.got: list[tuple[str, str, Any, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request_id = self.headers.get("X-Request-ID", "")
                server.got.append((self.command, self.path, json.loads(body or b"null"), request_id))
                status, value = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                if status == LOST:
                    self.close_connection = True
                    return
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def retries(url: str, pauses: list[float], **options: Any) -> _Retries:
    return _Retries(JsonConnection(url, timeout_s=10.0), sleep=pauses.append, **options)


def test_a_request_is_sent_again_with_its_id_after_5_10_and_then_20_seconds(server: Server) -> None:
    server.answers = [*[(LOST, None)] * 5, (200, {"global_steps": 1})]
    pauses: list[float] = []
    assert retries(server.url, pauses).ask("POST", "/train_step", {"batch_data": {}}) == {"global_steps": 1}
    assert pauses == [5.0, 10.0, 20.0, 20.0, 20.0]
    assert len(server.got) == 6
    assert len({request_id for *_, request_id in server.got}) == 1
    assert server.got[0][3]


def test_a_server_that_is_away_is_asked_a_thousand_times_more(server: Server) -> None:
    server.close()
    pauses: list[float] = []
    with pytest.raises(ServerUnreachable):
        retries(server.url, pauses).ask("GET", "/status")
    assert len(pauses) == MAX_RETRIES == 1_000
    assert sum(pauses) == 5 + 10 + 998 * 20


def test_an_answer_is_never_asked_for_again(server: Server) -> None:
    server.answers = [(500, {"detail": "broken"})]
    pauses: list[float] = []
    with pytest.raises(TrainingServiceError, match="/status: 500: broken"):
        retries(server.url, pauses).ask("GET", "/status")
    assert (pauses, len(server.got)) == ([], 1)


def test_a_scheduler_at_localhost_makes_the_addresses_of_jobs_local(server: Server) -> None:
    away = {"job_id": "a", "status": "RUNNING", "server_url": "http://10.0.0.5:38000/jobs/a-b"}
    answers: list[Any] = [away, {"jobs": [away]}, {**away, "vllm_server_url": away["server_url"]}, away]
    server.answers = [(200, each) for each in answers]
    scheduler = tinker.InferenceSchedulerClient(f"http://localhost:{server.port}")
    local = "http://localhost:38000/jobs/a-b"
    assert scheduler.submit_job({})["server_url"] == local
    assert [job["server_url"] for job in scheduler.list_jobs()] == [local]
    assert scheduler.submit_inference_job("m")["vllm_server_url"] == local
    assert scheduler.wait_until_running("a")["server_url"] == local
    assert tinker.SchedulerClient(server.url).job_status("a")["server_url"] == away["server_url"], "not at localhost"


@pytest.mark.parametrize("cancel", [False, True])
def test_the_end_of_a_job_ends_the_reward_server_that_its_program_started(server: Server, cancel: bool) -> None:
    reward_server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    called: list[str] = []
    manager = tinker.SchedulerClientLifecycleManager(
        tinker.SchedulerClient(server.url), "a", reward_server=reward_server
    )
    manager.add_cleanup(lambda: called.append("first"))
    manager.add_cleanup(lambda: called.append("second"))
    for _ in range(2):
        manager.end(cancel=cancel)
    assert reward_server.returncode not in (None, 0)
    assert called == ["first", "second"]
    wanted = ("DELETE", "/cancel_job/a") if cancel else ("POST", "/complete_job/a")
    assert [row[:2] for row in server.got] == [wanted]


def test_a_scheduler_that_is_away_keeps_no_reward_server_running(server: Server) -> None:
    server.close()
    reward_server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    manager = tinker.SchedulerClientLifecycleManager(
        tinker.SchedulerClient(server.url, max_retries=0), "a", reward_server=reward_server
    )
    with pytest.raises(ServerUnreachable):
        manager.end()
    assert reward_server.returncode is not None


# Rewards -------------------------------------------------------------------------------------------------------------


def test_a_reward_server_gets_each_sample_and_answers_a_number_or_a_dict(server: Server) -> None:
    server.answers = [(200, 0.25), (200, {"score": 1})]
    reward = RemoteReward(f"{server.url}/deep/", timeout_s=10.0)
    assert reward.scores([("digits", "40", "407", {"at": 1}), ("digits", "123", "123", None)]) == [0.25, 1.0]
    first = {"data_source": "digits", "solution_str": "40", "ground_truth": "407", "extra_info": {"at": 1}}
    assert [row[:3] for row in server.got] == [
        ("POST", "/deep/compute_reward", first),
        ("POST", "/deep/compute_reward", {**first, "solution_str": "123", "ground_truth": "123", "extra_info": None}),
    ]
    reward.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((503, {"detail": "busy"}), "status 503: {'detail': 'busy'}"),
        ((200, {"reward": 1}), "TypeError: float"),
        ((200, b"Infinity"), "ValueError: the score is inf"),
        ((200, b"no JSON"), "ValueError: could not convert"),
        ((LOST, None), "ConnectionError: "),
    ],
)
def test_a_reward_is_asked_for_three_times(server: Server, answer: tuple[int, Any], problem: str) -> None:
    reward = RemoteReward(server.url, timeout_s=10.0)
    server.answers = [answer, answer, (200, 1.0)]
    assert reward.scores([("", "", "", None)]) == [1.0]
    server.answers = [(200, 0.5), answer]
    with pytest.raises(RewardError) as caught:
        reward.scores([("", "a", "", None), ("", "b", "", None)])
    assert f"{server.url}/compute_reward for sample 1, 3 tries: {problem}" in str(caught.value)
    assert [row[2]["solution_str"] for row in server.got[TRIES:]] == ["a", *["b"] * TRIES]
    reward.close()


def test_a_job_with_the_endpoint_of_a_reward_server_trains_on_its_scores(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    runner = TrainingRunner({"tiny": MODEL}, {}, tmp_path)

    def ask(number: int, kind: str, **body: Any) -> dict[str, Any]:
        return runner.execute(number, kind, json.dumps(body).encode()).body

    config = {
        "custom_reward_function.endpoint": server.url,
        "data.max_response_length": 2,
        "actor_rollout_ref.rollout.n": 2,
    }
    ask(1, "set_config", config_overrides=config)
    assert ask(2, "init_workers")["status"] == "success", "no reward function is needed"
    server.answers = [(200, 0.25), (200, 0.75), (200, {"score": 1.0}), (200, 0.0)]
    batch = encode_data_proto({"non_tensor_batch": {"raw_prompt": ["407>", "9>"], "ground_truth": ["407$", "9$"]}})
    assert ask(3, "train_step", batch_data=batch)["metrics"]["training_step_reward"] == 0.5
    assert [row[2]["ground_truth"] for row in server.got] == ["407$", "407$", "9$", "9$"]
    server.answers = [(500, "broken")]
    failed = ask(4, "train_step", batch_data=batch)
    assert failed["status"] == "error"
    assert "/compute_reward for sample 0, 3 tries: status 500: broken" in failed["error"]
    runner.close()
