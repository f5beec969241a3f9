"""Codecs of the Tinker API: round trips, refusals with their place, and messages that the SDK made and read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.rl.train.datums import Datum
from fray.tinker.wire.messages import MESSAGES
from fray.tinker.wire.tinker_json import Fields, adam_of, lora_of, sample_of
from fray.tinker.wire.tinker_proto import (
    BFLOAT16,
    FLOAT32,
    INT64,
    ForwardRequest,
    WireError,
    decode_forward_output,
    decode_forward_request,
    encode_forward_output,
    encode_forward_request,
    encode_samples,
)

ROOT = Path(__file__).parents[2]


def request(**changes: Any) -> Any:
    message = MESSAGES["ForwardBackwardRequest"](model_id="s:train:0", seq_id=3, loss_fn="importance_sampling")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    columns = {
        "target_tokens": (INT64, np.array([2, 3], "<i8")),
        "logprobs": (FLOAT32, np.array([-1.5, -0.5], "<f4")),
        "advantages": (BFLOAT16, (np.array([1.0, -2.0], "<f4").view("<u4") >> 16).astype("<u2")),
    }
    for name, (dtype, values) in columns.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, values.tobytes()
        tensor.shape.append(2)
    return message


def test_a_request_of_each_kind_of_numbers_is_decoded() -> None:
    message = request()
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    message.forward_only = True
    found = decode_forward_request(message.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss, found.backward) == ("s:train:0", 3, "importance_sampling", False)
    assert found.config == {"clip_low_threshold": 0.7}
    (datum,) = found.data
    assert (list(datum.tokens), list(datum.targets)) == ([1, 2], [2, 3])
    assert datum.columns == {"logprobs": [-1.5, -0.5], "advantages": [1.0, -2.0]}


def test_cross_entropy_without_weights_has_weights_of_1() -> None:
    message = request()
    message.loss_fn = "cross_entropy"
    assert decode_forward_request(message.SerializeToString()).data[0].columns["weights"] == [1.0, 1.0]


def test_a_request_of_frays_client_is_decoded_as_it_was() -> None:
    columns = {"logprobs": [-1.5, 0.0], "advantages": [0.25, -2.0]}
    sent = ForwardRequest("s:train:0", 4, [Datum([1, 2], [2, 3], columns), Datum([5], [6], columns)], "ppo", {"a": 1.5})
    assert decode_forward_request(encode_forward_request(sent)) == sent


def _without_targets(message: Any) -> None:
    del message.data[0].loss_fn_inputs["target_tokens"]


def _odd_bytes(message: Any) -> None:
    message.data[0].loss_fn_inputs["logprobs"].dense = b"abc"


def _other_shape(message: Any) -> None:
    message.data[0].loss_fn_inputs["logprobs"].shape[0] = -2


def _unknown_dtype(message: Any) -> None:
    message.data[0].loss_fn_inputs["logprobs"].dtype = 9


def _sparse(message: Any) -> None:
    message.data[0].loss_fn_inputs["logprobs"].sparse_csr.values = b""


def _image(message: Any) -> None:
    message.data[0].model_input.add().image.format = "png"


def _text_setting(message: Any) -> None:
    message.loss_fn_config_v2["a"].text = "b"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_without_targets, "data[0]: loss_fn_inputs has no target_tokens; it has"),
        (_odd_bytes, "data[0].loss_fn_inputs['logprobs']: 3 bytes are not a number of values of 4 bytes"),
        (_other_shape, "data[0].loss_fn_inputs['logprobs']: shape [-2] of 2 numbers; expected [2]"),
        (_unknown_dtype, "data[0].loss_fn_inputs['logprobs']: dtype 9 is unknown; expected one of 1, 2, 3, 4"),
        (_sparse, "data[0].loss_fn_inputs['logprobs']: sparse tensors are not supported"),
        (_image, "data[0].model_input[1]: image chunks are not supported; expected encoded_text"),
        (_text_setting, "loss_fn_config_v2['a']: 'b' is a text; expected a number"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(change: Any, sentence: str) -> None:
    message = request()
    change(message)
    with pytest.raises(WireError) as caught:
        decode_forward_request(message.SerializeToString())
    assert sentence in str(caught.value)


def test_unknown_fields_are_refused_with_their_place() -> None:
    tag = bytes([15 << 3, 1])
    with pytest.raises(WireError, match="body: field 15 of ForwardBackwardRequest is not known here"):
        decode_forward_request(request().SerializeToString() + tag)
    message = request()
    message.data[0].MergeFromString(tag)
    with pytest.raises(WireError, match=r"data\[0\]: field 15 of Datum is not known here"):
        decode_forward_request(message.SerializeToString())


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    try:
        decode_forward_request(body)
    except WireError:
        pass


@given(st.data())
def test_changed_messages_are_decoded_or_refused(data: st.DataObject) -> None:
    body = bytearray(request().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_forward_request(bytes(body))
    except WireError:
        pass


def test_results_of_forward_passes_are_read_as_they_were_written_or_refused() -> None:
    outputs, metrics = {"logprobs": [[-1.5, float("inf")], [], [0.25]], "loss": [[1.0]]}, {"loss:sum": -0.5}
    body = encode_forward_output(outputs, metrics)
    assert decode_forward_output(body) == (outputs, metrics)
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    column = message.loss_fn_outputs[0].fields["loss"]
    for offsets, sentence in (
        (np.array([0, 8], "<i8").tobytes(), r"loss_fn_outputs\['loss'\]: offsets \[0, 8\] of 4 bytes"),
        (np.array([0, 4], "<i8").tobytes()[:-1], r"loss_fn_outputs\['loss'\]: 15 bytes of offsets, dtype 1"),
        (b"", r"loss_fn_outputs\['loss'\]: offsets \[\] of 4 bytes"),
    ):
        column.offsets = offsets
        with pytest.raises(WireError, match=sentence):
            decode_forward_output(message.SerializeToString())


def test_results_of_forward_passes_are_ragged() -> None:
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(encode_forward_output({"logprobs": [[1.0, 2.0], [3.0]]}, {"loss:sum": 6.0}))
    (record,) = message.loss_fn_outputs
    column = record.fields["logprobs"]
    assert (record.num_datums, dict(message.metrics)) == (2, {"loss:sum": 6.0})
    assert np.frombuffer(column.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(column.data, "<f4").tolist() == [1.0, 2.0, 3.0]


BODY = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 3}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": None}, "prompt.chunks: missing; expected a list"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "prompt.chunks[0]: 'image' chunks are not supported"),
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"sampling_params": {"top_p": "x"}}, "sampling_params.top_p: 'x'; expected a number"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1: expected a number of at least 0"),
        ({"sampling_params": {"stop": ["a", 1]}}, "stop has texts and ids"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: not supported by this service; expected 0"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n: 2 of a prompt of 2 tokens"),
        ({"seq_id": -1}, "seq_id: -1; expected an integer of at least 0"),
        ({"seq_id": 2**63}, "seq_id: 9223372036854775808 is beyond 64 bits"),
        ({"num_samples": True}, "num_samples: True; expected an integer"),
    ],
)
def test_requests_for_samples_are_refused_with_their_field(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WireError) as caught:
        sample_of(Fields(BODY | change))
    assert sentence in str(caught.value)


def test_the_settings_of_adapters_and_steps_are_checked() -> None:
    assert lora_of(Fields({"lora_config": {"rank": 4, "train_mlp": False}}), 7).seed == 7
    with pytest.raises(WireError, match="lora_config: missing; models are trained by adapters alone"):
        lora_of(Fields({}), 0)
    with pytest.raises(WireError, match=r"lora_config\.rank: '4'; expected an integer"):
        lora_of(Fields({"lora_config": {"rank": "4"}}), 0)
    assert adam_of(Fields({"adam_params": {"learning_rate": 0.5}})).learning_rate == 0.5
    with pytest.raises(WireError, match=r"adam_params: .*beta1"):
        adam_of(Fields({"adam_params": {"beta1": 1.5}}))
    with pytest.raises(WireError, match="body: not JSON"):
        Fields.of_body(b"{")
    with pytest.raises(WireError, match="the only optimizer is AdamW"):
        adam_of(Fields({"optimizer_params": {"type": "dimuon"}}))


CONVERT = """
import json, sys
from tinker import types
from tinker.proto import request_conv, response_conv
from tinker.types.forward_backward_request import ForwardBackwardRequest
tensor = lambda data, dtype: types.TensorData(data=data, dtype=dtype)
datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={
    "target_tokens": [2, 3], "logprobs": tensor([-1.5, -0.5], "float32"), "advantages": tensor([1.0, 2.0], "float32")})
sent = ForwardBackwardRequest(model_id="m", seq_id=4, forward_backward_input=types.ForwardBackwardInput(
    data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5}))
output, samples = (bytes.fromhex(text) for text in sys.argv[1:])
output = response_conv.deserialize_forward_backward_output(output)
samples = response_conv.deserialize_sample_response(samples)
topk = samples.topk_prompt_logprobs
print(json.dumps([
    request_conv.forward_backward_request_to_proto(sent).SerializeToString().hex(),
    [[float(x) for x in each["logprobs"].data] for each in output.loss_fn_outputs], dict(output.metrics),
    [[list(map(int, each.tokens)), list(map(float, each.logprobs)), each.stop_reason] for each in samples.sequences],
    samples.prompt_logprobs, [None if row is None else [list(pair) for pair in row] for row in topk],
]))
"""


@pytest.mark.parametrize("version", ["0.25", "0.38"])
def test_the_messages_are_those_of_the_sdk(version: str) -> None:
    python = ROOT / f".venv-tinker-{version}" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no environment with the SDK: tools/venv tinker-{version} makes it")
    output = encode_forward_output({"logprobs": [[1.0, 2.0], [3.0]]}, {"loss:sum": 6.0})
    samples = encode_samples(
        [([5, 6], [-0.5, -1.0], "stop"), ([7], [-2.0], "length")], [None, -0.25], [None, [(4, -0.25), (9, -3.0)]]
    )
    done = subprocess.run(
        [python, "-c", CONVERT, output.hex(), samples.hex()], capture_output=True, text=True, check=True, timeout=60
    )
    sent, rows, metrics, sequences, prompt, topk = json.loads(done.stdout)
    found = decode_forward_request(bytes.fromhex(sent))
    assert (found.model_id, found.seq_id, found.loss, found.backward) == ("m", 4, "ppo", True)
    assert found.config == {"clip_low_threshold": 0.5}
    assert found.data[0].columns == {"logprobs": [-1.5, -0.5], "advantages": [1.0, 2.0]}
    assert (rows, metrics) == ([[1.0, 2.0], [3.0]], {"loss:sum": 6.0})
    assert sequences == [[[5, 6], [-0.5, -1.0], "stop"], [[7], [-2.0], "length"]]
    assert prompt == [None, -0.25]
    assert topk == [None, [[4, -0.25], [9, -3.0]]]
