"""Reinforcement learning of language models, in the architecture of NexRL. See docs/rl.md, docs/rl-internals.md.

Upwards, each may import those above it:

- `core`: what decides, without torch, Trio, clocks and files; a simulation with faults runs the same code.
- `nexrl_types`, `model_spec`, `weights_table`, `train`, `data`: values and settings.
- `journal_file`, `checkpoint`: files of a run. `weight_files`: weights in files of safetensors. `tokenizers`: texts as
  tokens. `nexrl`: components of NexRL's guide.
- `tensors`: losses, models, engine and trainer; the only folder that imports torch.
- `inference`: servers and their client. `messages`: between the parts of a run. `gateway`: agents of episodes.
- `rollout`, `coordinator`, `trainer_process`: the actors. `trainer_gang`, `controller`: the scope that owns them.
- `rollout_worker`: the workers of NexRL's guide, as episodes.
- `run`: settings and results of a run. `run_job`: as a job of its own, and the one that lives. `run_cluster`: where.

Importing this package loads neither torch nor Trio; a name loads its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fray.rl.gateway.agent_address import AgentUrl
    from fray.rl.gateway.agent_gateway import agent_url
    from fray.rl.inference.client import LLM, ModelReply
    from fray.rl.inference.service_client import LLMServiceClient
    from fray.rl.model_spec import TinyLlama
    from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy
    from fray.rl.nexrl.controller import NexRLController
    from fray.rl.nexrl.data_loader import BaseDataLoader
    from fray.rl.nexrl.error_reporter import ErrorInfo, ErrorReporter, ErrorSeverity
    from fray.rl.nexrl.execution import execute, execute_async, set_logging_basic_config
    from fray.rl.nexrl.nexrl_module import NexRLModule
    from fray.rl.nexrl.resource_manager import ActorWrapper, RayActorWrapper, RayResourceManager, ResourceManager
    from fray.rl.nexrl.trajectory_pool import (
        GroupedTrajectoryStore,
        HierarchicalTrajectoryStore,
        SimpleTrajectoryStore,
        TrajectoryPool,
        TrajectoryPoolInstance,
    )
    from fray.rl.nexrl.validator import Validator
    from fray.rl.nexrl.weight_sync_controller import WeightSyncController
    from fray.rl.nexrl_types import Batch, ModelTag, NexRLRole, Trajectory
    from fray.rl.records.run_log import RunResult
    from fray.rl.rollout.scores import Score, score
    from fray.rl.rollout_worker import (
        AgentRolloutWorker,
        BaseEvaluationTarget,
        BaseNexAURolloutWorker,
        BaseRolloutWorker,
        DefaultNexAURolloutWorker,
        EvaluationRunResult,
        Evaluator,
        MockRolloutWorker,
        NexAUEvaluationTarget,
        PigLatinRolloutWorker,
        SimpleRolloutWorker,
    )
    from fray.rl.run import Run
    from fray.rl.train.lora import LoRA
    from fray.rl.train.settings import GRPO, Critic, KlPenalty, OffPolicyCorrection
    from fray.rl.trainer.base_trainer import BaseTrainer
    from fray.rl.trainer.remote_api import (
        RemoteApiCrossEntropyTrainer,
        RemoteApiGrpoTrainer,
        RemoteApiTrainer,
        TinkerServiceHolder,
    )
    from fray.rl.trainer.self_hosted import SelfHostedGrpoTrainer, SelfHostedTrainer
    from fray.rl.trainer.train_service import TrainServiceClient

_MODULES = {
    "ActivityTracker": "nexrl.activity_tracker",
    "ActivityTrackerProxy": "nexrl.activity_tracker",
    "ActorWrapper": "nexrl.resource_manager",
    "AgentRolloutWorker": "rollout_worker",
    "AgentUrl": "gateway.agent_address",
    "BaseDataLoader": "nexrl.data_loader",
    "BaseEvaluationTarget": "rollout_worker",
    "BaseNexAURolloutWorker": "rollout_worker",
    "BaseRolloutWorker": "rollout_worker",
    "BaseTrainer": "trainer.base_trainer",
    "Batch": "nexrl_types",
    "Critic": "train.settings",
    "DefaultNexAURolloutWorker": "rollout_worker",
    "ErrorInfo": "nexrl.error_reporter",
    "ErrorReporter": "nexrl.error_reporter",
    "ErrorSeverity": "nexrl.error_reporter",
    "EvaluationRunResult": "rollout_worker",
    "Evaluator": "rollout_worker",
    "GRPO": "train.settings",
    "GroupedTrajectoryStore": "nexrl.trajectory_pool",
    "HierarchicalTrajectoryStore": "nexrl.trajectory_pool",
    "KlPenalty": "train.settings",
    "LLM": "inference.client",
    "LLMServiceClient": "inference.service_client",
    "LoRA": "train.lora",
    "MockRolloutWorker": "rollout_worker",
    "ModelReply": "inference.client",
    "ModelTag": "nexrl_types",
    "NexAUEvaluationTarget": "rollout_worker",
    "NexRLController": "nexrl.controller",
    "NexRLModule": "nexrl.nexrl_module",
    "NexRLRole": "nexrl_types",
    "OffPolicyCorrection": "train.settings",
    "PigLatinRolloutWorker": "rollout_worker",
    "RayActorWrapper": "nexrl.resource_manager",
    "RayResourceManager": "nexrl.resource_manager",
    "ResourceManager": "nexrl.resource_manager",
    "RemoteApiCrossEntropyTrainer": "trainer.remote_api",
    "RemoteApiGrpoTrainer": "trainer.remote_api",
    "RemoteApiTrainer": "trainer.remote_api",
    "Run": "run",
    "RunResult": "records.run_log",
    "Score": "rollout.scores",
    "SelfHostedGrpoTrainer": "trainer.self_hosted",
    "SelfHostedTrainer": "trainer.self_hosted",
    "SimpleRolloutWorker": "rollout_worker",
    "SimpleTrajectoryStore": "nexrl.trajectory_pool",
    "TinkerServiceHolder": "trainer.remote_api",
    "TinyLlama": "model_spec",
    "TrainServiceClient": "trainer.train_service",
    "Trajectory": "nexrl_types",
    "TrajectoryPool": "nexrl.trajectory_pool",
    "TrajectoryPoolInstance": "nexrl.trajectory_pool",
    "agent_url": "gateway.agent_gateway",
    "Validator": "nexrl.validator",
    "WeightSyncController": "nexrl.weight_sync_controller",
    "execute": "nexrl.execution",
    "execute_async": "nexrl.execution",
    "score": "rollout.scores",
    "set_logging_basic_config": "nexrl.execution",
}
"""Module of each public name, in `fray.rl`."""

__all__ = [
    "GRPO",
    "LLM",
    "ActivityTracker",
    "ActivityTrackerProxy",
    "ActorWrapper",
    "AgentRolloutWorker",
    "AgentUrl",
    "BaseDataLoader",
    "BaseEvaluationTarget",
    "BaseNexAURolloutWorker",
    "BaseRolloutWorker",
    "BaseTrainer",
    "Batch",
    "Critic",
    "DefaultNexAURolloutWorker",
    "ErrorInfo",
    "ErrorReporter",
    "ErrorSeverity",
    "EvaluationRunResult",
    "Evaluator",
    "GroupedTrajectoryStore",
    "HierarchicalTrajectoryStore",
    "KlPenalty",
    "LLMServiceClient",
    "LoRA",
    "MockRolloutWorker",
    "ModelReply",
    "ModelTag",
    "NexAUEvaluationTarget",
    "NexRLController",
    "NexRLModule",
    "NexRLRole",
    "OffPolicyCorrection",
    "PigLatinRolloutWorker",
    "RayActorWrapper",
    "RayResourceManager",
    "RemoteApiCrossEntropyTrainer",
    "RemoteApiGrpoTrainer",
    "RemoteApiTrainer",
    "ResourceManager",
    "Run",
    "RunResult",
    "Score",
    "SelfHostedGrpoTrainer",
    "SelfHostedTrainer",
    "SimpleRolloutWorker",
    "SimpleTrajectoryStore",
    "TinkerServiceHolder",
    "TinyLlama",
    "TrainServiceClient",
    "Trajectory",
    "TrajectoryPool",
    "TrajectoryPoolInstance",
    "Validator",
    "WeightSyncController",
    "agent_url",
    "execute",
    "execute_async",
    "score",
    "set_logging_basic_config",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'fray.rl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"fray.rl.{_MODULES[name]}"), name)
