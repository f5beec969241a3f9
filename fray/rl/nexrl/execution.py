"""Calls of a function here, or of a method of an actor, by one name; and the format of log lines."""

from __future__ import annotations

import logging
from typing import Any


def execute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, or a method of an actor, and return its result; raises what it raises."""
    return func(*args, **kwargs)


def execute_async(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, or start a call of a method of an actor.

    Returns:
        The result of a function; for a method of an actor a future, whose ``result()`` waits.
    """
    remote = getattr(func, "remote", None)
    return func(*args, **kwargs) if remote is None else remote(*args, **kwargs)


def set_logging_basic_config(level: int | str) -> None:
    """Write log lines to standard error as ``time level logger: message``, from a level such as ``logging.DEBUG``."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
