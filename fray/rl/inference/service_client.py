"""`LLMServiceClient` of NexRL's guide: the model for the threads of rollout workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.rl.inference.client import LLM
from fray.rl.inference.openai_requests import ApiError, ApiRequest, Kind, parse_request
from fray.rl.inference.replies import ModelReply
from fray.rl.inference.requests import PromptTooLong

BACKENDS = ("fray", "openai", "vllm")
BLOCKED_S = 0.1
"""Seconds between two questions to a controller that blocks requests; the guide's has no way to wait."""
DEFAULT_MODEL_TAG = "default"


class LLMBackend(Protocol):
    """Way to the servers, by which the requests of a client are answered. Called in threads."""

    def request(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a body of OpenAI's API, as a dict of the guide.

        Raises:
            ApiError: the body is invalid, or the service refuses it.
            ConnectionError: the service cannot be reached.
        """


class WeightSyncStatus(Protocol):
    """Part of a weight sync controller that a client asks."""

    def check_rollout_service_status(self, model_tag: str) -> str: ...


class LLMServiceClient:
    """Client of the model, for sync code: `completion` and `generate` wait. Threads may share it.

    Args:
        config: dict or ``DictConfig`` with the keys below, or one that has them below ``inference_service``:
            ``backend``: ``fray`` (default; the servers of the run, by actor calls), ``openai`` or ``vllm`` (HTTP);
            ``url`` or ``base_url``: of the HTTP service, up to and with ``/v1``; ``model``: its name there;
            ``api_key``; ``max_retries`` (3): repetitions of a request that failed for a reason that may pass;
            ``timeout_s`` (600): of one attempt; ``model_tag`` (``default``); ``freeze_for_weight_sync`` (true): new
            requests wait while weights are synced.
        backend: instead of the one that ``config`` names.

    Raises:
        InvalidRequest: the backend is unknown, or an HTTP backend has no ``url``.
    """

    def __init__(self, config: Mapping[str, Any], backend: LLMBackend | None = None) -> None:
        settings = config.get("inference_service") or config
        kind = settings.get("backend") or "fray"
        if kind not in BACKENDS:
            expected = f"expected one of {', '.join(BACKENDS)}{near_text(str(kind), BACKENDS)}"
            raise InvalidRequest(f"unknown backend {kind!r} of the inference service; {expected}")
        self._model_tag: str = settings.get("model_tag") or DEFAULT_MODEL_TAG
        freezes = settings.get("freeze_for_weight_sync")
        self._freezes = True if freezes is None else bool(freezes)
        self._controller: WeightSyncStatus | None = None
        self._model: str | None = settings.get("model") or None
        self._backend = backend
        if backend is None and kind != "fray":
            from fray.rl.inference.http_service import HttpBackend

            self._backend = HttpBackend(settings, has_token_ids=kind == "vllm")

    @property
    def model_tag(self) -> str:
        """Model for which the client's trajectories are."""
        return self._model_tag

    def set_backend(self, backend: LLMBackend) -> None:
        """Have the next requests answered by another backend, such as `EpisodeBackend` of the task at hand."""
        self._backend = backend

    def set_weight_sync_controller(self, controller: WeightSyncStatus) -> None:
        """Let requests wait while the controller says "block", unless ``freeze_for_weight_sync`` is false."""
        self._controller = controller

    def completion(self, prompt: str | Sequence[int], **kwargs: Any) -> dict[str, Any]:
        """Complete a prompt, and wait for it.

        Args:
            prompt: text, or ids of tokens.
            kwargs: fields of OpenAI's API, such as ``max_tokens`` (16) and ``temperature`` (1).

        Returns:
            ``prompt``, ``response``, ``finish_reason``, ``kwargs``; and ``nexrl_train``, with ``prompt_tokens``,
            ``response_tokens`` and ``response_logprobs``, unless the backend is ``openai``. Of backend ``fray`` it is
            a `ModelReply`.

        Raises:
            ApiError: a field is invalid (`param` names it), or the service refuses it, after its retries.
            InvalidRequest: there is no backend.
        """
        return self._ask("completion", {"prompt": prompt, **kwargs})

    def generate(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """Reply to a conversation, and wait for it.

        Args:
            messages: of OpenAI's form.
            kwargs: as in `completion`, and ``tools``.

        Returns:
            As `completion`, with ``messages`` and ``tool_calls`` (a list of OpenAI's form) instead of ``prompt``.

        Raises:
            ApiError: as `completion`.
            InvalidRequest: as `completion`.
        """
        return self._ask("chat", {"messages": list(messages), **kwargs})

    def _ask(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        if self._backend is None:
            raise InvalidRequest(
                "this LLMServiceClient has no servers: its backend 'fray' is set by the run's rollout worker; "
                "elsewhere give it backend: openai or vllm, and url"
            )
        while self._is_blocked():
            threading.Event().wait(BLOCKED_S)
        model = {"model": self._model} if self._model and "model" not in body else {}
        answer = self._backend.request(kind, {**model, **body})
        # The guide's dict has the arguments of the request.
        for name, value in body.items():
            answer.setdefault(name, value)
        return answer

    def _is_blocked(self) -> bool:
        if not self._freezes or self._controller is None:
            return False
        return self._controller.check_rollout_service_status(self._model_tag) == "block"


class EpisodeBackend:
    """`LLMBackend` that asks the model of an episode: actor calls, recorded in ``llm.replies``.

    Args:
        llm: the model of the task at hand.
        token: of the loop of ``llm``; None in threads that Trio has started.
    """

    def __init__(self, llm: LLM, token: trio.lowlevel.TrioToken | None = None) -> None:
        self._llm, self._token = llm, token

    def request(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Return a `ModelReply`. Raises ApiError if a field is invalid or ``n`` is not 1."""
        request = parse_request(kind, body)
        if request.sampling.n != 1 or len(request.prompts) > 1:
            name = "prompt" if len(request.prompts) > 1 else "n"
            raise ApiError(f"{name}: a reply is one dict; ask for one at a time", param=name)
        return trio.from_thread.run(self._reply, request, body, trio_token=self._token)

    async def _reply(self, request: ApiRequest, body: dict[str, Any]) -> ModelReply:
        llm, sampling = self._llm, request.sampling
        try:
            if request.kind == "completion":
                replies = await llm.complete(llm.tokens_of(request.prompts[0]), sampling, asked=body)
            else:
                chat = llm.chat_prompt(request.messages, request.tools)
                replies = await llm.reply_to(chat, sampling, asked=body)
        except PromptTooLong:
            raise  # by its name the run drops the task
        except ValueError as error:
            raise ApiError(str(error)) from None
        return replies[0]
