"""Settings of the HTTP port of an inference server."""

from __future__ import annotations

from attrs import field, frozen

from fray.rl.model_spec import ModelSpec


@frozen
class HttpPort:
    """Port of an inference server, on loopback: other machines cannot reach it.

    Args:
        model: for its tokenizer.
        port: 0 lets the system choose.
        name: of the model, for clients. Default: that of ``model``.
        key: that requests to control routes show; None: those routes are off.
    """

    model: ModelSpec
    port: int = 0
    name: str | None = None
    key: str | None = field(default=None, repr=False)
