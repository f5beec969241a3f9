"""Settings of the HTTP ports of an inference server."""

from __future__ import annotations

from attrs import field, frozen

from fray.rl.http_access.access import HttpAccess
from fray.rl.model_spec import ModelSpec


@frozen
class WeightAddress:
    """Address to which weights are posted: of one process, while it lives.

    Args:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``, to which ``/update_weights`` is appended.
        key: that requests show.
        certificate: PEM; with ``https`` the server shows exactly this one. Default: one for its name, as on the web.
    """

    url: str
    key: str = field(repr=False)
    certificate: str = ""


@frozen
class HttpPort:
    """Port of an inference server.

    Args:
        model: for its tokenizer.
        port: 0 lets the system choose.
        name: of the model, for clients. Default: that of ``model``.
        key: that requests to control routes show; None: those routes are off.
        access: with TLS and a key for all routes, which other machines can reach. Default None: on loopback, which they
            cannot, without TLS; and only control routes need a key.
    """

    model: ModelSpec
    port: int = 0
    name: str | None = None
    key: str | None = field(default=None, repr=False)
    access: HttpAccess | None = None
