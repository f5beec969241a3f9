"""Messages of a chat as chat templates take them, and when two are the same; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of OpenAI, and those of chat templates."""


class InvalidMessage(ValueError):
    """A message is not one of a chat.

    Attributes:
        place: the field, such as ``messages[2].content``.
    """

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")
        self.place = place


def checked_messages(messages: object) -> list[Message]:
    """Return messages as chat templates take them.

    Contents are texts, "" if they are missing; parts of text are joined by line breaks. Arguments of tool calls are
    objects. "developer" is "system". Keys that are None are left out.

    Raises:
        InvalidMessage: they are not a list of messages; it names the field.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidMessage("messages", f"expected a list with at least one message, found {_kind(messages)}")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: object, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidMessage(place, f"expected an object with role and content, found {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidMessage(f"{place}.role", f"expected one of {', '.join(ROLES)}, found {role!r}")
    checked: Message = {key: value for key, value in message.items() if value is not None}
    checked |= {"role": ROLES[role], "content": _text(message.get("content"), f"{place}.content")}
    calls = message.get("tool_calls")
    checked.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidMessage(f"{place}.tool_calls", f"expected a list, found {_kind(calls)}")
        checked["tool_calls"] = [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return checked


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidMessage(place, f"expected a text or a list of parts, found {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = repr(part.get("type")) if isinstance(part, Mapping) else _kind(part)
            raise InvalidMessage(f"{place}[{index}]", f"expected a part of text, found {kind}")
        texts.append(text)
    return "\n".join(texts)


def _call(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidMessage(place, 'expected {"id": ..., "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # as the model wrote them: templates take texts, too
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def key_of(message: Message) -> str:
    """Return a text that is equal for equal messages. Ids of tool calls do not count: some agents renumber them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True, default=repr)


def _kind(value: object) -> str:
    return "nothing" if value is None else "an empty list" if value == [] else type(value).__name__
