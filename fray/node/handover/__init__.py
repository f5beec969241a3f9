"""Passing on of a running node to the next program in the same process, for upgrades.

- `state`: the data: running attempts with their descriptors, zygotes, locks, and the membership.
- `process`: executes the next program in this process, with a limit of time that the kernel enforces.

Who decides and collects is `fray.node.attempts.replacement`.
"""
