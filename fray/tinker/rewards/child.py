"""Program of a child process that runs an uploaded reward function: one JSON message a line, in and out.

It imports nothing of Fray, and gets neither the environment of the engine nor its open files.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any

TRACEBACK_LIMIT = 4_000
"""Characters of a traceback that are returned."""


def limit_resources(memory_bytes: int) -> None:
    """Limit memory and files of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def function_of(name: str, source: str) -> Callable[..., Any]:
    """Run the source, and return its function. Raises whatever the source raises, and NameError without it."""
    module: dict[str, Any] = {"__name__": "uploaded_reward"}
    exec(compile(source, f"<{name}>", "exec"), module)
    function = module.get(name)
    if not callable(function):
        raise NameError(f"the source defines no function {name!r}")
    found: Callable[..., Any] = function
    return found


def score_of(value: Any) -> float:
    """Return the score of what a function returned: a number, or a dict with one. Raises TypeError for others."""
    if isinstance(value, dict):
        value = value.get("score")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}; expected a finite number")
    return score


def _report(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}", "traceback": text[-TRACEBACK_LIMIT:]}


def serve() -> None:
    """Answer messages until the input ends."""
    # What the function prints goes to standard error, and not among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    begin = json.loads(sys.stdin.readline())
    limit_resources(begin["memory_bytes"])
    try:
        function = function_of(begin["name"], begin["source"])
    except BaseException as error:  # noqa: BLE001 (uploaded code may raise anything, SystemExit included)
        answer(_report(error))
        return
    answer({})
    for line in sys.stdin:
        scores: list[float] = []
        try:
            for call in json.loads(line):
                # One by one: the error of a call names its place.
                scores.append(score_of(function(*call)))  # noqa: PERF401
        except BaseException as error:  # noqa: BLE001 (as above)
            answer({"at": len(scores), **_report(error)})
        else:
            answer({"scores": scores})


if __name__ == "__main__":
    serve()
