"""Evaluators of a recipe: what an agent has answered becomes a reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BaseEvaluationTarget:
    """Answer of an agent."""

    final_answer: str


@dataclass
class NexAUEvaluationTarget(BaseEvaluationTarget):
    """Answer of an agent, and the conversation that led to it."""

    final_answer: str
    observation: list[dict[str, Any]] = field(default_factory=list)
    """Messages of all turns."""


@dataclass
class EvaluationRunResult:
    """Result of an evaluation."""

    reward: float = 0.0
    ground_truth: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further finite numbers, of which a validation has the means."""
    extra_info: dict[str, Any] = field(default_factory=dict)


class Evaluator(ABC):
    """Judge of the answers to the rows of a task."""

    @abstractmethod
    def evaluate(self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        """Return reward and metrics of an answer to a row of the data."""
