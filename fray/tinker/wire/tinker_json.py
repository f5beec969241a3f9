"""Bodies of the Tinker API in JSON, read into values: a field of another kind is refused with its name."""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from fray.rl.train.datums import AdamParams
from fray.rl.train.lora import LoRA
from fray.tinker.core.sampling_requests import SampleAnswer, SampleRequest
from fray.tinker.wire.tinker_proto import WireError

NUMBER_LIMIT = 2**63 - 1
_MISSING: Any = object()
_KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "a string"),
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "dict": (dict, "an object"),
    "list": (list, "a list"),
}
_NOT_SUPPORTED = {"topk_sample_logprobs": 0, "target_prompt_logprobs": None, "prompt_alt_tokens_k": 0}
"""Fields of a request for samples that Fray has not, with their values where they ask for nothing."""


def parsed_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError, also for texts that UTF-8 has not."""
    value = json.loads(text)
    if b"\\ud" in text.lower():
        # Half of a surrogate pair: it could be neither kept nor shown.
        json.dumps(value, ensure_ascii=False).encode()
    return value


class Fields:
    """Object of a body, whose fields are read by name.

    Args:
        value: the object.
        place: before the names in messages; empty: the body.
    """

    def __init__(self, value: dict[str, Any], place: str = "") -> None:
        self.value, self._place = value, place

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Return the fields of a body. Raises WireError if it is not an object."""
        try:
            value = parsed_json(body or b"{}")
        except (ValueError, RecursionError) as error:
            raise WireError(f"body: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise WireError(f"body: expected an object, not {value!r:.100}")
        return cls(value)

    def get(self, name: str, kind: str, default: Any = _MISSING) -> Any:
        """Return a field; null counts as missing.

        Raises:
            WireError: it is missing and has no default, or it is of another kind, or too large.
        """
        value = self.value.get(name)
        if value is None:
            if default is _MISSING:
                raise WireError(f"{self._place}{name}: missing; expected {_KINDS[kind][1]}")
            return default
        types, expected = _KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
            raise WireError(f"{self._place}{name}: {value!r:.100}; expected {expected}")
        if kind == "int" and abs(value) > NUMBER_LIMIT:
            raise WireError(f"{self._place}{name}: {value!r:.50} is beyond 64 bits")
        return value

    def inside(self, name: str) -> Fields:
        """Return the fields of an object inside; without any if it is missing."""
        return Fields(self.get(name, "dict", {}), f"{self._place}{name}.")


def adam_of(fields: Fields) -> AdamParams:
    """Return the settings of a step. Raises WireError if they are of another optimizer or out of range."""
    if fields.value.get("optimizer_params") is not None:
        raise WireError(f"optimizer_params: {fields.value['optimizer_params']!r:.100}; the only optimizer is AdamW")
    params = fields.inside("adam_params")
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    try:
        return AdamParams(**{name: params.get(name, "float") for name in names if params.value.get(name) is not None})
    except ValueError as error:
        raise WireError(f"adam_params: {error}") from None


def check_optimizer(fields: Fields) -> None:
    """Check the optimizer of a new model. Raises WireError if it is not AdamW."""
    kind = fields.inside("optimizer_config").get("type", "str", "adamw")
    if kind != "adamw":
        raise WireError(f"optimizer_config.type: {kind!r}; the only optimizer is 'adamw'")


def lora_of(fields: Fields, seed: int) -> LoRA:
    """Return the settings of an adapter.

    Args:
        fields: of the request.
        seed: of an adapter whose request has none.

    Raises:
        WireError: there are none, or one is out of its range.
    """
    if fields.value.get("lora_config") is None:
        raise WireError("lora_config: missing; models are trained by adapters alone")
    config = fields.inside("lora_config")
    try:
        return LoRA(
            config.get("rank", "int"),
            attention=config.get("train_attn", "bool", True),
            mlp=config.get("train_mlp", "bool", True),
            unembed=config.get("train_unembed", "bool", True),
            seed=config.get("seed", "int", seed),
        )
    except ValueError as error:
        raise WireError(f"lora_config: {error}") from None


@frozen
class SampleBody:
    """Request for samples, as it is on the wire.

    Attributes:
        request: without the weights, which follow from the other fields.
        sampling_session_id: sampler that answers; empty: a base model or a path.
        seq_id: number of the request of this sampler.
        base_model: empty: as the sampler or the path says.
        model_path: saved weights; empty: those of the sampler or the base model.
        scored: tokens at the end of the prompt whose logprobs are returned; None: all.
    """

    request: SampleRequest
    sampling_session_id: str
    seq_id: int
    base_model: str
    model_path: str
    scored: int | None


def sample_of(fields: Fields, weights: str | None = None, seed: int | None = None) -> SampleBody:
    """Return a request for samples.

    Args:
        fields: of the body.
        weights: of the request, for the engine.
        seed: of a request that has none.

    Raises:
        WireError: a field is missing, of another kind, out of its range, or asks for what Fray has not.
    """
    for name, nothing in _NOT_SUPPORTED.items():
        if fields.value.get(name, nothing) not in (nothing, None):
            raise WireError(f"{name}: not supported by this service; expected {nothing!r}")
    tokens: list[Any] = []
    for index, chunk in enumerate(fields.inside("prompt").get("chunks", "list")):
        place = f"prompt.chunks[{index}]"
        if not isinstance(chunk, dict):
            raise WireError(f"{place}: expected an object, not {chunk!r:.100}")
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise WireError(f"{place}: {chunk['type']!r} chunks are not supported; expected encoded_text")
        tokens += Fields(chunk, f"{place}.").get("tokens", "list")
    params = fields.inside("sampling_params")
    scored = fields.get("prompt_logprobs_last_n", "int", None)
    if scored is not None and not 1 <= scored < max(len(tokens), 2):
        raise WireError(f"prompt_logprobs_last_n: {scored} of a prompt of {len(tokens)} tokens; expected 1 to one less")
    seq_id = fields.get("seq_id", "int", 0)
    if seq_id < 0:
        raise WireError(f"seq_id: {seq_id}; expected an integer of at least 0")
    try:
        request = SampleRequest(
            prompt=tokens,
            num_samples=fields.get("num_samples", "int", 1),
            max_tokens=params.get("max_tokens", "int", None),
            temperature=params.get("temperature", "float", 1.0),
            top_k=params.get("top_k", "int", -1),
            top_p=params.get("top_p", "float", 1.0),
            seed=params.get("seed", "int", seed),
            stop=params.value.get("stop"),
            prompt_logprobs=fields.get("prompt_logprobs", "bool", False),
            topk_prompt_logprobs=fields.get("topk_prompt_logprobs", "int", 0),
            weights=weights,
        )
    except (ValueError, TypeError) as error:
        raise WireError(str(error)) from None
    return SampleBody(
        request,
        fields.get("sampling_session_id", "str", ""),
        seq_id,
        fields.get("base_model", "str", ""),
        fields.get("model_path", "str", ""),
        scored,
    )


def stored_samples(result: SampleAnswer, wanted: SampleBody) -> dict[str, Any]:
    """Return the answer to a request for samples as the store keeps it."""
    logprobs: list[Any] | None = result.prompt_logprobs
    topk: list[Any] | None = result.topk_prompt_logprobs
    if wanted.scored is not None:
        logprobs, topk = (
            None if rows is None else [None] * (len(rows) - wanted.scored) + list(rows[-wanted.scored :])
            for rows in (logprobs, topk)
        )
    return {
        "samples": [[each.tokens, each.logprobs, each.stop_reason] for each in result.sequences],
        "prompt_logprobs": logprobs if wanted.request.prompt_logprobs else None,
        "topk_prompt_logprobs": topk,
    }
