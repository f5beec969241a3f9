"""Bodies of OpenAI's completions and chat completions as requests of an inference server; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import evolve, field, frozen

from fray.model.text import near_text
from fray.rl.inference.chat_messages import InvalidMessage, Message, checked_messages
from fray.rl.inference.requests import Sampling

Kind: TypeAlias = Literal["completion", "chat"]
PROMPTS_LIMIT = 64
"""Prompts of one request."""
CHOICES_LIMIT = 128
"""Completions of one prompt."""
STOPS_LIMIT = 16
"""Stop strings of one request."""
TOP_LOGPROBS_LIMIT = 20

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error of OpenAI's shape.

    Attributes:
        status: of HTTP.
        param: field of the body at fault, if it is one.
        code: short name for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@frozen
class ApiRequest:
    """A completion or chat completion that was requested.

    Attributes:
        kind: which of the two.
        model: as the client names it; None if it does not.
        prompts: of a completion: texts, or tuples of token ids; at least one.
        messages: of a chat.
        tools: of a chat, for its template.
        sampling: how to choose the tokens.
        has_max_tokens: whether the client said how many; if not, ``sampling`` has the default.
        stream: the answer is a stream of events.
        include_usage: the last event of a stream has the counts of tokens.
        has_logprobs: the answer has logprobs.
        tokens_as_ids: tokens of logprobs are written ``token_id:5``.
        has_token_ids: the answer has the ids of prompt and completion.
        has_train_data: each choice has ``nexrl_train``.
    """

    kind: Kind
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: list[Message] = field(factory=list)
    tools: list[dict[str, Any]] = field(factory=list)
    sampling: Sampling = field(factory=Sampling)
    has_max_tokens: bool = False
    stream: bool = False
    include_usage: bool = False
    has_logprobs: bool = False
    tokens_as_ids: bool = False
    has_token_ids: bool = False
    has_train_data: bool = False

    def sampling_for(self, prompt_tokens: int, max_length: int) -> Sampling:
        """Return the sampling of a prompt: a chat without ``max_tokens`` may fill the context, as at OpenAI."""
        if self.has_max_tokens or self.kind == "completion":
            return self.sampling
        return evolve(self.sampling, max_tokens=max(1, self.sampling.min_tokens, max_length - prompt_tokens))


_SAMPLED = ("temperature", "top_p", "top_k", "min_tokens", "seed", "stop_token_ids", "ignore_eos", "n")
"""Fields with the names and values of `Sampling`."""
_COMMON = (
    *_SAMPLED,
    *("model", "stop", "max_tokens", "logprobs", "stream", "stream_options", "return_token_ids"),
    *("return_tokens_as_token_ids", "nexrl_train", "request_id"),
)
_FIELDS: dict[Kind, tuple[str, ...]] = {
    "completion": (*_COMMON, "prompt"),
    "chat": (*_COMMON, "messages", "tools", "tool_choice", "max_completion_tokens", "top_logprobs"),
}
_WITHOUT_EFFECT = {
    *("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "reasoning_effort", "verbosity", "skip_special_tokens", "priority"),
}
"""Fields that change no token here; clients send them."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "use_beam_search": (False,),
}
"""Fields that would change the tokens in a way that servers cannot do, and the values that change nothing."""


def parse_request(kind: Kind, body: object) -> ApiRequest:
    """Return the request of a body that was decoded from JSON. Fields that are null are taken as missing.

    Raises:
        ApiError: a field is unknown, of another type, out of range or not supported; it names the field.
    """
    if not isinstance(body, Mapping):
        raise ApiError(f"the body is {_kind(body)}; expected a JSON object")
    values = {str(name): value for name, value in body.items() if value is not None}
    for name, value in values.items():
        _check_name(kind, name, value)
    common: dict[str, Any] = {
        "model": _typed(values, "model", str, "a text"),
        "sampling": _sampling(kind, values),
        "has_max_tokens": "max_tokens" in values or "max_completion_tokens" in values,
        "stream": _flag(values, "stream"),
        "include_usage": _flag(_typed(values, "stream_options", Mapping, "an object") or {}, "include_usage"),
        "has_logprobs": values.get("logprobs") is not None and values["logprobs"] is not False,
        "tokens_as_ids": _flag(values, "return_tokens_as_token_ids"),
        "has_token_ids": _flag(values, "return_token_ids"),
        "has_train_data": _flag(values, "nexrl_train"),
    }
    if kind == "completion":
        return ApiRequest(kind, prompts=_prompts(values.get("prompt")), **common)
    try:
        messages = checked_messages(values.get("messages"))
    except InvalidMessage as error:
        raise ApiError(str(error), param=error.place) from None
    return ApiRequest(kind, messages=messages, tools=_tools(values), **common)


def _check_name(kind: Kind, name: str, value: Any) -> None:
    if name in _FIELDS[kind] or name in _WITHOUT_EFFECT:
        return
    if name in _NEUTRAL:
        if value not in _NEUTRAL[name]:
            only = " or ".join(map(repr, _NEUTRAL[name]))
            raise ApiError(f"{name}={value!r} is not supported; expected {only}, or leave it out", param=name)
        return
    known = (*_FIELDS[kind], *_NEUTRAL, *_WITHOUT_EFFECT)
    raise ApiError(f"unknown field {name!r}{near_text(name, known)}", param=name, code="unknown_parameter")


def _sampling(kind: Kind, values: Mapping[str, Any]) -> Sampling:
    found = {name: values[name] for name in _SAMPLED if name in values}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in values:
            found["max_tokens"] = _integer(values, name, 1, None)
    _integer(values, "n", 1, CHOICES_LIMIT)
    stop = values.get("stop", [])
    found["stop"] = [stop] if isinstance(stop, str) else stop
    for name, expected in (("stop", "a text or a list of texts"), ("stop_token_ids", "a list of ids of tokens")):
        if not isinstance(found.get(name, []), list):
            raise ApiError(f"{name}={values[name]!r}: expected {expected}", param=name)
    if len(found["stop"]) > STOPS_LIMIT:
        raise ApiError(f"stop has {len(found['stop'])} texts; expected at most {STOPS_LIMIT}", param="stop")
    _flag(values, "ignore_eos")
    if kind == "completion":
        found["logprobs"] = _integer(values, "logprobs", 0, TOP_LOGPROBS_LIMIT) or 0
    else:
        wants = _flag(values, "logprobs")
        found["logprobs"] = _integer(values, "top_logprobs", 0, TOP_LOGPROBS_LIMIT) or 0
        if found["logprobs"] and not wants:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    try:
        return Sampling(**found)
    except ValueError as error:
        # Its messages begin with the name of the value.
        raise ApiError(str(error), param=str(error).split("=")[0]) from None


def _prompts(prompt: object) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a text, a list of tokens, or a list of either."""
    if isinstance(prompt, str):
        found: tuple[str | tuple[int, ...], ...] = (prompt,)
    elif isinstance(prompt, Sequence) and prompt and all(_is_token(each) for each in prompt):
        found = (tuple(prompt),)
    elif isinstance(prompt, Sequence) and prompt and all(_is_prompt(each) for each in prompt):
        found = tuple(each if isinstance(each, str) else tuple(each) for each in prompt)
    else:
        text = "expected a text, a list of token ids, or a list of either"
        raise ApiError(f"prompt: {text}, found {_kind(prompt)}", param="prompt")
    if len(found) > PROMPTS_LIMIT:
        raise ApiError(f"prompt has {len(found)} prompts; expected at most {PROMPTS_LIMIT}", param="prompt")
    if not all(found):
        raise ApiError("prompt is empty; expected at least one token", param="prompt")
    return found


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(_is_token(each) for each in value))


def _tools(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = values.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError(f"tools: expected a list, found {_kind(tools)}", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            expected = 'expected {"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise ApiError(f"tools[{index}]: {expected}", param=f"tools[{index}]")
    choice = values.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        text = f"tool_choice={choice!r} would need constrained decoding, which servers do not do"
        raise ApiError(f"{text}; expected 'auto' or 'none'", param="tool_choice")
    return [] if choice == "none" else tools


def _typed(values: Mapping[str, Any], name: str, kind: type[Any], expected: str) -> Any:
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(f"{name}={value!r}: expected {expected}", param=name)
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    return _typed(values, name, bool, "true or false") or False


def _integer(values: Mapping[str, Any], name: str, least: int, most: int | None) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise ApiError(f"{name}={value!r}: expected {expected}", param=name)
    return int(value)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
