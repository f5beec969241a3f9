"""Trainers by the names of NexRL's guide, and the base class of your own. See docs/rl.md, "Own trainers".

- `base_trainer`: `BaseTrainer`: a method from trajectories to metrics, and the policy of the run to train.
- `train_service`: the model behind verbs: forward, forward_backward, optim_step, checkpoints.
- `self_hosted`: trainers that prepare a padded batch, GRPO among them.
- `tinker_service`: a service with the Tinker API, over HTTP, as what trains.
- `remote_api`: trainers that send datums to a service of Tinker's verbs, there or in their process.

Importing it loads no torch; the process of a trainer does.
"""

from fray.rl.trainer.base_trainer import BaseTrainer
from fray.rl.trainer.remote_api import (
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    RemoteApiTrainer,
    TinkerServiceHolder,
)
from fray.rl.trainer.self_hosted import SelfHostedGrpoTrainer, SelfHostedTrainer
from fray.rl.trainer.train_service import MockTrainService, TorchTrainService, TrainServiceClient

__all__ = [
    "BaseTrainer",
    "MockTrainService",
    "RemoteApiCrossEntropyTrainer",
    "RemoteApiGrpoTrainer",
    "RemoteApiTrainer",
    "SelfHostedGrpoTrainer",
    "SelfHostedTrainer",
    "TinkerServiceHolder",
    "TorchTrainService",
    "TrainServiceClient",
]
