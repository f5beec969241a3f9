"""Client of the Tinker API: a session whose models are trained and saved over HTTP. Sync, without Trio and torch.

Requests are repeated while the service does not answer. A repetition does no harm: the number of a request of a model
(``seq_id``) stands for one body, which is executed once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from attrs import asdict, frozen

from fray.rl.train.datums import AdamParams, Datum, ServiceLoss
from fray.rl.train.lora import LoRA
from fray.tinker.http_client import JsonConnection, RawReply
from fray.tinker.wire.tinker_json import Fields
from fray.tinker.wire.tinker_proto import (
    CONTENT_TYPE,
    ForwardRequest,
    WireError,
    decode_forward_output,
    encode_forward_request,
)

PATIENCE_S = 600.0
"""Seconds for which a service may not answer."""
ANSWER_S = 60.0
"""Seconds for one answer: the service waits for 40 before it says that there is none yet."""
HEARTBEAT_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""First and longest pause before a request is sent again."""
NEW_ADDRESSES = 5
"""Addresses of one download that are asked for: a service that is started again forgets those that it gave."""
_AGAIN = {408, 425, 429}
"""Statuses below 500 after which a request is sent again."""

logger = logging.getLogger("fray.tinker")


class RequestRefused(ValueError):
    """A service refuses a request, or cannot execute it; the message has the route and the reason."""


@frozen
class ForwardResult:
    """Result of a forward pass.

    Attributes:
        loss: the sum over all tokens.
        logprobs: of the targets of each datum, nats.
    """

    loss: float
    logprobs: list[list[float]]


class TinkerClient:
    """Session of a Tinker API, made with the first model. A thread sends its heartbeats until `close`.

    Args:
        url: of the service, without ``/api/v1``.
        key: ``tml-…``; empty: the service requires none.
        ca_file: certificates that the service's is signed by; None: those of the system.
        patience_s: seconds for which the service may not answer, be started again, or be overloaded.
    """

    def __init__(self, url: str, *, key: str = "", ca_file: str | None = None, patience_s: float = PATIENCE_S) -> None:
        headers = {"X-API-Key": key} if key else {}
        self._connection = JsonConnection(
            f"{url.rstrip('/')}/api/v1", timeout_s=ANSWER_S, headers=headers, ca_file=ca_file
        )
        self._patience_s = patience_s
        self._session_id = ""
        self._models = 0
        self._ended = threading.Event()
        # Without a reference from the thread, a client that is not used any more ends it.
        weakref.finalize(self, self._ended.set)

    def create_model(self, base_model: str, lora: LoRA) -> SessionModel:
        """Create a model: a new adapter.

        Raises:
            RequestRefused: the base model is not served, or the service refuses the settings.
            ConnectionError: the service did not answer for ``patience_s``.
        """
        config = {
            "rank": lora.rank,
            "seed": lora.seed,
            "train_attn": lora.attention,
            "train_mlp": lora.mlp,
            "train_unembed": lora.unembed,
        }
        return self._new_model("create_model", {"base_model": base_model, "lora_config": config})

    def load_model(self, path: str) -> SessionModel:
        """Create a model that continues from a state that `SessionModel.save_state` saved. Raises as `create_model`."""
        return self._new_model("load_weights", {"path": path, "optimizer": True})

    def _new_model(self, route: str, body: dict[str, Any]) -> SessionModel:
        if not self._session_id:
            session = {"tags": [], "user_metadata": {}, "sdk_version": "fray"}
            self._session_id = self.post("create_session", session).get("session_id", "str")
            beat = (self._connection, self._session_id, self._ended)
            threading.Thread(target=_send_heartbeats, args=beat, name="tinker-heartbeats", daemon=True).start()
        body |= {"session_id": self._session_id, "model_seq_id": self._models}
        self._models += 1
        return SessionModel(self, self.result_of(route, body).get("model_id", "str"))

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises as `create_model`."""
        self._send("DELETE", _checkpoint_route(path))

    def download(self, path: str, name: str) -> bytes:
        """Return a file of a checkpoint: ``adapter_config.json`` or ``adapter_model.safetensors``.

        Raises:
            RequestRefused: there is no such checkpoint, or it lacks the file.
            ConnectionError: as `create_model`.
        """
        for left in reversed(range(NEW_ADDRESSES)):
            answer = _fields(self._send("GET", f"{_checkpoint_route(path)}/external_weights_urls"))
            # At the address by which this client reaches the service, whatever name it has for itself.
            route = urlsplit(answer.inside("urls").get(name, "str")).path
            at = route.find("/downloads/")
            if at < 0:
                raise WireError(f"urls.{name}: {route!r:.100}; expected a path with /downloads/")
            try:
                return self._send("GET", route[at:]).content
            except RequestRefused:
                if not left:
                    raise
        raise AssertionError("not reached")

    def close(self) -> None:
        """End the session: its models end, its checkpoints stay. Does nothing if the service does not answer."""
        self._ended.set()
        if self._session_id:
            try:
                self._connection.exchange("POST", f"/sessions/{self._session_id}/finish", b"{}")
            except (ConnectionError, TimeoutError) as error:
                logger.info("the session ends by itself later: %s", error)
        self._connection.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def post(self, route: str, body: dict[str, Any]) -> Fields:
        """Send a request and return its answer. Raises as `create_model`."""
        return _fields(self._send("POST", f"/{route}", json.dumps(body).encode()))

    def result_of(self, route: str, body: dict[str, Any]) -> Fields:
        """Send a request that is queued, and return its result. Raises as `create_model`."""
        return _fields(self.queued(route, json.dumps(body).encode(), "application/json"))

    def queued(self, route: str, body: bytes, kind: str) -> RawReply:
        """Send a request that is queued, and return the answer with its result, in protobuf where there is one.

        Args:
            kind: of the body.
        """
        request_id = _fields(self._send("POST", f"/{route}", body, kind)).get("request_id", "str")
        asked = json.dumps({"request_id": request_id}).encode()
        while True:
            began = time.monotonic()
            reply = self._send("POST", "/retrieve_future", asked, accept=f"{CONTENT_TYPE}, application/json")
            if reply.kind.startswith(CONTENT_TYPE):
                return reply
            answer = _fields(reply)
            if "error" in answer.value:
                raise RequestRefused(f"{route}: {answer.value['error']}")
            if answer.value.get("type") != "try_again":
                return reply
            logger.debug("%s waits: %s", request_id, answer.value)
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        kind: str = "application/json",
        *,
        accept: str = "application/json",
    ) -> RawReply:
        """Send a request, again while the service does not answer, and return an answer of success."""
        headers = {"Accept": accept} | ({} if content is None else {"Content-Type": kind})
        return self._patiently(lambda: self._connection.exchange(method, path, content, headers=headers), path)

    def _patiently(self, exchange: Callable[[], RawReply], path: str) -> RawReply:
        until, pause = time.monotonic() + self._patience_s, PAUSE_S
        while True:
            try:
                reply = exchange()
                if reply.status < 300:
                    return reply
                problem = f"{path}: {reply.status}: {_detail(reply)}"
                if reply.status < 500 and reply.status not in _AGAIN:
                    raise RequestRefused(problem)
            except (ConnectionError, TimeoutError) as error:
                problem = str(error)
            if time.monotonic() >= until:
                raise ConnectionError(f"the service did not answer for {self._patience_s:g} s: {problem}")
            if pause == PAUSE_S:
                logger.warning("the service does not answer, and is asked again: %s", problem)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


class SessionModel:
    """Model of a session, whose requests are executed in their order. For one thread.

    Args:
        client: with its session.
        model_id: of the model.
    """

    def __init__(self, client: TinkerClient, model_id: str) -> None:
        self._client, self.model_id = client, model_id
        self._seq = 0

    def forward_backward(self, data: Sequence[Datum], loss: ServiceLoss) -> ForwardResult:
        """Add the gradient of data to those since the last `optim_step`.

        Raises:
            RequestRefused: data are invalid, the message has the place; or the session has ended.
            ConnectionError: the service did not answer for the client's ``patience_s``.
        """
        request = ForwardRequest(self.model_id, self._next(), data, loss.name, loss.config)
        reply = self._client.queued("forward_backward", encode_forward_request(request), CONTENT_TYPE)
        outputs, metrics = decode_forward_output(reply.content)
        if "logprobs" not in outputs or "loss:sum" not in metrics:
            raise WireError(f"result of forward_backward: has {[*outputs, *metrics]}; expected logprobs and loss:sum")
        return ForwardResult(metrics["loss:sum"], outputs["logprobs"])

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Do an optimizer step with the gradients since the last one; return metrics. Raises as `forward_backward`."""
        found = self._request("optim_step", adam_params=asdict(params)).inside("metrics")
        return {name: float(found.get(name, "float")) for name in found.value}

    def save_state(self, name: str) -> str:
        """Save weights and optimizer; return the path, ``tinker://…``. Raises as `forward_backward`."""
        path: str = self._request("save_weights", path=name).get("path", "str")
        return path

    def save_weights(self, name: str, ttl_s: int | None = None) -> str:
        """Save the weights alone; return the path. Raises as `forward_backward`.

        Args:
            ttl_s: seconds after which they expire; None: never.
        """
        path: str = self._request("save_weights_for_sampler", path=name, ttl_seconds=ttl_s).get("path", "str")
        return path

    def unload(self) -> None:
        """End the model; its checkpoints stay. Raises as `forward_backward`."""
        self._client.post("unload_model", {"model_id": self.model_id})

    def _request(self, route: str, **fields: Any) -> Fields:
        return self._client.result_of(route, {"model_id": self.model_id, "seq_id": self._next(), **fields})

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def _send_heartbeats(connection: JsonConnection, session_id: str, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        try:
            connection.request("POST", "/session_heartbeat", {"session_id": session_id})
        except (ConnectionError, TimeoutError):
            pass  # the requests of the models say so


def _fields(reply: RawReply) -> Fields:
    return Fields.of_body(reply.content)


def _detail(reply: RawReply) -> str:
    """Return what a refusal says, or the beginning of its body."""
    try:
        return str(_fields(reply).value.get("detail"))[:1000]
    except WireError:
        return reply.content[:200].decode(errors="replace")


def _checkpoint_route(path: str) -> str:
    """Return the route of a checkpoint, ``tinker://RUN/FOLDER/NAME``. Raises WireError for another text."""
    run_id, slash, checkpoint_id = path.removeprefix("tinker://").partition("/")
    if not path.startswith("tinker://") or not slash:
        raise WireError(f"path: {path!r:.200}; expected tinker://RUN/FOLDER/NAME")
    return f"/training_runs/{quote(run_id)}/checkpoints/{quote(checkpoint_id)}"
