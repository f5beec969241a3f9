"""Traces of NexAU agents as trajectories; pure, and without the package.

A trace is a tree of spans: ``{"type": "LLM", "inputs": {"messages", "tools"}, "outputs": {..., "nexrl_train": {...}},
"children": [...]}``. Spans of other types (agents, tools) have calls of the model below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fray.rl.nexrl_types import Trajectory

TRAIN = "nexrl_train"
TRAIN_KEYS = ("prompt_tokens", "response_tokens", "response_logprobs")


def calls_of_traces(traces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of the model in the traces, those of nested agents included, in the order of the spans.

    Each has ``messages``, ``tools``, ``response``, `TRAIN_KEYS`, and ``versions`` if the trace has them.

    Raises:
        ValueError: a span of a call has no ``nexrl_train``, or tokens and logprobs of other lengths; it names the span.
    """
    return [call for number, trace in enumerate(traces) for call in _calls_of(trace, f"traces[{number}]")]


def _calls_of(span: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
    if str(span.get("type", "")).upper() == "LLM":
        yield _call_of(span, place)
    for number, child in enumerate(span.get("children") or ()):
        yield from _calls_of(child, f"{place}.children[{number}]")


def _call_of(span: Mapping[str, Any], place: str) -> dict[str, Any]:
    inputs, outputs = span.get("inputs") or {}, span.get("outputs") or {}
    train = outputs.get(TRAIN)
    if not isinstance(train, Mapping) or any(key not in train for key in TRAIN_KEYS):
        raise ValueError(f"{place}: a call of the model has no {TRAIN} with {', '.join(TRAIN_KEYS)}")
    tokens, logprobs = train["response_tokens"], train["response_logprobs"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{place}: {len(tokens)} response_tokens, but {len(logprobs)} response_logprobs")
    return {
        "messages": inputs.get("messages", []),
        "tools": inputs.get("tools", []),
        "response": outputs.get("response", outputs.get("content", "")),
        "finish_reason": outputs.get("finish_reason", "stop"),
        **train,
    }


def merged_trajectories(calls: Sequence[Mapping[str, Any]], trains: Sequence[bool]) -> list[Trajectory]:
    """Return the trajectories of calls: those whose prompts continue an earlier call are merged into one.

    Args:
        calls: as `calls_of_traces` returns them.
        trains: for each call, whether its response counts in the loss.

    Raises:
        ValueError: another number of masks than calls.
    """
    if len(trains) != len(calls):
        raise ValueError(f"get_train_loss_mask returned {len(trains)} values for {len(calls)} calls of the model")
    found: list[Trajectory] = []
    for call, counts in zip(calls, trains, strict=True):
        prompt, response = list(call["prompt_tokens"]), list(call["response_tokens"])
        # Of several conversations that the prompt continues, such as those of a nested agent, the longest one.
        continued = [one for one in found if prompt[: len(one["tokens"])] == one["tokens"]]
        trajectory = max(continued, key=lambda one: len(one["tokens"]), default=None)
        if trajectory is None:
            trajectory = {"tokens": [], "loss_mask": [], "logprobs": [], "versions": []}
            found.append(trajectory)
        new = prompt[len(trajectory["tokens"]) :]
        trajectory["tokens"] += [*new, *response]
        trajectory["loss_mask"] += [0] * len(new) + [int(counts)] * len(response)
        trajectory["logprobs"] += [0.0] * len(new) + list(call["response_logprobs"])
        trajectory["versions"] += [tuple(segment) for segment in call.get("versions", ())]
        trajectory |= {key: call[key] for key in ("messages", "response", "finish_reason") if key in call}
    return [one for one in found if any(one["loss_mask"])]
