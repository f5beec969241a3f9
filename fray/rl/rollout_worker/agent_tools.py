"""Tools of agents: functions of the user, described to the model by their signatures, with checked arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from attrs import frozen

from fray.model.text import near_text

JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@frozen
class AgentTool:
    """Function that a model may call.

    Args:
        name: by which the model calls it.
        function: plain; its annotations are the types of the arguments.
        description: for the model.
        types: JSON type of each argument; "" for any.
        required: arguments without a default.
    """

    name: str
    function: Callable[..., Any]
    description: str
    types: Mapping[str, str]
    required: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """Description of the tool, of OpenAI's form."""
        properties = {name: {"type": kind} if kind else {} for name, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, arguments: object) -> str:
        """Call the function; return its result as text, or what is wrong with the arguments, for the model to read.

        Args:
            arguments: a mapping, or JSON of one.
        """
        values, problem = self._checked(arguments)
        if problem:
            return f"error: {problem}"
        try:
            result = self.function(**values)
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything; the model reads it)
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)

    def _checked(self, arguments: object) -> tuple[dict[str, Any], str]:
        """Return the arguments, or why they cannot be used."""
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return {}, f"the arguments of {self.name} are not JSON"
        if not isinstance(values, Mapping):
            return {}, f"the arguments of {self.name} are {_json_type(values)}; expected an object"
        expected = f"expected {', '.join(self.types) or 'none'}"
        for name, value in values.items():
            if name not in self.types:
                return {}, f"unknown argument {name!r} of {self.name}{near_text(str(name), self.types)}; {expected}"
            kind, found = self.types[name], _json_type(value)
            if kind and found != kind and (kind, found) != ("number", "integer"):
                return {}, f"argument {name!r} of {self.name} is {found}; expected {kind}"
        for name in self.required:
            if name not in values:
                return {}, f"missing argument {name!r} of {self.name}; {expected}"
        return dict(values), ""


def tool_of(function: Callable[..., Any], name: str | None = None) -> AgentTool:
    """Return the tool of a function, by its annotations and the first paragraph of its docstring.

    Raises:
        TypeError: it is not a plain function, or its arguments cannot be given by name.
    """
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"invalid tool {function!r}: expected a plain function")
    hints = get_type_hints(function)
    types, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"invalid tool {function!r}: its parameter {parameter} cannot be given by name")
        hint = hints.get(parameter.name)
        types[parameter.name] = JSON_TYPES.get(getattr(hint, "__origin__", hint), "")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    text = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return AgentTool(name or function.__name__, function, text, types, tuple(required))


def _json_type(value: object) -> str:
    return "null" if value is None else JSON_TYPES.get(type(value), type(value).__name__)
