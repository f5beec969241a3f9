"""Sync HTTP connection for JSON: of the clients, and to reward servers. The one module here that imports httpx."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx
from attrs import frozen

CONNECT_S = 10.0
"""Seconds for a connection to be made."""


@frozen
class JsonReply:
    """Answer of a server: its status, and its body; text where it is not JSON."""

    status: int
    body: Any


class JsonConnection:
    """Connections to one server, kept alive. Threads may share it.

    Args:
        url: of the server; paths are appended.
        timeout_s: for an answer; None: no limit.
        headers: of every request.
        ca_file: certificates that the server's is signed by; None: those of the system.
        pinned_file: certificate that the server has, whatever the name is by which it is reached; None: none.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        pinned_file: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        verify: bool | ssl.SSLContext = True
        if pinned_file is not None or ca_file is not None:
            verify = ssl.create_default_context(cafile=pinned_file or ca_file)
        if isinstance(verify, ssl.SSLContext) and pinned_file is not None:
            # The file has the server's own certificate, which an authority may have signed that is not in it.
            verify.check_hostname = False
            verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S), headers=dict(headers or {}), verify=verify
        )

    def request(
        self, method: str, path: str, body: bytes | Any = None, *, headers: Mapping[str, str] | None = None
    ) -> JsonReply:
        """Send a request and return the answer, whatever its status.

        Args:
            method: ``GET``, ``POST``, ``DELETE``.
            path: appended to the URL.
            body: JSON value, or bytes that are JSON; None: no body.
            headers: of this request.

        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the server cannot be reached, or the connection ended before the answer.
        """
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = self._client.request(
                method, self.url + path, content=content, headers={**kind, **(headers or {})}
            )
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{method} {self.url}{path}: {error or 'no answer in time'}") from error
        except httpx.HTTPError as error:
            raise ConnectionError(f"{method} {self.url}{path}: {error or type(error).__name__}") from error
        try:
            return JsonReply(response.status_code, response.json())
        except ValueError:
            return JsonReply(response.status_code, response.text)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
