"""Bodies of the Tinker API in protocol buffers: requests of forward passes, their results, and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import field, frozen
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from fray.rl.train.datums import Datum
from fray.tinker.wire.messages import MESSAGES

CONTENT_TYPE = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Kinds of numbers on the wire."""
_DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
NO_LOGPROB = -99999.0
"""Logprob of a place of the most probable tokens where there is none."""
STOP_REASONS = {"stop": 0, "length": 1}


class WireError(ValueError):
    """Body that cannot be decoded; the message begins with the place."""


@frozen
class ForwardRequest:
    """A forward pass, with or without gradients.

    Attributes:
        model_id: whose adapter.
        seq_id: number of the request.
        data: what to train on.
        loss: name of the loss.
        config: its settings.
        backward: gradients are computed.
    """

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float] = field(factory=dict)
    backward: bool = True


def decode_forward_request(body: bytes) -> ForwardRequest:
    """Return the request of a body.

    Raises:
        WireError: it is another message, a field is unknown or missing, or a tensor's length, kind or shape is wrong.
    """
    message = _parsed("ForwardBackwardRequest", body)
    config: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        _check_known(value, f"loss_fn_config_v2[{key!r}]")
        if value.text:
            raise WireError(f"loss_fn_config_v2[{key!r}]: {value.text!r} is a text; expected a number")
        config[key] = value.number
    return ForwardRequest(
        message.model_id,
        message.seq_id,
        [_datum(each, f"data[{index}]", message.loss_fn) for index, each in enumerate(message.data)],
        message.loss_fn,
        config,
        not message.forward_only,
    )


def _parsed(name: str, body: bytes) -> Any:
    message = MESSAGES[name]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"body: not a protobuf message {name}: {error}") from None
    _check_known(message, "body")
    return message


def _check_known(message: Any, place: str) -> None:
    unknown = sorted({each.field_number for each in UnknownFieldSet(message)})
    if unknown:
        raise WireError(f"{place}: field {unknown[0]} of {message.DESCRIPTOR.name} is not known here")


def _datum(message: Any, place: str, loss: str) -> Datum:
    _check_known(message, place)
    tokens: list[int] = []
    for index, chunk in enumerate(message.model_input):
        where = f"{place}.model_input[{index}]"
        _check_known(chunk, where)
        for kind in ("image", "dmel"):
            if kind in {each.name for each, _ in chunk.ListFields()}:
                raise WireError(f"{where}: {kind} chunks are not supported; expected encoded_text")
        tokens += _numbers(chunk.encoded_text.tokens, INT32, f"{where}.tokens")
    columns = {
        name: _column(tensor, f"{place}.loss_fn_inputs[{name!r}]") for name, tensor in message.loss_fn_inputs.items()
    }
    return datum_of(tokens, columns, place, loss)


def datum_of(tokens: list[int], columns: dict[str, list[Any]], place: str, loss: str) -> Datum:
    """Return a datum of its columns by name; cross entropy without weights has weights of 1.

    Raises:
        WireError: there are no ``target_tokens``, or one of them is not an integer.
    """
    targets = columns.pop("target_tokens", None)
    if targets is None:
        raise WireError(f"{place}: loss_fn_inputs has no target_tokens; it has {', '.join(columns) or 'nothing'}")
    if not all(isinstance(target, int) for target in targets):
        raise WireError(f"{place}.loss_fn_inputs['target_tokens']: expected integers")
    if loss == "cross_entropy":
        columns.setdefault("weights", [1.0] * len(targets))
    return Datum(tokens, targets, columns)


def _column(tensor: Any, place: str) -> list[Any]:
    _check_known(tensor, place)
    if tensor.HasField("sparse_csr"):
        raise WireError(f"{place}: sparse tensors are not supported; expected a dense one of one dimension")
    values = _numbers(tensor.dense, tensor.dtype, place)
    check_shape(list(tensor.shape), len(values), place)
    return values


def check_shape(shape: Sequence[int], length: int, place: str) -> None:
    """Check the shape of a column; empty: it has the length of its numbers. Raises WireError."""
    if shape and (len(shape) != 1 or shape[0] != length):
        raise WireError(f"{place}: shape {list(shape)} of {length} numbers; expected [{length}], one for each token")


def _numbers(data: bytes, dtype: int, place: str) -> list[Any]:
    if dtype not in _DTYPES:
        raise WireError(f"{place}: dtype {dtype} is unknown; expected one of {', '.join(map(str, _DTYPES))}")
    kind = np.dtype(_DTYPES[dtype])
    if len(data) % kind.itemsize:
        raise WireError(f"{place}: {len(data)} bytes are not a number of values of {kind.itemsize} bytes")
    array: Any = np.frombuffer(data, kind)
    if dtype == BFLOAT16:
        # The upper half of a float32.
        array = (array.astype(np.uint32) << 16).view(np.float32)
    values: list[Any] = array.tolist()
    return values


def encode_forward_output(outputs: Mapping[str, Sequence[Any]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a forward pass.

    Args:
        outputs: by name, the numbers of each datum: ragged, float32.
        metrics: by name.
    """
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, rows in outputs.items():
        arrays = [np.asarray(row, "<f4") for row in rows]
        column = record.fields[name]
        column.data, column.dtype = b"".join(array.tobytes() for array in arrays), FLOAT32
        # Of bytes, one more than there are rows.
        column.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        record.num_datums = len(arrays)
    return bytes(message.SerializeToString())


def encode_forward_request(request: ForwardRequest) -> bytes:
    """Return the body of a request, which `decode_forward_request` reads; numbers are float32."""
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss, forward_only=not request.backward
    )
    message.loss_fn_config.update(request.config)
    for datum in request.data:
        encoded = message.data.add()
        encoded.model_input.add().encoded_text.tokens = np.asarray(datum.tokens, "<i4").tobytes()
        targets = encoded.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.asarray(datum.targets, "<i8").tobytes(), INT64
        for name, values in datum.columns.items():
            column = encoded.loss_fn_inputs[name]
            column.dense, column.dtype = np.asarray(values, "<f4").tobytes(), FLOAT32
    return bytes(message.SerializeToString())


def decode_forward_output(body: bytes) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Return the outputs by name, the numbers of each datum, and the metrics, as `encode_forward_output` got them.

    Raises:
        WireError: it is another message, or the places of the numbers are not in it.
    """
    message = _parsed("ForwardBackwardOutput", body)
    outputs: dict[str, list[list[float]]] = {}
    for record in message.loss_fn_outputs:
        for name, column in record.fields.items():
            place = f"loss_fn_outputs[{name!r}]"
            if len(column.offsets) % 8 or column.dtype not in _DTYPES:
                raise WireError(
                    f"{place}: {len(column.offsets)} bytes of offsets, dtype {column.dtype}; expected int64"
                )
            offsets = np.frombuffer(column.offsets, "<i8").tolist()
            if not offsets or sorted(offsets) != offsets or offsets[0] < 0 or offsets[-1] > len(column.data):
                raise WireError(f"{place}: offsets {offsets!s:.100} of {len(column.data)} bytes")
            rows = [_numbers(column.data[a:b], column.dtype, place) for a, b in pairwise(offsets)]
            outputs.setdefault(name, []).extend(rows)
    return outputs, dict(message.metrics)


def encode_samples(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], str]],
    prompt_logprobs: Sequence[float | None] = (),
    topk_prompt_logprobs: Sequence[Sequence[tuple[int, float]] | None] = (),
) -> bytes:
    """Return the answer to a request of samples.

    Args:
        sequences: tokens, their logprobs, and ``stop`` or ``length``.
        prompt_logprobs: of each token of the prompt, None for the first; empty: not asked for.
        topk_prompt_logprobs: for each token of the prompt pairs (token, logprob), most probable first, None for the
            first; empty: not asked for.
    """
    message = MESSAGES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        message.sequences.add(
            stop_reason=STOP_REASONS[reason],
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs:
        numbers = [np.nan if value is None else value for value in prompt_logprobs]
        message.prompt_logprobs = np.asarray(numbers, "<f4").tobytes()
    width = max((len(row or ()) for row in topk_prompt_logprobs), default=0)
    if width:
        ids = np.zeros((len(topk_prompt_logprobs), width), "<i4")
        values = np.full(ids.shape, NO_LOGPROB, "<f4")
        for at, row in enumerate(topk_prompt_logprobs):
            for rank, (token, value) in enumerate(row or ()):
                ids[at, rank], values[at, rank] = token, value
        topk = message.topk_prompt_logprobs
        topk.token_ids, topk.logprobs, topk.k, topk.length = ids.tobytes(), values.tobytes(), width, len(ids)
    return bytes(message.SerializeToString())
