"""Requests to an inference service over HTTP, OpenAI's or vLLM's."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import httpx

from fray.errors import InvalidRequest
from fray.rl.inference.openai_requests import ApiError, Kind

MAX_RETRIES = 3
TIMEOUT_S = 600.0
"""Seconds of one attempt; of connecting, at most `CONNECT_S`."""
CONNECT_S = 10.0
BACKOFF_S = 0.5
"""Seconds before the first repetition, by half more or less; doubled for each, up to `BACKOFF_LIMIT_S`."""
BACKOFF_LIMIT_S = 8.0
PASSING_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Answers after which a request is repeated."""
PATHS: dict[Kind, str] = {"completion": "completions", "chat": "chat/completions"}


class HttpBackend:
    """`LLMBackend` of a service with OpenAI's API. Threads may share it.

    A repeated request has the id of the first (``X-Request-Id``): a Fray server that has it already runs it once.

    Args:
        settings: ``url`` or ``base_url``, ``api_key``, ``max_retries``, ``timeout_s``, and ``ca_file``, the authority
            of the service's certificate, such as ``output/http/ca.pem`` of a run (default: those of the system).
        has_token_ids: the service is vLLM's or Fray's, which returns token ids and logprobs; answers then have
            ``nexrl_train``.
        transport: of httpx; None: the network.

    Raises:
        InvalidRequest: there is no URL, or the file of the authority cannot be read.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, has_token_ids: bool, transport: httpx.BaseTransport | None = None
    ) -> None:
        url = settings.get("url") or settings.get("base_url")
        if not url or not str(url).startswith(("http://", "https://")):
            raise InvalidRequest(f"invalid url {url!r} of the inference service; expected http://HOST:PORT/v1")
        retries, timeout_s = settings.get("max_retries"), float(settings.get("timeout_s") or TIMEOUT_S)
        self._retries = MAX_RETRIES if retries is None else int(retries)
        self._has_token_ids = has_token_ids
        key = settings.get("api_key")
        self._client = httpx.Client(
            base_url=f"{str(url).rstrip('/')}/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=_context_of(settings.get("ca_file")),
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def request(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a body as a dict of the guide.

        Raises:
            ApiError: the service refuses it, or answers something else than OpenAI's API has.
            ConnectionError: it could not be reached, after all retries.
        """
        wanted = dict(body)
        if self._has_token_ids:
            wanted |= {"return_token_ids": True, "logprobs": True if kind == "chat" else body.get("logprobs") or 0}
        headers = {"X-Request-Id": f"client-{uuid4().hex}"}
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                answer = self._client.post(PATHS[kind], json=wanted, headers=headers)
            except httpx.TransportError as error:
                if is_last:
                    where = self._client.base_url
                    text = f"no answer from {where} after {attempt + 1} attempts: {type(error).__name__}: {error}"
                    raise ConnectionError(text) from error
            else:
                if answer.status_code == 200:
                    found = _guide_dict(kind, _json(answer))
                    # An update in mode "abort" ended it: the same request gets an answer of the new weights.
                    if found["finish_reason"] != "abort" or is_last:
                        return found
                elif is_last or answer.status_code not in PASSING_STATUS:
                    raise _error_of(answer)
            backoff_s = min(BACKOFF_S * 2**attempt, BACKOFF_LIMIT_S)
            time.sleep(backoff_s * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable: the last attempt returns or raises")


def _context_of(ca_file: Any) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        reason = "expected certificates in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise InvalidRequest(f"invalid ca_file {str(ca_file)!r} of the inference service: {reason}") from None


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value.get("choices"):
        raise ApiError(f"{answer.url} did not answer as OpenAI's API does: {answer.text[:200]!r}", status=502)
    return value


def _error_of(answer: httpx.Response) -> ApiError:
    try:
        value = answer.json()
    except ValueError:
        value = {}
    error = value.get("error", value) if isinstance(value, dict) else {}
    found = error if isinstance(error, dict) else {"message": error}
    text = found.get("message") or answer.text[:500] or answer.reason_phrase
    message = f"{answer.url} answered {answer.status_code}: {text}"
    return ApiError(message, status=answer.status_code, param=found.get("param"), code=found.get("code"))


def _guide_dict(kind: Kind, answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    if kind == "chat":
        message = choice.get("message") or {}
        found = {"response": message.get("content") or "", "tool_calls": message.get("tool_calls") or []}
    else:
        found = {"response": choice.get("text") or ""}
    found["finish_reason"] = choice.get("finish_reason")
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if prompt_ids is not None and choice.get("token_ids") is not None:
        logprobs = choice.get("logprobs") or {}
        of_chat = [each["logprob"] for each in logprobs.get("content") or []]
        found["nexrl_train"] = {
            "prompt_tokens": prompt_ids,
            "response_tokens": choice["token_ids"],
            "response_logprobs": of_chat if kind == "chat" else logprobs.get("token_logprobs") or [],
        }
    return found
