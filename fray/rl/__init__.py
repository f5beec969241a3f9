"""Reinforcement learning of language models, in the architecture of NexRL.

Upwards, each may import those above it:

- `core`: what decides, without torch, Trio, clocks and files: tasks and leases, groups and batches, versions of the
  weights, states of the inference servers, advantages. A simulation with faults runs the same code.
- `nexrl_types`: trajectories and batches, of lists, NumPy arrays or tensors, with their padding.
- `model_spec`: which model a run trains. `weights_table`: where each tensor is in a flat buffer of weights.
- `train`: settings of a trainer.
- `inference.requests`: what is asked of an inference server, and what it answers.
- `tensors`: losses, models and the trainer itself; the only folder that imports torch.
- `inference`: inference servers.

What acts on these decisions (actors) is built above it. Importing this package loads neither torch nor Trio.
"""
