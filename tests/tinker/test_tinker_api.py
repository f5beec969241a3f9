"""Routes of the Tinker API with real processes, without the SDK: order, repetitions, sessions, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from fray import rl, tinker
from fray.tinker.http_client import JsonConnection, JsonReply
from fray.tinker.wire.messages import MESSAGES
from tests.tinker.services import warm_cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MODEL = rl.TinyLlama(layers=1, width=16)
LORA = {"rank": 4, "seed": 1}


class Api:
    """Connection of one user."""

    def __init__(self, url: str, key: str = "") -> None:
        self._connection = JsonConnection(f"{url}/api/v1", headers={"X-API-Key": key})

    def reply(self, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> JsonReply:
        return self._connection.request(method, f"/{path}", body, headers=headers)

    def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        reply = self.reply(route, body)
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.body
        return found

    def result(self, future: dict[str, Any]) -> dict[str, Any]:
        while True:
            found = self.post("retrieve_future", request_id=future["request_id"])
            if found.get("type") != "try_again":
                return found

    def forward(self, model_id: str, seq: int, tokens: tuple[int, ...] = (1, 2)) -> JsonReply:
        message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].dtype = 2
        datum.loss_fn_inputs["target_tokens"].dense = np.array(tokens, "<i8").tobytes()
        headers = {"Content-Type": "application/x-protobuf"}
        return self.reply("forward_backward", message.SerializeToString(), **headers)

    def model(self) -> str:
        session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
        created = self.post("create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=LORA)
        model_id: str = self.result(created)["model_id"]
        return model_id


async def with_service(directory: Path, converse: Callable[[str, str, str], None], **options: Any) -> None:
    """Call `converse` in a thread with the address and the keys of two users."""
    async with warm_cluster() as cluster:
        serving = tinker.serve(models=[MODEL], threads=1, directory=directory, cluster=cluster, auth=True, **options)
        async with serving as service:
            keys = [(await service.create_key(name)).replace("otk_", "tml-") for name in ("ada", "bob")]
            await trio.to_thread.run_sync(converse, service.url, *keys)


async def test_requests_take_effect_once_and_in_order(tmp_path: Path) -> None:
    def converse(url: str, ada: str, bob: str) -> None:
        api = Api(url, ada)
        model = api.model()
        late = api.forward(model, 2).body
        first = api.forward(model, 1, (3, 4, 5)).body
        assert api.forward(model, 1, (3, 4, 5)).body == first, "the same request has the same future"
        changed = api.forward(model, 1, (3, 4))
        assert (changed.status, changed.body) == (
            409,
            {"detail": "number 1 was sent before with another body: a number or id stands for one request"},
        )
        assert len(api.result(first)["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
        assert len(api.result(late)["loss_fn_outputs"][0]["elementwise_loss"]["data"]) == 2
        assert list(api.result(late)["metrics"]) == ["loss:sum"]
        step = api.post("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.1})
        assert api.result(step)["metrics"]["grad_norm"] > 0
        loading = api.post("load_weights", model_id=model, seq_id=4, path="tinker://a/weights/b", optimizer=False)
        refused = api.result(loading)
        assert refused["category"] == "user"
        assert "allowed only as a model's first request" in refused["error"]

    await with_service(tmp_path, converse)


async def test_what_is_anothers_or_wrong_is_refused(tmp_path: Path) -> None:
    def converse(url: str, ada: str, bob: str) -> None:
        api, other = Api(url, ada), Api(url, bob)
        for key in ("", "tml-00000000000000000000000000000000"):
            refused = Api(url, key).reply("create_session", {})
            assert (refused.status, refused.body["detail"][:31]) == (401, "X-API-Key: missing or not a key")
        model = api.model()
        assert api.reply("healthz", method="GET").body == {"status": "ok"}
        assert api.reply("client/config", {}).body == {}
        assert api.reply("client/dynamic_config", {}).status == 404
        assert api.reply("telemetry", {"events": []}).body == {"status": "accepted"}
        sampler = api.post(
            "create_sampling_session", session_id=model.split(":")[0], sampling_session_seq_id=0, base_model="tiny"
        )["sampling_session_id"]
        saved = api.result(api.post("save_weights", model_id=model, seq_id=1, path="here"))["path"]
        asked = {"prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}, "sampling_params": {}}
        for path, body in (
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
            ("retrieve_future", {"request_id": f"{model}:1"}),
            ("retrieve_future", {"request_id": f"{sampler}:0"}),
            ("asample", {"sampling_session_id": sampler, "seq_id": 0, **asked}),
            ("session_heartbeat", {"session_id": model.split(":")[0]}),
        ):
            assert other.reply(path, body).status == 404, path
        assert other.reply("weights_info", {"tinker_path": saved}).status == 400
        assert other.reply(f"training_runs/{model}/checkpoints", method="GET").status == 404
        for path, body, status, sentence in (
            ("create_model", {"session_id": "x", "model_seq_id": 0}, 410, "session 'x' has ended"),
            ("optim_step", {"model_id": model, "seq_id": "2", "adam_params": {}}, 422, "seq_id: '2'; expected an int"),
            ("save_weights", {"model_id": model, "seq_id": 2, "ttl_seconds": 5}, 422, "ttl_seconds: 5; expected 3600"),
            (
                "save_weights",
                {"model_id": model, "seq_id": 2, "user_metadata": []},
                422,
                "user_metadata: []; expected an",
            ),
            ("create_session", {"user_metadata": {"a": "\ud800"}}, 422, "body: not JSON: 'utf-8' codec can't encode"),
            ("asample", {**asked, "base_model": "absent"}, 422, "base_model: 'absent' is not served here"),
            ("create_custom_loss", {}, 404, "POST /api/v1/create_custom_loss is not part of this service"),
            ("forward_backward", {}, 422, "expected application/x-protobuf"),
        ):
            refused = api.reply(path, body)
            assert refused.status == status, path
            assert sentence in refused.body["detail"]
        answer = api.result(api.post("asample", **asked, base_model="tiny"))
        assert len(answer["sequences"]) == 1

    await with_service(tmp_path, converse)


async def test_an_unloaded_model_and_a_finished_session_take_no_requests(tmp_path: Path) -> None:
    def converse(url: str, ada: str, bob: str) -> None:
        api, other = Api(url, ada), Api(url, bob)
        model = api.model()
        session = model.split(":")[0]
        waiting = api.forward(model, 2).body
        saved = api.result(api.post("save_weights", model_id=model, seq_id=1, path="here"))["path"]
        api.result(waiting)
        late = api.forward(model, 4).body
        assert other.reply("unload_model", {"model_id": model}).status == 404
        unloaded = api.post("unload_model", model_id=model)
        assert api.result(unloaded) == {"type": "unload_model", "model_id": model}
        assert api.post("unload_model", model_id=model) == unloaded
        refused = api.forward(model, 3)
        assert (refused.status, "was unloaded" in refused.body["detail"]) == (410, True)
        assert "was unloaded, or its session has ended, before this request" in api.result(late)["error"]
        assert "loss:sum" in api.result(waiting)["metrics"], "answers stay"

        loaded = api.post("load_weights", session_id=session, model_seq_id=1, path=saved, optimizer=True)
        second = api.result(loaded)["model_id"]
        assert other.reply(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status == 404
        assert api.reply(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status == 204
        assert api.reply(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status == 410
        assert api.forward(second, 1).status == 410
        assert api.reply("sessions", method="GET").body["sessions"] == []
        assert api.reply("weights_info", {"tinker_path": saved}).status == 200, "checkpoints stay"

    await with_service(tmp_path, converse)


async def test_a_session_without_heartbeats_ends_and_its_checkpoints_stay(tmp_path: Path) -> None:
    def converse(url: str, ada: str, bob: str) -> None:
        api = Api(url, ada)
        model = api.model()
        session = model.split(":")[0]
        saved = api.result(api.post("save_weights", model_id=model, seq_id=1, path="here"))["path"]
        while session in api.reply("sessions", method="GET").body["sessions"]:
            pass
        ended = api.reply("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        assert ended.status == 410
        assert "its checkpoints can be loaded" in ended.body["detail"]
        assert api.reply("session_heartbeat", {"session_id": session}).status == 410
        again = api.post("create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
        loaded = api.post("load_weights", session_id=again, model_seq_id=0, path=saved, optimizer=True)
        assert api.result(loaded)["model_id"] == f"{again}:train:0"

    await with_service(tmp_path, converse, session_s=3.0)
