"""Rollout workers and evaluators of NexRL's guide. See docs/from-nexrl.md.

- `evaluation`: evaluators, their targets and results. `made_trajectories`: what completes a worker's trajectories.
- `base_rollout_worker`: the base class; `prompt_workers`, `agent_worker` with `agent_tools`, `pig_latin_worker`,
  `base_nexau_rollout_worker` with `nexau_traces`: the workers.
- `episodes`: steps of workers as episodes of a run.
"""

from fray.rl.rollout_worker.agent_worker import AgentRolloutWorker
from fray.rl.rollout_worker.base_nexau_rollout_worker import BaseNexAURolloutWorker, DefaultNexAURolloutWorker
from fray.rl.rollout_worker.base_rollout_worker import BaseRolloutWorker
from fray.rl.rollout_worker.episodes import WorkerEpisode
from fray.rl.rollout_worker.evaluation import (
    BaseEvaluationTarget,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
)
from fray.rl.rollout_worker.pig_latin_worker import PigLatinRolloutWorker
from fray.rl.rollout_worker.prompt_workers import (
    MockRolloutWorker,
    SimpleRolloutWorker,
    SingleTurnMathRolloutWorker,
)

__all__ = [
    "AgentRolloutWorker",
    "BaseEvaluationTarget",
    "BaseNexAURolloutWorker",
    "BaseRolloutWorker",
    "DefaultNexAURolloutWorker",
    "EvaluationRunResult",
    "Evaluator",
    "MockRolloutWorker",
    "NexAUEvaluationTarget",
    "PigLatinRolloutWorker",
    "SimpleRolloutWorker",
    "SingleTurnMathRolloutWorker",
    "WorkerEpisode",
]
