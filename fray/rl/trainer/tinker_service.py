"""Tinker API as what trains: datums become requests of one model, whose adapter servers of a run can load.

Of `fray.tinker`, the client alone is loaded, and where the first request is made.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import define, evolve, field

from fray.rl.train.datums import SERVICE_LOSSES, AdamParams, Datum, ServiceLoss
from fray.rl.train.errors import NonFiniteUpdatesError
from fray.rl.train.lora import LoRA
from fray.rl.train.settings import GRPO
from fray.rl.weight_files import table_of_files
from fray.rl.weights_table import WeightTable

KEY_VARIABLES = ("FRAY_TINKER_KEY", "TINKER_API_KEY")
"""Variables of the environment that may have the key: Fray's, and that of the SDK."""
STATE_FILE = "tinker.json"
"""File of a checkpoint with the path of the state that the service has."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
WEIGHTS_TTL_S = 3600
"""Seconds after which the service removes weights that were saved to be downloaded, if the client could not."""
LOSS_NAMES = {name: name for name in SERVICE_LOSSES if name not in ("dro", "gspo")} | {"clip": "ppo"}
"""Loss of a trainer: its name for a service. DRO has a part that advantages do not scale, and GSPO counts the tokens of
the prompt there: their sums cannot be made to be means over the tokens that count."""
LOG_RATIO_LIMIT = 20.0

logger = logging.getLogger("fray.rl")


@define(eq=False)
class TinkerService:
    """Service with the Tinker API, with the methods of a `PolicyTrainer` that holders and runs use.

    Args:
        base_url: of the service, without ``/api/v1``: https, or http on loopback.
        base_model: name of the model that the service has; that of the run has the same weights.
        lora: adapter that is trained.
        api_key: ``tml-…``; None: that of the file, or of one of `KEY_VARIABLES` in the trainer's process.
        key_file: file with the key, where the trainer runs.
        ca_file: certificates that the service's is signed by; None: those of the system.
        timeout_s: seconds for which the service may not answer.

    Raises:
        ValueError: the address is not one of a service, or the adapter has another ``alpha`` than services have.
    """

    base_url: str
    base_model: str
    lora: LoRA
    api_key: str | None = field(default=None, repr=False)
    key_file: str | os.PathLike[str] | None = None
    ca_file: str | os.PathLike[str] | None = None
    timeout_s: float = 600.0
    settings: GRPO = field(factory=GRPO, init=False)
    """Settings of the trainer: optimizer and aggregation."""
    updates: int = field(default=0, init=False)
    """Updates that were done, those before a checkpoint included."""
    _client: Any = field(default=None, init=False, repr=False)
    _model: Any = field(default=None, init=False, repr=False)
    _weights: tuple[WeightTable, bytes] | None = field(default=None, init=False, repr=False)
    """Weights of the model as they are now; None: they have not been downloaded."""
    _lock: Any = field(factory=threading.RLock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise ValueError("invalid base_url of a Tinker service: expected https://host:port")
        if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"base_url is http, and {parts.hostname} is another machine: key and batches would be readable on the "
                "way; expected https"
            )
        if self.lora.alpha != LoRA().alpha:
            raise ValueError(f"invalid alpha {self.lora.alpha:g} of LoRA: that of a Tinker service is {LoRA().alpha:g}")

    def __getstate__(self) -> dict[str, Any]:
        # Connection, session and model belong to the process that made them.
        kept = ("base_url", "base_model", "lora", "api_key", "key_file", "ca_file", "timeout_s", "settings", "updates")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._client = self._model = self._weights = None
        self._lock = threading.RLock()

    def use(self, settings: GRPO) -> GRPO:
        """Take the settings of a trainer; return them with the adapter, which the servers of a run need.

        Raises:
            ValueError: they ask for what a service does not do.
        """
        if settings.lora not in (None, self.lora):
            raise ValueError(f"lora of GRPO is {settings.lora}, and that of the Tinker service {self.lora}")
        for name, value in (("kl", settings.kl), ("correction", settings.correction)):
            if value is not None:
                raise ValueError(f"{name} of GRPO with a Tinker service, which does not have it: expected None")
        self.settings = evolve(settings, lora=self.lora)
        return self.settings

    # Training

    def train(self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, float]:
        """Do an update; arguments, metrics and errors as of `TinkerServiceHolder.train`."""
        name = config.get("loss_fn") or "importance_sampling"
        if name not in LOSS_NAMES:
            raise ValueError(f"loss_fn {name!r} with a Tinker service; expected one of {', '.join(LOSS_NAMES)}")
        is_supervised = name == "cross_entropy"
        data = self._data(datums, is_supervised)
        wanted = "weights" if is_supervised else "advantages"
        tokens = float(sum(bool(each) for datum in datums for each in datum["loss_fn_inputs"]["weights"]))
        rate = self.settings.lr if config.get("learning_rate") is None else float(config["learning_rate"])
        metrics = {"tokens": tokens, "lr": rate, "updated": 0.0, "skipped": 1.0, "loss": 0.0, "grad_norm": 0.0}
        if not any(any(datum.columns[wanted]) for datum in data):
            # A step would still decay the weights.
            return metrics | {"zero_advantages": 1.0, "updates": float(self.updates)}
        with self._lock:
            model = self._made_model()
            self._weights = None
            result = model.forward_backward(data, ServiceLoss(LOSS_NAMES[name], config.get("loss_fn_config") or {}))
            if not math.isfinite(result.loss):
                raise NonFiniteUpdatesError(
                    f"the loss is {result.loss}, and the service cannot forget the gradient: a run that is started "
                    "again continues from its last checkpoint"
                )
            done = model.optim_step(self._adam(rate))
            self.updates += 1
        if not is_supervised:
            metrics["mismatch_k3"] = _mismatch_k3(datums, result.logprobs)
        metrics |= done | {"loss": result.loss, "updated": 1.0, "skipped": 0.0}
        return metrics | {"updates": float(self.updates)}

    def _data(self, datums: Sequence[Mapping[str, Any]], is_supervised: bool) -> list[Datum]:
        """Return data whose loss, a sum over tokens, is the mean that the settings ask for."""
        masks = [[bool(each) for each in datum["loss_fn_inputs"]["weights"]] for datum in datums]
        shares = token_shares(list(map(sum, masks)), self.settings.aggregation, self.settings.aggregation_length)
        data = []
        for datum, mask, share in zip(datums, masks, shares, strict=True):
            inputs = datum["loss_fn_inputs"]
            if is_supervised:
                columns = {"weights": [share * counts for counts in mask]}
            else:
                pairs = zip(inputs["advantages"], mask, strict=True)
                columns = {
                    "logprobs": inputs["logprobs"],
                    "advantages": [share * advantage * counts for advantage, counts in pairs],
                }
            data.append(Datum(datum["model_input"], inputs["target_tokens"], columns))
        return data

    def _adam(self, learning_rate: float) -> AdamParams:
        settings = self.settings
        return AdamParams(
            learning_rate=learning_rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.grad_clip or 0.0,
        )

    # Weights

    @property
    def table(self) -> WeightTable:
        """Table of the adapter's weights, which are downloaded if the last ones are older."""
        return self._downloaded()[0]

    def write_weights(self, buffer: Any) -> None:
        """Copy the adapter's weights into a buffer of ``table.total_bytes``."""
        _, content = self._downloaded()
        memoryview(buffer).cast("B")[: len(content)] = content

    def write_weight_file(self, path: Path) -> WeightTable:
        """Write the adapter as a file of safetensors, which appears when it is complete; return its table."""
        table, content = self._downloaded()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_bytes(content)
        unfinished.rename(path)
        return table

    def save(self, directory: str | Path) -> None:
        """Have weights and optimizer saved by the service, and write their path and the adapter, for `peft`."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        with self._lock:
            path = self._made_model().save_state(_new_name())
            (target / ADAPTER_CONFIG).write_bytes(self._client.download(path, ADAPTER_CONFIG))
            (target / ADAPTER_WEIGHTS).write_bytes(self._downloaded()[1])
        (target / STATE_FILE).write_text(json.dumps({"path": path, "updates": self.updates}) + "\n", encoding="utf-8")

    def load(self, directory: str | Path) -> None:
        """Continue from a directory that `save` wrote.

        Raises:
            FileNotFoundError: it was not written by it.
            ValueError: the service has no such state any more.
        """
        file = Path(directory, STATE_FILE)
        if not file.is_file():
            raise FileNotFoundError(f"no checkpoint of a Tinker service in {directory}: it has no file {STATE_FILE}")
        state = json.loads(file.read_text(encoding="utf-8"))
        with self._lock:
            before = self._model
            self._model, self._weights = self._made_client().load_model(state["path"]), None
            self.updates = state["updates"]
            if before is not None:
                before.unload()

    def close(self) -> None:
        """End the session; what was saved stays."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = self._model = self._weights = None

    def _downloaded(self) -> tuple[WeightTable, bytes]:
        with self._lock:
            if self._weights is None:
                model = self._made_model()
                path = model.save_weights(_new_name(), WEIGHTS_TTL_S)
                content: bytes = self._client.download(path, ADAPTER_WEIGHTS)
                self._client.delete(path)
                table = table_of_files(content)
                places = {name.removeprefix(PEFT_PREFIX): place for name, place in table.places.items()}
                self._weights = evolve(table, places=places), content
            return self._weights

    def _made_model(self) -> Any:
        if self._model is None:
            self._model = self._made_client().create_model(self.base_model, self.lora)
        return self._model

    def _made_client(self) -> Any:
        if self._client is None:
            # Here: no other process of a run loads an HTTP client and protobuf for it.
            from fray.tinker.tinker_client import TinkerClient

            ca_file = None if self.ca_file is None else str(self.ca_file)
            self._client = TinkerClient(self.base_url, key=self._key(), ca_file=ca_file, patience_s=self.timeout_s)
        return self._client

    def _key(self) -> str:
        if self.api_key is not None:
            return self.api_key
        if self.key_file is not None:
            return Path(self.key_file).read_text(encoding="utf-8").strip()
        return next((os.environ[name].strip() for name in KEY_VARIABLES if os.environ.get(name)), "")


def token_shares(counts: Sequence[int], aggregation: str, length: int | None = None) -> list[float]:
    """Return the factor of the tokens of each sequence with which the sum of losses is what `aggregate` returns.

    Args:
        counts: tokens of each sequence that count.
        aggregation: one of `fray.rl.train.settings.AGGREGATIONS`.
        length: of ``constant-length``.
    """
    sequences = max(sum(map(bool, counts)), 1)
    if aggregation == "token-mean":
        return [1.0 / max(sum(counts), 1)] * len(counts)
    if aggregation == "seq-mean-token-mean":
        return [1.0 / (sequences * max(count, 1)) for count in counts]
    return [1.0 / (sequences * (length or 1))] * len(counts)


def _mismatch_k3(datums: Sequence[Mapping[str, Any]], logprobs: Sequence[Sequence[float]]) -> float:
    """Return the k3 estimate between the logprobs of the service and of the rollouts, a mean over tokens."""
    found: list[float] = []
    for datum, row in zip(datums, logprobs, strict=True):
        inputs = datum["loss_fn_inputs"]
        for here, there, counts in zip(row, inputs["logprobs"], inputs["weights"], strict=True):
            if counts:
                ratio = max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, here - there))
                found.append(math.exp(ratio) - 1.0 - ratio)
    return sum(found) / max(len(found), 1)


def _new_name() -> str:
    return f"fray-{uuid.uuid4().hex}"
