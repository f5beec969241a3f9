"""Messages of the Tinker API in protocol buffers: their fields, from which the classes are built.

There is no generated code: the tables below are all of it. Fields that Fray does not read are not in them, and so are
refused by their number (`tinker_proto`).
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "fray.tinker"
_KINDS = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _KINDS.TYPE_DOUBLE,
    "int64": _KINDS.TYPE_INT64,
    "int32": _KINDS.TYPE_INT32,
    "uint32": _KINDS.TYPE_UINT32,
    "bool": _KINDS.TYPE_BOOL,
    "string": _KINDS.TYPE_STRING,
    "bytes": _KINDS.TYPE_BYTES,
}
_FIELDS = {
    "SparseCsr": "values:1:bytes crow_indices:2:bytes col_indices:3:bytes",
    # `dense` and `sparse_csr` are of one oneof, which the wire does not show.
    "Tensor": "dense:1:bytes sparse_csr:2:SparseCsr dtype:3:int32 shape:4:*int64",
    "EncodedTextChunk": "tokens:1:bytes",
    "ImageChunk": "data:1:bytes format:2:string",
    "Chunk": "encoded_text:1:EncodedTextChunk image:2:ImageChunk dmel:3:bytes",
    "Datum": "model_input:1:*Chunk loss_fn_inputs:2:{Tensor}",
    "LossConfigValue": "number:1:double text:2:string",
    "ForwardBackwardRequest": "model_id:1:string seq_id:2:int32 data:3:*Datum loss_fn:4:string "
    "loss_fn_config:5:{double} forward_only:6:bool loss_fn_config_v2:7:{LossConfigValue}",
    "BatchedTensor": "data:1:bytes offsets:2:bytes dtype:3:int32 trailing_shape:4:*int64",
    "ArrayRecord": "type_tag:1:string fields:2:{BatchedTensor} num_datums:3:int64",
    "ForwardBackwardOutput": "loss_fn_output_type:1:string loss_fn_outputs:2:*ArrayRecord metrics:3:{double}",
    "TopkLogprobs": "token_ids:1:bytes logprobs:2:bytes k:3:uint32 length:4:uint32",
    "SampledSequence": "stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes topk_sampled_logprobs:4:TopkLogprobs",
    "SampleResponse": "sequences:1:*SampledSequence prompt_logprobs:2:bytes topk_prompt_logprobs:3:TopkLogprobs "
    "prompt_cache_hit_tokens:4:int32",
}
"""Fields by message: ``name:number:kind``; ``*`` is repeated, ``{kind}`` a map from strings."""


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_KINDS.LABEL_OPTIONAL)
    if kind.startswith("{"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, kind[1:-1])
        field.label, field.type = _KINDS.LABEL_REPEATED, _KINDS.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.startswith("*"):
        field.label, kind = _KINDS.LABEL_REPEATED, kind[1:]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="fray_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, number, kind = text.split(":")
            _add_field(message, field, int(number), kind)
    # A pool of its own: a process that has the SDK, too, has its messages by other names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


MESSAGES = _classes()
"""Classes by name."""
