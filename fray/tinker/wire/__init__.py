"""Codecs of what clients and servers send, as pure functions: values to JSON and back.

- `dataproto`: batches of OpenTinker (verl's DataProto).

What cannot be decoded is refused with the place in the message where it is. Nothing here imports torch: tensors are
`TensorRecord`, arrays of NumPy with the dtype that torch has for them.
"""
