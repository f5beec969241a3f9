"""Reinforcement learning of language models, in the architecture of NexRL.

Upwards, each may import those above it:

- `core`: what decides, without torch, Trio, clocks and files: tasks and leases, groups and batches, versions of the
  weights, states of the inference servers, advantages. A simulation with faults runs the same code.

- `tensors`: losses, KL divergences and corrections; the only folder that imports torch.
- `nexrl_types`: trajectories and batches, of lists, NumPy arrays or tensors, with their padding.

What acts on these decisions (actors, inference servers, trainers) is built above it. Importing this package loads
neither torch nor the rest of Fray.
"""
