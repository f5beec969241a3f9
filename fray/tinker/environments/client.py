"""Requests to environment servers: sync, bounded in time, tries and size."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from fray.tinker.core.environments import EnvironmentSettings, environments_of, shard_of
from fray.tinker.core.training_config import ConfigError
from fray.tinker.http_client import JsonConnection, ServerUnreachable

ANSWER_LIMIT_BYTES = 1 << 20
"""Bytes of an answer."""
PAUSE_S = 0.5
"""First pause between two tries, doubled up to `PAUSE_LIMIT_S`."""
PAUSE_LIMIT_S = 5.0
BUSY = (429, 503)
"""States of HTTP by which a server says that it did not execute a request."""


def read_environments(text: str) -> dict[str, EnvironmentSettings]:
    """Return the environments of an interaction configuration, YAML as a text. Raises ConfigError."""
    # Here, as jobs without environments need no YAML.
    import yaml

    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"interaction config: it is not YAML: {error!s:.300}") from None
    return environments_of(config)


class EnvironmentFailed(Exception):
    """Environment that does not answer, or with nonsense; the message says for which request and why.

    Attributes:
        is_unreachable: no connection could be made.
    """

    def __init__(self, message: str, *, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_unreachable = is_unreachable


@frozen
class EnvironmentStep:
    """Answer to an action."""

    observation: str
    reward: float
    done: bool


class EnvironmentClient:
    """Servers of one environment. Threads may share it.

    Args:
        settings: of the servers.
        job_id: of the job, which each request has.
        sleep: pauses.
    """

    def __init__(
        self, settings: EnvironmentSettings, job_id: str, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._settings, self._job_id, self._sleep = settings, job_id, sleep
        self._connections = [
            JsonConnection(url, timeout_s=settings.timeout_s, answer_limit=ANSWER_LIMIT_BYTES, uses_proxies=False)
            for url in settings.urls
        ]
        self._unreachable: dict[int, str] = {}
        """Servers that no try has reached since `begin`, with the reason: the others do not wait for them, too."""

    def begin(self) -> None:
        """Try servers again that could not be reached."""
        self._unreachable.clear()

    def reset(self, instance_id: str, task: Mapping[str, Any]) -> tuple[str, bool]:
        """Begin an instance; return its first observation, and whether a step may be sent again.

        Raises EnvironmentFailed.
        """
        body = self._ask("/reset", instance_id, dict(task), can_repeat=True)
        return _text_of(body, "/reset"), body.get("repeats_turns") is True

    def step(self, instance_id: str, action: str, turn: int, *, can_repeat: bool) -> EnvironmentStep:
        """Send an action and return the answer.

        Args:
            instance_id: as of `reset`.
            action: text of the model.
            turn: number of the action, from 0: a server that counts turns executes each once.
            can_repeat: the server counts them. Others get an action again only if it cannot have reached them.

        Raises:
            EnvironmentFailed: as `reset`.
        """
        body = self._ask("/step", instance_id, {"action": action, "turn": turn}, can_repeat=can_repeat)
        reward, done = body.get("reward"), body.get("done")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFailed(f"/step: 'reward' is {_shown(reward)}; expected a finite number")
        if not isinstance(done, bool):
            raise EnvironmentFailed(f"/step: 'done' is {_shown(done)}; expected true or false")
        return EnvironmentStep(_text_of(body, "/step"), float(reward), done)

    def finalize(self, instance_id: str) -> None:
        """End an instance; once, whatever comes of it: servers forget those that are abandoned."""
        with contextlib.suppress(EnvironmentFailed):
            self._ask("/finalize", instance_id, {}, can_repeat=False, tries=1)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def _ask(
        self, path: str, instance_id: str, fields: dict[str, Any], *, can_repeat: bool, tries: int | None = None
    ) -> dict[str, Any]:
        shard = shard_of(instance_id, len(self._connections))
        url = f"{self._settings.urls[shard]}{path}"
        body = {**fields, "instance_id": instance_id, "job_id": self._job_id}
        problem, is_unreachable = "", False
        for attempt in range(tries or self._settings.tries):
            if shard in self._unreachable:
                raise EnvironmentFailed(f"{url}: {self._unreachable[shard]}", is_unreachable=True)
            if attempt:
                self._sleep(min(PAUSE_S * 2.0 ** (attempt - 1), PAUSE_LIMIT_S))
            is_unreachable = False
            try:
                reply = self._connections[shard].request("POST", path, body)
            except ServerUnreachable as error:
                problem, is_unreachable = str(error), True
            except (ConnectionError, TimeoutError) as error:
                problem = str(error)
                if not can_repeat:
                    break
            else:
                if reply.status == 200 and isinstance(reply.body, dict):
                    return reply.body
                problem = f"{url}: status {reply.status}: {_detail_of(reply.body)}"
                if reply.status not in BUSY:
                    break
        text = problem if attempt == 0 else f"{problem} ({attempt + 1} tries)"
        if is_unreachable and tries is None:
            self._unreachable[shard] = text
        raise EnvironmentFailed(text, is_unreachable=is_unreachable)


def _text_of(body: Mapping[str, Any], path: str) -> str:
    """Return the observation of an answer; an instance may have none."""
    observation = body.get("observation")
    if observation is not None and not isinstance(observation, str):
        raise EnvironmentFailed(f"{path}: 'observation' is {_shown(observation)}; expected a text")
    return observation or ""


def _detail_of(body: Any) -> str:
    detail = body.get("detail", body) if isinstance(body, dict) else body
    return f"{detail!s:.300}"


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r:.100}"
