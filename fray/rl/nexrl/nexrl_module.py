"""Base class of the components of a run."""

from __future__ import annotations

import json
import logging
import os
from abc import ABC
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy

logger = logging.getLogger("fray.rl")
DUMP_DIRECTORY = "FRAY_RL_DUMP"
"""Environment variable with the directory of `NexRLModule.easy_dump`."""


class NexRLModule(ABC):  # noqa: B024 (abstract as in the guide: what a component does is its own)
    """Component with a name and an activity tracker."""

    def __init__(self) -> None:
        self._module_name: str = "invalid"
        self._activity_tracker = ActivityTrackerProxy(ActivityTracker())

    def set_activity_tracker(self, tracker: ActivityTrackerProxy) -> None:
        """Set the activity tracker. Until then, the module has one of its own."""
        self._activity_tracker = tracker

    def set_module_name(self, module_name: str) -> None:
        """Set the name of the module in activities, errors and dumps."""
        self._module_name = module_name

    def get_module_name(self) -> str:
        """Return the name of the module; "invalid" before it is set."""
        return self._module_name

    def health_check(self) -> bool:
        """Return True: the module answers. Overrides may look further."""
        return True

    def easy_dump(
        self, value: Any, keys: Sequence[str] = (), value_formatter: Callable[[Any], Any] | None = None
    ) -> None:
        """Write a value for debugging: a line of JSON in ``$FRAY_RL_DUMP/<module>/<keys>.jsonl``, else a DEBUG line.

        Args:
            value: what JSON does not know is written as text.
            keys: names of the value.
            value_formatter: called with the value; its result is written.
        """
        text = json.dumps(value if value_formatter is None else value_formatter(value), default=str)
        directory = os.environ.get(DUMP_DIRECTORY)
        if directory is None:
            logger.debug("%s %s: %s", self._module_name, "/".join(keys), text)
            return
        path = Path(directory, self._module_name, *keys[:-1], f"{keys[-1] if keys else 'value'}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
