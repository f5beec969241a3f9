"""Weights as safetensors in the body of an HTTP request to a server, Fray's or another with the same route."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from fray.net.tls.identity import HOST_NAME, client_context, read_pem
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_settings import WeightAddress
from fray.rl.weight_files import header_of
from fray.rl.weights_table import WeightTable

CONNECT_S = 10.0
PART_BYTES = 1 << 20
"""Bytes that are written at a time."""
TEXT_LIMIT_CHARACTERS = 500


async def post_weights(
    address: WeightAddress, version: VersionName, table: WeightTable, buffer: Any, mode: str = "keep"
) -> None:
    """Let a server load weights: ``POST /update_weights?version=0.3&mode=keep``. It has no limit of time of its own.

    Args:
        address: of the server.
        version: name of the weights.
        table: of the buffer.
        buffer: contiguous bytes, which are read until this returns.
        mode: what becomes of requests in flight, as in `InferenceServer.load_weights`.

    Raises:
        ConnectionError: it cannot be reached, is not the server of this address, or has not said that it has them.
        ValueError: it refuses these weights: they are of another model, or older than its own.
    """
    header = header_of(table)
    view = memoryview(buffer).cast("B")

    async def parts() -> AsyncIterator[bytes]:
        yield header
        for place in table.places.values():
            end = place.offset + place.byte_count
            for start in range(place.offset, end, PART_BYTES):
                yield bytes(view[start : min(start + PART_BYTES, end)])

    size = len(header) + sum(place.byte_count for place in table.places.values())
    headers = {"Authorization": f"Bearer {address.key}", "Content-Length": str(size)}
    try:
        async with httpx.AsyncClient(
            verify=_context_of(address),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            # The variables of a proxy are for the web.
            trust_env=False,
        ) as client:
            answer = await client.post(
                f"{address.url}/update_weights",
                params={"version": str(version), "mode": mode},
                content=parts(),
                headers=headers,
                extensions={"sni_hostname": HOST_NAME} if address.certificate else {},
            )
    except httpx.TransportError as error:
        raise ConnectionError(f"{address.url}: {type(error).__name__}: {_text_of(error)}") from error
    _check(address, version, answer)


def _text_of(error: BaseException) -> str:
    """Return what an error says; those of httpx say nothing where the one below them does."""
    found: BaseException | None = error
    while found is not None and not str(found):
        found = found.__cause__ or found.__context__
    return str(found or "")


def _context_of(address: WeightAddress) -> bool | ssl.SSLContext:
    if address.certificate:
        return client_context(read_pem(address.certificate.encode()))
    # Without TLS the system's certificates, which take 20 ms to read, are not asked for.
    return address.url.startswith("https:")


def _check(address: WeightAddress, version: VersionName, answer: httpx.Response) -> None:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if answer.status_code == 200 and body.get("version") == str(version):
        return
    text = (body.get("error") or {}).get("message") or answer.text[:TEXT_LIMIT_CHARACTERS]
    if answer.status_code == 400:
        raise ValueError(text)
    raise ConnectionError(f"{address.url} answered {answer.status_code}: {text}")
