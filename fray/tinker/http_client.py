"""Sync HTTP connection: of the clients, and to reward servers. The one module here that imports httpx."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from typing import Any

import httpx
from attrs import field, frozen

CONNECT_S = 10.0
"""Seconds for a connection to be made."""


class ServerUnreachable(ConnectionError):
    """No connection could be made: nothing was sent."""


@frozen
class JsonReply:
    """Answer of a server: its status, and its body; text where it is not JSON."""

    status: int
    body: Any


@frozen
class RawReply:
    """Answer of a server: its status, its kind (``Content-Type``), and the bytes of its body."""

    status: int
    kind: str
    content: bytes = field(repr=False)


class JsonConnection:
    """Connections to one server, kept alive. Threads may share it.

    Args:
        url: of the server; paths are appended.
        timeout_s: for an answer; None: no limit.
        headers: of every request.
        ca_file: certificates that the server's is signed by; None: those of the system.
        pinned_file: certificate that the server has, whatever the name is by which it is reached; None: none.
        answer_limit: bytes of an answer, which then has to be complete after ``timeout_s``; None: no limit.
        uses_proxies: those of the environment's variables.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        pinned_file: str | None = None,
        answer_limit: int | None = None,
        uses_proxies: bool = True,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._answer_limit = timeout_s, answer_limit
        verify: bool | ssl.SSLContext = True
        if pinned_file is not None or ca_file is not None:
            verify = ssl.create_default_context(cafile=pinned_file or ca_file)
        if isinstance(verify, ssl.SSLContext) and pinned_file is not None:
            # The file has the server's own certificate, which an authority may have signed that is not in it.
            verify.check_hostname = False
            verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        # Redirects are not followed: a server's answer does not choose where requests go.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            headers=dict(headers or {}),
            verify=verify,
            trust_env=uses_proxies,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
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
            ServerUnreachable: no connection can be made.
            ConnectionError: the connection ended before the answer, or the answer is too long.
        """
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        reply = self.exchange(method, path, content, headers={**kind, **(headers or {})})
        try:
            return JsonReply(reply.status, json.loads(reply.content))
        except (ValueError, RecursionError):
            return JsonReply(reply.status, reply.content.decode(errors="replace"))

    def exchange(
        self, method: str, path: str, content: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> RawReply:
        """Send a request whose body, and that of the answer, are any bytes. Raises as `request`."""
        place = f"{method} {self.url}{path}"
        try:
            with self._client.stream(method, self.url + path, content=content, headers=headers) as response:
                got = response.read() if self._answer_limit is None else self._limited(response, place)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(f"{place}: {error or 'no connection in time'}") from error
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{place}: {error or 'no answer in time'}") from error
        except httpx.HTTPError as error:
            raise ConnectionError(f"{place}: {error or type(error).__name__}") from error
        return RawReply(response.status_code, response.headers.get("Content-Type", ""), got)

    def _limited(self, response: httpx.Response, place: str) -> bytes:
        """Return what a server sends, as it is: something compressed would be longer than its bytes."""
        assert self._answer_limit is not None
        got, began = bytearray(), time.monotonic()
        for part in response.iter_raw():
            got += part
            if len(got) > self._answer_limit:
                raise ConnectionError(f"{place}: the answer has more than {self._answer_limit} bytes")
            if self._timeout_s is not None and time.monotonic() - began > self._timeout_s:
                raise TimeoutError(f"{place}: no complete answer after {self._timeout_s:g} s")
        return bytes(got)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
