"""Tool calls in the text of a model, as Hermes and Qwen write them; pure.

``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, any number of them after a text.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def split_tool_calls(text: str, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls as messages of OpenAI have them.

    What is between the tags and not a JSON object with a ``name`` stays text: an answer that a reward can judge, and
    no error. The last closing tag may be missing, where it is what ended the answer.

    Args:
        text: of the model.
        name: of the answer; ids of calls follow from it.
    """
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        function = _function_of(match[1])
        if function is None:
            return match[0]
        identity = sha256(f"{name}/{len(calls)}".encode()).hexdigest()[:24]
        calls.append({"id": f"call_{identity}", "type": "function", "function": function})
        return ""

    rest = _CALL.sub(take, text)
    # As a stream has it: what is before a call is sent without the space that follows it.
    return (rest.rstrip() if calls else text), calls


def _function_of(text: str) -> dict[str, str] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return {
        "name": value["name"],
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    }
