"""Rewards of a reward server: POST {endpoint}/compute_reward for each sample, three tries."""

from __future__ import annotations

from collections.abc import Sequence

from fray.tinker.http_client import JsonConnection
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
        self._connection = JsonConnection(endpoint, timeout_s=timeout_s)

    def scores(self, calls: Sequence[RewardCall]) -> list[float]:
        """Return the score of each call. Raises RewardError when the server does not answer one."""
        return [self._score(index, call) for index, call in enumerate(calls)]

    def _score(self, index: int, call: RewardCall) -> float:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        problem = ""
        for _ in range(TRIES):
            try:
                reply = self._connection.request("POST", "/compute_reward", dict(zip(names, call, strict=True)))
                if reply.status == 200:
                    return score_of(reply.body)
                problem = f"status {reply.status}: {reply.body!s:.200}"
            except (ConnectionError, TimeoutError, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(f"{self._connection.url}/compute_reward for sample {index}, {TRIES} tries: {problem}")

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()
