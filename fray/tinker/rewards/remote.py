"""Rewards of a reward server: POST {endpoint}/compute_reward for each sample, three tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from fray.tinker.rewards.child import score_of
from fray.tinker.rewards.uploaded import RewardCall, RewardError

TRIES = 3


class RemoteReward:
    """Reward server. Sync; one call at a time.

    Args:
        endpoint: its URL.
        timeout_s: for one sample.
    """

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._url = f"{endpoint}/compute_reward"
        self._client = httpx.Client(timeout=timeout_s)

    def scores(self, calls: Sequence[RewardCall]) -> list[float]:
        """Return the score of each call. Raises RewardError when the server does not answer one."""
        return [self._score(index, call) for index, call in enumerate(calls)]

    def _score(self, index: int, call: RewardCall) -> float:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        problem = ""
        for _ in range(TRIES):
            try:
                response = self._client.post(self._url, json=dict(zip(names, call, strict=True)))
                response.raise_for_status()
                answer: Any = response.json()
                return score_of(answer)
            except (httpx.HTTPError, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward server {self._url} for sample {index}, {TRIES} tries: {problem}")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
