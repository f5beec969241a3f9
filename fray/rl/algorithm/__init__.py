"""Algorithms by the names of NexRL's guide.

- `core_algos`: advantages of GRPO, on tensors and on trajectories.

The numbers come from `fray.rl.core.advantages`. Nothing here imports torch: tensors
bring their library with them.
"""
