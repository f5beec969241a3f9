"""Malformed bodies to every route: refused with words, on a connection that continues, and nothing else is harmed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import BaseRoute, Mount, Route

from fray import tinker
from fray.tinker.core.limits import UserLimits
from fray.tinker.opentinker.inference_routes import inference_routes
from fray.tinker.opentinker.scheduler_routes import scheduler_routes
from fray.tinker.opentinker.training_routes import training_routes
from fray.tinker.operations.routes import operator_routes
from fray.tinker.tinker_api.openai_routes import openai_routes
from fray.tinker.tinker_api.routes import tinker_routes
from fray.tinker.wire.dataproto import DataProto, TensorRecord, encode_data_proto
from fray.tinker.wire.messages import MESSAGES
from tests.tinker.services import REWARD, running
from tests.tinker.test_tinker_api import Api

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

GONE = object()
DEEP = json.loads("[" * 400 + "]" * 400)
JUNK: list[Any] = [
    *(GONE, None, True, -1, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x" * 5_000, "\ud800", "\0", "../../x"),
    *([], {}, [[], []], ["\ud800"], [-1], [10**30], {"a": {"type": "x"}}, DEEP),
]
RAW = [
    *(b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe\x00", b"\x80abc", b'{"a":1,}', b'{"a": 1e999}', b"{}"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b'{"seq_id": ' + b"9" * 5_000 + b"}"),
]
IDS = {
    name: TensorRecord(np.array([row], np.int64)) for name, row in (("input_ids", [4, 0]), ("attention_mask", [1, 1]))
}
BATCH = encode_data_proto(DataProto(IDS, {"ground_truth": np.array(["407$"], object)}))
CONFIG = {"data": {"max_response_length": 2}, "actor_rollout_ref": {"rollout": {"n": 2}}, "trainer": {"seed": 1}}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
SAMPLING = {"max_tokens": 2, "temperature": 1.0, "top_k": 3, "top_p": 0.9, "seed": 1, "stop": ["4"]}
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
CHAT = {"model": "tiny", "max_tokens": 2, "n": 1, "seed": 1, "stop": ["4"], "temperature": 1.0, "stream": False}


def bodies_of(model: str, session: str, future: str, saved: str) -> dict[str, dict[str, Any]]:
    """Return a body that each route takes, by its method and path; those that need none are not there."""
    of_model = {"model_id": model, "seq_id": 0}
    made = {
        "session_id": session,
        "user_metadata": {"a": "b"},
        "model_seq_id": 0,
        "optimizer_config": {"type": "adamw"},
    }
    training = {
        "set_generation_config": {"temperature": 1.0, "top_p": 1.0, "top_k": 3, "max_new_tokens": 2},
        "upload_reward_function": {"function_name": "share", "source_code": REWARD},
        **{key: {"config_overrides": CONFIG} for key in ("set_config", "override_config")},
        "init_workers": {"total_steps": 2},
        "resume": {"path": "/"},
        **{key: {"batch_data": BATCH} for key in ("train_step", "validate")},
    }
    tinker_api: dict[str, Any] = {
        "POST create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0"},
        "POST session_heartbeat": {"session_id": session},
        "POST create_model": {**made, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1, "train_mlp": True}},
        "POST get_info": {"model_id": model},
        "POST optim_step": {**of_model, "adam_params": ADAM},
        "POST save_weights": {**of_model, "path": "a", "ttl_seconds": 7_200, "overwrite": True, "user_metadata": {}},
        "POST save_weights_for_sampler": {**of_model, "path": "a", "ttl_seconds": 7_200, "kind": "snapshot"},
        "POST save_weights_external": {**of_model, "path": "a", "age_encryption_recipients": None},
        "POST load_weights": {**of_model, "path": saved, "optimizer": True},
        "POST create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        "POST asample": {
            "base_model": "tiny",
            "num_samples": 1,
            "prompt": PROMPT,
            "sampling_params": SAMPLING,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
            "prompt_logprobs_last_n": 1,
        },
        "POST retrieve_future": {"request_id": future},
        "POST weights_info": {"tinker_path": saved},
        "PUT training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl": {"ttl_seconds": 7_200},
    }
    return {
        "POST /submit_job": {"config": CONFIG, "enable_agent_loop": False, "wandb_key": "x", "num_gpus": 0},
        "POST /submit_inference_job": {"model_path": "tiny", "num_gpus": 0, "max_model_len": 8, "tokenizer_path": "x"},
        **{f"POST /jobs/{{address}}/api/v1/{kind}": body for kind, body in training.items()},
        "POST /fray/keys": {"name": "eve", "is_admin": False},
        **{key.replace(" ", " /api/v1/"): body for key, body in tinker_api.items()},
        "POST /oai/api/v1/completions": {**CHAT, "prompt": "407>", "logprobs": 1, "echo": True},
        "POST /oai/api/v1/chat/completions": {**CHAT, "messages": [{"role": "user", "content": "407>"}]},
    }


def routes_of(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Return method and path of each route."""
    for route in routes:
        if isinstance(route, Mount):
            yield from ((method, route.path + path) for method, path in routes_of(list(route.routes)))
        elif isinstance(route, Route):
            yield from ((method, route.path) for method in sorted(route.methods or ()) if method != "HEAD")


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of each value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, one in inner for each in ((*place, key), *places(one, (*place, key)))]


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a body with another value at a place, or without one."""
    body = copy.deepcopy(body)
    inside: Any = body
    for key in place[:-1]:
        inside = inside[key]
    if value is GONE:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return body


class Client:
    """One connection, which has to stay, whatever is sent."""

    def __init__(self, url: str, key: str, model: str, other_model: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc)
        self._headers = {"Authorization": f"Bearer {key}", "X-API-Key": key.replace("otk_", "tml-")}
        self.model, self.other_model = model, other_model
        self.wrong: list[str] = []
        self.futures: list[str] = []
        self.seq = 2
        """Number of the model's next request: one that was refused leaves no gap, for which others would wait."""

    def send(self, method: str, path: str, body: bytes, kind: str = "application/json") -> None:
        try:
            self._connection.request(method, path, body, {**self._headers, "Content-Type": kind})
            response = self._connection.getresponse()
            text = response.read()
        except (RemoteDisconnected, ConnectionError) as error:
            self.wrong.append(f"{method} {path} {body[:300]!r}: {error!r}")
            self._connection.close()
            return
        answer = json.loads(text) if text and "json" in response.headers.get("Content-Type", "") else None
        is_refused = isinstance(answer, dict) and ("detail" in answer or "error" in answer)
        if response.status >= 500 or response.will_close or (response.status >= 400 and not is_refused):
            self.wrong.append(f"{method} {path} {body[:300]!r}: {response.status} {text[:300]!r}")
        if isinstance(answer, dict) and isinstance(answer.get("request_id"), str):
            owner, _, number = answer["request_id"].rpartition(":")
            if owner != self.other_model:
                self.futures.append(answer["request_id"])
            if owner == self.model:
                self.seq = int(number) + 1


def send_malformed(client: Client, bodies: dict[str, dict[str, Any]], paths: dict[str, str]) -> None:
    """Send each route what is not JSON, and its body with one thing wrong at a time."""
    routes = [
        *(*scheduler_routes(None), *training_routes(None), *inference_routes(None)),  # type: ignore[arg-type]
        *(*operator_routes(None, None), *tinker_routes(None, None), *openai_routes(None, None)),  # type: ignore[arg-type]
    ]
    found = list(routes_of(routes))
    assert bodies.keys() <= {f"{method} {path}" for method, path in found}
    for method, path in found:
        body = bodies.get(f"{method} {path}")
        for name, value in paths.items():
            path = path.replace(f"{{{name}}}", value)
        if method == "GET":
            client.send(method, path, b"")
            continue
        for raw in RAW if body is not None else RAW[:6]:
            client.send(method, path, raw)
        if body is not None:
            send_changed(client, method, path, body)


def send_changed(client: Client, method: str, path: str, body: dict[str, Any]) -> None:
    client.send(method, path, json.dumps(body).encode()[:-1])

    @settings(max_examples=8, deadline=None)
    @given(st.sampled_from(places(body)), st.sampled_from(JUNK))
    def send(place: tuple[Any, ...], value: Any) -> None:
        known = {"seq_id": client.seq} if "seq_id" in body else {}
        client.send(method, path, json.dumps(changed({**body, **known}, place, value)).encode())

    send()


def send_protobuf(client: Client) -> None:
    """Send a message of protobuf with bytes changed, or cut off."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=client.other_model, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = 2
    datum.loss_fn_inputs["target_tokens"].dense = np.array([1, 2], "<i8").tobytes()
    content = message.SerializeToString()

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(content) - 1), st.integers(0, 255), st.booleans())
    def send(at: int, byte: int, is_cut: bool) -> None:
        client.send(
            "POST",
            "/api/v1/forward_backward",
            content[:at] if is_cut else content[:at] + bytes([byte]) + content[at + 1 :],
            "application/x-protobuf",
        )

    send()


@pytest.mark.within(120)
async def test_malformed_bodies_are_refused_and_harm_nothing_else(tmp_path: Path) -> None:
    limits = UserLimits(jobs=1)
    async with running(tmp_path, auth=True, user_limits=limits) as (_, service):
        key = await service.create_key("root", is_admin=True)

        def converse() -> None:
            scheduler = tinker.SchedulerClient(service.url, key)
            job = scheduler.submit_job({})
            api = Api(service.url, key.replace("otk_", "tml-"))
            model = api.model()
            saving = api.post("save_weights", model_id=model, seq_id=1, path="here")
            saved = api.result(saving)["path"]
            training = tinker.HTTPTrainingClient(scheduler.wait_until_running(job["job_id"])["server_url"])
            training.upload_reward_function("share", REWARD)
            training.set_config(CONFIG)
            training.init_workers(2)

            client = Client(service.url, key, model, api.model())
            paths = {
                "address": training.server_url.rpartition("/")[2],
                "job_id": "none",
                "job": "none",
                "name": "none",
                "session_id": "none",
                "sampler_id": "none",
                "token": "none",
                "run_id": model,
                "path:path": "none",
                "checkpoint_id:path": "weights/here",
                "checkpoint_id": "weights/here",
                "model:path": "tiny",
            }
            bodies = bodies_of(model, model.split(":")[0], saving["request_id"], saved)
            send_malformed(client, bodies, paths)
            send_protobuf(client)
            # JSON can have what UTF-8 cannot, and what had to be listed then could not be shown.
            half = {"user_metadata": {"a": "\ud800"}}
            for number, name in enumerate(("create_session", "create_model", "save_weights"), 10_000):
                body = {**bodies[f"POST /api/v1/{name}"], **half, "model_seq_id": number, "seq_id": number}
                client.send("POST", f"/api/v1/{name}", json.dumps(body).encode())
            # What was accepted can be shown.
            shown = ("training_runs?limit=1000", "checkpoints?limit=1000", "sessions?limit=1000")
            for path in (*(f"/api/v1/{each}" for each in shown), "/fray/status", "/fray/usage?days=400", "/list_jobs"):
                client.send("GET", path, b"")
            for session in api.reply(shown[2], method="GET").body["sessions"]:
                client.send("GET", f"/api/v1/sessions/{session}", b"")
            assert not client.wrong, "\n".join(client.wrong)

            # What was accepted has an answer, and the next request is executed.
            assert training.train_step(BATCH)["metrics"]
            for future in client.futures:
                api.result({"request_id": future})
            assert "metrics" in api.result(api.forward(model, client.seq).body)

        await trio.to_thread.run_sync(converse)
